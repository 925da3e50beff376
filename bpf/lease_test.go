package bpf

import (
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// soonOver is a lease that outlives any test.
func soonOver() time.Duration { return time.Duration(bootNow()) + time.Hour } // boot time

// renewed renews all leases and checks how many there were.
func renewed(t *testing.T, m *Maps, want int) {
	t.Helper()
	if n, err := m.RenewLeases(soonOver()); n != want || err != nil {
		t.Errorf("renewed %d leases, %v; want %d", n, err, want)
	}
}

// A connection falls silent when its lease runs out, without a write, and goes on when the lease is renewed. The
// two daemon-side hooks judge the same session, so one of them is enough here; packet_test.go compares them all.
func TestTheKernelEndsALeaseByItself(t *testing.T) {
	s, m := installed(t, "tbpfl1")
	w := newWorld(t)
	echoTCP(t, at(tName, tPort))
	kid := w.start(t, s.kid)
	spare := kid.socket(v4, stream)
	fd, errno := kid.dial(v4, stream, at(tName, tPort))
	if errno != 0 || !kid.exchange(fd) {
		t.Fatalf("no connection to cut: %v", errno)
	}
	until := time.Duration(bootNow()) + 200*time.Millisecond // boot time
	if _, err := m.RenewLeases(until); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nothing comes back any more", func() bool { return !kid.exchange(fd) })
	if now := time.Duration(bootNow()); now < until { // boot time
		t.Errorf("it was cut %v before its lease ran out", until-now)
	}
	c, err := m.Counters(tMark)
	must(t, err)
	if c.LastPass >= until {
		t.Errorf("a packet passed %v after the lease", c.LastPass-until)
	}
	if a := kid.call(request{Op: "socket", Domain: v4, Type: stream}); a.Errno != unix.EPERM {
		t.Errorf("making a socket without a lease: %v, want %v", a.Errno, unix.EPERM)
	}
	if a := kid.call(request{Op: "reconnect", FD: spare, Addr: at(tName, tPort), Len: 1}); a.Errno != unix.EPERM {
		t.Errorf("connecting without a lease: %v, want %v", a.Errno, unix.EPERM)
	}
	renewed(t, m, 1)
	fd, errno = kid.dial(v4, stream, at(tName, tPort))
	if errno != 0 || !kid.exchange(fd) {
		t.Errorf("with a new lease nothing passes: %v", errno)
	}
}

// Renewals that race with the end of sessions bring none of them back.
func TestARenewalBringsNoSessionBack(t *testing.T) {
	_, m := installed(t, "tbpfl2")
	done := make(chan struct{})
	stop := make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				if _, err := m.RenewLeases(soonOver()); err != nil {
					t.Error(err)
				}
			}
		}
	}()
	for i := range uint32(2000) {
		mark := tMark + 1 + i
		must(t, m.PutSession(mark, SessionEntry{State: StateActive, Addr: tKid}))
		must(t, m.GrantLease(mark, soonOver()))
		must(t, m.DeleteSession(mark))
		if until, err := m.Lease(mark); err != nil || until != 0 {
			t.Fatalf("session %d has a lease until %v after its end, %v", i, until, err)
		}
	}
	close(stop)
	<-done
	renewed(t, m, 1) // the test session's own
}

func TestMarkOfACgroup(t *testing.T) {
	s, m := installed(t, "tbpfl3")
	if mark, err := m.MarkOf(cgroupID(t, s.kid)); mark != tMark || err != nil {
		t.Errorf("mark %#x, %v", mark, err)
	}
	if _, err := m.MarkOf(1); !errors.Is(err, ErrNoSession) {
		t.Errorf("of no kid's cgroup: %v", err)
	}
}
