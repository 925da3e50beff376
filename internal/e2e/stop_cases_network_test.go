package e2e

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// portCut is cut.vendor.test: it takes connections and reads nothing until it is told to.
const portCut = 7200

// slowReader is a receiver that does not read. What has reached it is what the kernel says.
type slowReader struct {
	s     *stopCases
	mu    sync.Mutex
	conns []*net.TCPConn
}

func (s *stopCases) slowReader() *slowReader {
	r := &slowReader{s: s}
	l := s.listen(s.box.Net.FilesAddr(), portCut)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			r.mu.Lock()
			r.conns = append(r.conns, conn.(*net.TCPConn))
			r.mu.Unlock()
		}
	}()
	s.t.Cleanup(func() {
		l.Close()
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, conn := range r.conns {
			conn.Close()
		}
	})
	return r
}

// last is the connection that was opened last.
func (r *slowReader) last() *net.TCPConn {
	r.s.t.Helper()
	var conn *net.TCPConn
	r.s.until("a connection arrives", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.conns) == 0 {
			return errors.New("none yet")
		}
		conn = r.conns[len(r.conns)-1]
		return nil
	})
	return conn
}

// arrived is how many bytes the kernel has taken in order on the connection.
func (r *slowReader) arrived(conn *net.TCPConn) uint64 {
	r.s.t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		r.s.t.Fatal(err)
	}
	var info *unix.TCPInfo
	var infoErr error
	if err := raw.Control(func(fd uintptr) { info, infoErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); err != nil || infoErr != nil {
		r.s.t.Fatal(err, infoErr)
	}
	return info.Bytes_received
}

// uploads has the kid send zeros to the reader until its socket takes no more, and returns the connection, stuck
// and with megabytes queued on the way.
func (r *slowReader) uploads(kid wire.Kid) *net.TCPConn {
	s := r.s
	s.t.Helper()
	r.mu.Lock()
	before := len(r.conns)
	r.mu.Unlock()
	s.run(kid.Name, "/usr/bin/python3", "-c", `
import os, socket
s = socket.create_connection(("cut.vendor.test", 7200))
s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)
s.settimeout(1)
sent = 0
try:
    while True:
        sent += s.send(bytes(1 << 20))
except TimeoutError:
    with open("up.new", "w") as f:
        f.write(str(sent))
    os.rename("up.new", "up")
s.settimeout(None)
while True:
    s.send(bytes(1 << 20))
`)
	s.until("the upload's own connection", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.conns) != before+1 {
			return fmt.Errorf("%d connections", len(r.conns)-before)
		}
		return nil
	})
	conn := r.last()
	raw, err := os.ReadFile(filepath.Join(s.box.Inst.KidDir(kid.Name), "workspace", "up"))
	if err != nil {
		s.t.Fatal(err)
	}
	var sent uint64
	fmt.Sscan(string(raw), &sent)
	got := r.arrived(conn)
	s.t.Logf("%s sent %d bytes, %d of them reached the receiver's kernel", kid.Name, sent, got)
	if sent < got+(3<<20) {
		s.t.Errorf("only %d bytes are queued: the case wants some 4 MB", sent-got)
	}
	return conn
}

// drain reads for as long as bytes come, and returns how many did.
func (r *slowReader) drain(conn *net.TCPConn) (n uint64) {
	buf := make([]byte, 1<<20)
	for {
		conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond)) // silence can only be seen by listening for a while
		got, err := conn.Read(buf)
		n += uint64(got)
		if err != nil {
			return n
		}
	}
}

// queuedToASlowReader (S08): the network layer alone cuts an upload with megabytes queued to a receiver that does
// not read. When it reads, it gets what had reached it before the cut and not a byte more. The same upload whose
// session layer alone was fired goes on: the kernel delivers what is queued for the dead.
func (s *stopCases) queuedToASlowReader() {
	r := s.slowReader()
	kid := s.spawn("queue")
	conn := r.uploads(kid)
	if n := s.sockets(kid); n < 2 {
		s.t.Errorf("only %d of its sockets are seen: the case shows nothing", n)
	}
	rep := s.stop(kid.Name, wire.LayerNetwork)
	s.observed(rep)
	before := r.arrived(conn)
	if n := s.sockets(kid); n != 0 {
		s.t.Errorf("%d of its sockets are left", n)
	}
	if got := r.drain(conn); got != before || r.arrived(conn) != before {
		s.t.Errorf("the receiver had %d bytes when the cut was complete and got %d, its kernel %d", before, got, r.arrived(conn))
	}
	if len(s.pids(kid)) == 0 {
		s.t.Error("the network layer killed the kid")
	}

	uncut := s.spawn("uncut")
	conn = r.uploads(uncut)
	s.observed(s.stop(uncut.Name, wire.LayerSession))
	before = r.arrived(conn)
	if got := r.drain(conn); got <= before {
		s.t.Errorf("without the network layer the receiver got %d bytes and no more either: the case shows nothing", got)
	} else {
		s.t.Logf("without the network layer %d bytes more arrived after the last process was dead", got-before)
	}
}

// sockets counts the TCP sockets at the host's side of the kid's connections to the reader: the proxy's towards the
// kid, and those of the proxy towards the reader.
func (s *stopCases) sockets(kid wire.Kid) int {
	s.t.Helper()
	raw, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		s.t.Fatal(err)
	}
	kidEnd, upstream := hexAddr(kid.Addr), hexAddr(s.box.Net.FilesAddr())+fmt.Sprintf(":%04X", portCut)
	n := 0
	for _, line := range strings.Split(string(raw), "\n")[1:] {
		f := strings.Fields(line)
		// 06 is TIME-WAIT, which sends nothing of its own.
		if len(f) > 3 && f[3] != "06" && (strings.HasPrefix(f[2], kidEnd+":") || f[2] == upstream) {
			n++
		}
	}
	return n
}

