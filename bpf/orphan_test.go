package bpf

import (
	"errors"
	"io/fs"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// orphan fills a connection, kills its kid, removes the kid's cgroup, calls stop and then reads the connection
// to its end. It returns how much the kid had sent and how much arrived.
func orphan(t *testing.T, s *setup, stop func()) (sent, arrived int) {
	t.Helper()
	w := newWorld(t)
	ln, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at(tName, tPort)))
	must(t, err)
	defer ln.Close()
	kid := w.start(t, s.kid)
	fd := kid.socket(v4, stream)
	kid.expect(request{Op: "connect", FD: fd, Addr: at(tName, tPort)})
	server, err := ln.Accept()
	must(t, err)
	defer server.Close()
	for { // until the buffers are full: nobody reads
		a := kid.call(request{Op: "send", FD: fd, Len: 1 << 20})
		if a.Errno != 0 {
			break
		}
		sent += a.N
	}
	must(t, kid.cmd.Process.Kill())
	_ = kid.cmd.Wait()
	eventually(t, "removing the kid's cgroup", func() bool {
		err := unix.Rmdir(s.kid)
		return err == nil || errors.Is(err, fs.ErrNotExist)
	})
	stop()
	buf := make([]byte, 1<<20) // reading opens the window: now the kernel wants to send the rest
	for {
		must(t, server.SetReadDeadline(time.Now().Add(500*time.Millisecond)))
		n, err := server.Read(buf)
		arrived += n
		if err != nil {
			return sent, arrived
		}
	}
}

// A killed kid's kernel goes on sending what its sockets still hold, even when the cgroup's directory is gone.
// The stop must reach that too.
func TestStopReachesOrphanedSockets(t *testing.T) {
	s, m := installed(t, "tbpfm")
	var since uint64
	var before Counters
	sent, arrived := orphan(t, s, func() {
		var err error
		must(t, m.StopSession(tMark))
		since = bootNow()
		before, err = m.Counters(tMark)
		must(t, err)
	})
	after, err := m.Counters(tMark)
	must(t, err)
	silentSince(t, m, since)
	if after.Kid.PassedUp != before.Kid.PassedUp || after.Kid.DroppedUp.Packets+after.Kid.DroppedDown.Packets == 0 {
		t.Errorf("after the stop %+v, before %+v", after.Kid, before.Kid)
	}
	if arrived >= sent {
		t.Errorf("all %d bytes arrived", sent)
	}
}

// The control: without the stop the dead kid's bytes all arrive.
func TestOrphanedSocketsDeliverWithoutAStop(t *testing.T) {
	s, _ := installed(t, "tbpfo")
	if sent, arrived := orphan(t, s, func() {}); arrived != sent || sent == 0 {
		t.Errorf("%d of %d bytes arrived", arrived, sent)
	}
}
