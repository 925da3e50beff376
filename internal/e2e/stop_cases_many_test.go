package e2e

import (
	"fmt"
	"strings"
	"time"

	"tagout/internal/wire"
)

// heldByTheKernel (S06): a process of the kid sleeps in the kernel on a frozen filesystem, another is held in its
// exit by a tracer outside. The other layers are done, the session layer says who remains and in what state, and
// the stop completes by itself when the cause clears.
func (s *stopCases) heldByTheKernel() {
	kid := s.spawn("stuck")
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	d := s.newDisk(16, s.t.TempDir())
	d.into(kid, s.pidOf(kid, "sleep"))
	d.tell("freeze")
	running(s.t, s.box, kid.Name, "/bin/dd", "if=/dev/zero", "of=/workspace/disk/x", "bs=4096", "count=1")
	dd := s.pidOf(kid, "dd")
	s.until("dd sleeps in the kernel", func() error { return inState(dd, "D") })
	traced := s.pidOf(kid, "sleep")
	letGo := s.hold(traced)
	defer letGo()

	rep := s.stop(kid.Name)
	lr := rep.Layers[wire.LayerSession]
	if rep.State != wire.StateContained || lr.State != wire.StateContained || lr.Observed != 0 {
		s.t.Errorf("report %+v", rep)
	}
	for _, want := range []string{fmt.Sprintf("%d (dd) in state D", dd), fmt.Sprintf("%d (sleep) in state t", traced)} {
		if !strings.Contains(lr.Detail, want) {
			s.t.Errorf("the report does not name %q: %s", want, lr.Detail)
		}
	}
	for _, l := range []wire.Layer{wire.LayerNetwork, wire.LayerCredential} {
		if rep.Layers[l].State != wire.StateObserved {
			s.t.Errorf("%s: %+v", l, rep.Layers[l])
		}
	}
	s.waitState(rep.Stop, wire.StateContained)
	letGo()
	s.until("the traced process is gone", func() error {
		for _, pid := range s.pids(kid) {
			if pid == traced {
				return fmt.Errorf("%v", s.pids(kid))
			}
		}
		return nil
	})
	if tag, err := s.tag(rep.Stop); err != nil || tag.State != wire.StateContained {
		s.t.Errorf("with one of two causes cleared: %+v, %v", tag, err)
	}
	d.tell("thaw")
	s.waitState(rep.Stop, wire.StateObserved)
	s.box.Destroy(kid.Name) // its mount of the disk goes with it
}

// many (S07): a fork bomb at the pids limit, many sleepers, a big resident set. Bounded time, in the report.
func (s *stopCases) many() {
	bomb, sleepers, resident := 500, 1000, 512
	if *heavy {
		bomb, sleepers, resident = 6000, 10_000, 12<<10
	}
	kid := s.spawnSized("bomb", bomb, "8GiB")
	running(s.t, s.box, kid.Name, "/workspace/hostile", "storm")
	s.stopMany("a fork bomb at its limit", kid, bomb-20)

	kid = s.spawnSized("sleepers", sleepers+100, "8GiB")
	running(s.t, s.box, kid.Name, "/workspace/hostile", "storm", fmt.Sprint(sleepers))
	s.stopMany("sleepers", kid, sleepers)

	kid = s.spawnSized("resident", 64, fmt.Sprintf("%dMiB", resident+512))
	s.runWithin(soon+time.Duration(resident)*20*time.Millisecond, kid.Name, asRole("big", fmt.Sprint(resident))...) // each page is zeroed
	s.stopMany(fmt.Sprintf("%d MiB resident", resident), kid, 1)
}

func (s *stopCases) stopMany(what string, kid wire.Kid, least int) {
	s.t.Helper()
	n := 0
	s.box.Until(time.Minute, what+" are there", func() error {
		if n = len(s.pids(kid)); n < least {
			return fmt.Errorf("%d processes of %d", n, least)
		}
		return nil
	})
	rep := s.stop(kid.Name)
	s.observed(rep)
	if left := s.members(kid.Name); len(left) > 0 {
		s.t.Errorf("%s: %d are left", what, len(left))
	}
	s.t.Logf("%s: %d processes observed dead %v after the order", what, n, rep.Layers[wire.LayerSession].Observed)
	s.box.Destroy(kid.Name)
}

func inState(pid int, want string) error {
	state, err := stateOf(pid)
	if err == nil && state != want {
		err = fmt.Errorf("process %d is in state %s", pid, state)
	}
	return err
}