// hexAddr is an address as /proc/net/tcp writes it on a little-endian machine.
func hexAddr(a netip.Addr) string {
	b := a.As4()
	return strings.ToUpper(hex.EncodeToString([]byte{b[3], b[2], b[1], b[0]}))
}

// everyRoad (S09): a CONNECT tunnel, HTTP/2, plain TCP and lookups are all cut the same way by the network layer
// alone, and none comes back though the kid goes on trying. The credential layer, fired before, cuts none of them.
func (s *stopCases) everyRoad() {
	kid := s.spawn("roads")
	s.play(kid.Name, "roads", s.gateway())
	flows := func(what string, from map[string]int64) {
		s.t.Helper()
		s.until(what, func() error {
			for road, n := range s.trips(kid) {
				if n < from[road]+5 {
					return fmt.Errorf("%s: %d after %d", road, n, from[road])
				}
			}
			return nil
		})
	}
	flows("all roads are open", nil)
	s.observed(s.stop(kid.Name, wire.LayerCredential))
	flows("all roads are open without a token", s.trips(kid))
	s.observed(s.stop(kid.Name, wire.LayerNetwork))
	cut, tries := s.trips(kid), s.size(kid, "tries")
	s.until("the kid has tried in vain", func() error {
		if n := s.size(kid, "tries"); n < tries+8 {
			return fmt.Errorf("%d tries after %d", n, tries)
		}
		return nil
	})
	for road, n := range s.trips(kid) {
		if n != cut[road] {
			s.t.Errorf("%s: %d round trips after the cut", road, n-cut[road])
		}
	}
}

// roads are what walkRoads keeps open; each appends a byte to a file of its name for every round trip.
func roads() []string { return []string{"connect", "http2", "tcp", "dns"} }

func (s *stopCases) trips(kid wire.Kid) map[string]int64 {
	out := map[string]int64{}
	for _, road := range roads() {
		out[road] = s.size(kid, road)
	}
	return out
}

func (s *stopCases) size(kid wire.Kid, file string) int64 {
	info, err := os.Stat(filepath.Join(s.box.Inst.KidDir(kid.Name), "workspace", file))
	if err != nil {
		return 0
	}
	return info.Size()
}

// policyTightened (S10): an open connection with data queued, that a tighter policy no longer allows, is cut as by a
// stop: the receiver gets nothing more, and a record says why. (That nothing else is cut, and that a bad card
// changes nothing: TestANewPolicyCutsWhatItNoLongerAllows.)
func (s *stopCases) policyTightened() {
	r := s.slowReader()
	kid := s.spawn("tight")
	conn := r.uploads(kid)
	tight := strings.Replace(s.stopCard("tight", 256, "512MiB"), "    - {host: cut.vendor.test, ports: [7200], protocol: tcp}\n", "", 1)
	file := filepath.Join(s.t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(tight), 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.box.Must("policy", "set", kid.Name, "--card", file, "--key", s.box.KeyFile(practice.Authority), "--reason", "test")
	before := r.arrived(conn)
	s.until("both sockets are gone", func() error {
		if n := s.sockets(kid); n != 0 {
			return fmt.Errorf("%d are left", n)
		}
		return nil
	})
	// One segment may be in flight; a stop's first write to the kernel allows not even that.
	if got := r.drain(conn); got > before+64<<10 {
		s.t.Errorf("the receiver had %d bytes when the policy was set, and got %d", before, got)
	}
	rec := s.box.WaitRecord("the cut", func(rec *audit.Record) bool {
		return rec.Session == kid.Session && rec.Event == audit.EventConnClosed && named("cut.vendor.test")(rec)
	})
	if rec.Reason == reason.OK {
		s.t.Errorf("the record does not say why: %+v", rec)
	}
	if _, err := os.Stat(kid.Cgroup); err != nil || len(s.pids(kid)) == 0 {
		s.t.Errorf("the kid is gone: %v", err)
	}
}

// aDenialHitsOneConnection (S15): a connection that is correctly denied fails, and nothing else: the process that
// tried goes on, and so does what it had open.
func (s *stopCases) aDenialHitsOneConnection() {
	kid := s.spawn("denied")
	out := s.box.Exec(kid.Name, "/bin/bash", "-c", fmt.Sprintf(`
exec 3<>/dev/tcp/echo.vendor.test/7100
ask() { echo "$1" >&3; IFS= read -r -t 10 back <&3; echo "$back"; }
ask before
(exec 4<>/dev/tcp/%v/80) 2>/dev/null && echo "got out"
(exec 4<>/dev/tcp/evil.test/80) 2>/dev/null && echo "got out"
(exec 4<>/dev/tcp/echo.vendor.test/7101) 2>/dev/null && echo "got out"
ask after`, s.box.Net.EvilAddr()))
	if out.Exit.Code != 0 || out.Stdout != "before\nafter\n" {
		s.t.Errorf("%+v", out)
	}
	if n := len(s.denied(kid, func(*audit.Record) bool { return true })); n == 0 {
		s.until("the denials are recorded", func() error {
			if len(s.denied(kid, func(*audit.Record) bool { return true })) == 0 {
				return errors.New("none yet")
			}
			return nil
		})
	}
	if err := s.inState(kid.Name, wire.KidRunning); err != nil {
		s.t.Error(err)
	}
}
