package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/clockstep"
	"tagout/internal/control"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// whoMayRelease (S16): a spawn under a tag, a release by somebody who did not place it, with a key that is nobody's,
// without any, and twice. Each is refused, naming who can, and on record. (Every order that is refused, and the
// operators' commands: TestOrdersThatAreRefused, TestAuthorityStories.)
func (s *stopCases) whoMayRelease() {
	kid := s.spawn("tagged")
	rep := s.box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, By: practice.Authority, Reason: "it sends mail"})
	s.observed(rep)
	s.box.Destroy(kid.Name)
	if _, err := s.box.TrySpawn(kid.Name, s.stopCard("tagged", 64, "64MiB"), s.inputs()); control.Status(err) != http.StatusLocked ||
		!strings.Contains(err.Error(), practice.Authority) || !strings.Contains(err.Error(), "it sends mail") {
		s.t.Errorf("a spawn under the tag: %v", err)
	}
	s.box.WaitRecord("the refused spawn", func(r *audit.Record) bool {
		return r.Event == audit.EventKidRefused && r.Kid == kid.Name && r.Reason == reason.Tagged && r.Outcome == audit.OutcomeDeny
	})

	unsigned := wire.ReleaseRequest{Stop: rep.Stop, By: practice.Authority, Reason: "test"}
	err := s.box.Client(instance.Killswitchd).Call(s.t.Context(), http.MethodPost, "/v1/release", unsigned, nil)
	s.wantRefused("a release without a signature", err, http.StatusForbidden, practice.Authority)
	s.waitRefusal("a release without a signature", audit.EventReleaseRefused, reason.OrderUnsigned, err)

	private, _, err := authority.NewKey(practice.Authority) // the name fits, the key is another
	if err != nil {
		s.t.Fatal(err)
	}
	list, err := authority.NewBook(s.box.Inst.AuthorityFile(), 0).List()
	if err != nil {
		s.t.Fatal(err)
	}
	order := authority.Order{Action: authority.ActionRelease, Stop: rep.Stop, By: practice.Authority, Reason: "test", Box: list.Box}
	raw, err := authority.Sign(authority.New(order, time.Now(), authority.Life), private)
	if err != nil {
		s.t.Fatal(err)
	}
	_, err = s.box.Deliver(wire.SignedOrder{Note: string(raw)})
	s.wantRefused("a release with the wrong key", err, 0, practice.Authority)
	s.waitRefusal("a release with the wrong key", audit.EventOrderRefused, reason.OrderKey, err)

	tag, err := s.box.TryRelease(rep.Stop, practice.Second)
	if err != nil || !tag.Released.IsZero() || !strings.Contains(tag.CanRelease, practice.Authority) {
		s.t.Errorf("a release by one who did not place it: %+v, %v", tag, err)
	}
	if _, err := s.tag(rep.Stop); err != nil {
		s.t.Errorf("the tag is off: %v", err)
	}
	s.box.WaitRecord("the first of two", func(r *audit.Record) bool {
		return r.Event == audit.EventTagApproved && r.Fields["stop"] == rep.Stop && r.Actor == practice.Second
	})
	if tag, err = s.box.TryRelease(rep.Stop, practice.Authority); err != nil || tag.Released.IsZero() {
		s.t.Fatalf("a release by whoever placed it: %+v, %v", tag, err)
	}
	_, err = s.box.TryRelease(rep.Stop, practice.Authority)
	s.wantRefused("a second release", err, http.StatusConflict, "already released by "+practice.Authority)
	s.waitRefusal("a second release", audit.EventReleaseRefused, reason.Tagged, err)
	if _, err := s.box.TrySpawn(kid.Name, s.stopCard("tagged", 64, "64MiB"), s.inputs()); err != nil {
		s.t.Errorf("a spawn after the release: %v", err)
	}
}

// wantRefused: status 0 is any.
func (s *stopCases) wantRefused(what string, err error, status int, names string) {
	s.t.Helper()
	if got := control.Status(err); got < 400 || got >= 500 || status != 0 && got != status || !strings.Contains(err.Error(), names) {
		s.t.Errorf("%s: %v, want a refusal that names %q", what, err, names)
	}
}

// waitRefusal waits for the record that says what the caller was told.
func (s *stopCases) waitRefusal(what, event string, code reason.Code, told error) {
	s.t.Helper()
	var no *control.Error
	if !errors.As(told, &no) {
		s.t.Errorf("%s: %v", what, told)
		return
	}
	s.box.WaitRecord(what, func(r *audit.Record) bool {
		return r.Event == event && r.Reason == code && r.Outcome == audit.OutcomeDeny && r.Detail == no.Problem.Detail
	})
}

// theClockJumps (S14) steps the machine's wall clock an hour forward and back, with a kid at rest and in the middle of
// a stop: no false stop, no missed stop, and no time in the report that the jump made. It runs with -stop.wallclock
// alone, since everybody on the machine sees the clock jump, for two seconds at most.
func (s *stopCases) theClockJumps() {
	kid := s.spawn("clock")
	token := s.agent(kid)
	forward := s.step()
	s.goesOn(kid, "an hour later", time.Second)
	if late, err := forward.Back(); err != nil || late {
		s.t.Fatalf("setting the clock back: %v, by itself: %v", err, late)
	}
	s.goesOn(kid, "an hour earlier, for longer than its kernel lease", 6*time.Second)

	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	letGo := s.hold(s.pidOf(kid, "sleep")) // so that the stop has a middle
	defer letGo()
	done := make(chan wire.StopReport, 1)
	go func() { done <- s.stop(kid.Name) }()
	s.until("the stop is under way", func() error {
		if s.box.Net.Sink.LastByte(kid.Name) > practice.Now()-200*time.Millisecond {
			return errors.New("bytes arrive")
		}
		return nil
	})
	forward = s.step()
	letGo()
	rep := <-done
	if _, err := forward.Back(); err != nil {
		s.t.Fatalf("setting the clock back: %v", err)
	}
	s.observed(rep)
	if took := rep.Layers[wire.LayerSession].Observed; took > 6*time.Second {
		s.t.Errorf("the report says that the stop took %v", took)
	}
	s.reallyStopped("across a jump", kid, token, practice.Now())
}

// goesOn fails unless a kid's agent is at work a while from now, and processes of it live.
func (s *stopCases) goesOn(kid wire.Kid, when string, after time.Duration) {
	s.t.Helper()
	from := practice.Now() + after
	s.until("the agent is at work "+when, func() error {
		last := min(s.box.Net.Sink.LastByte(kid.Name), s.box.Net.API.Uses.Tally("agent:"+kid.Name).LastAccepted)
		if last < from {
			return fmt.Errorf("its last byte or token use came %v before", (from - last).Round(time.Millisecond))
		}
		return nil
	})
	if len(s.pids(kid)) == 0 {
		s.t.Errorf("%s no process of the kid lives", when)
	}
}

// step sets the machine's clock forward; it is set back when the test ends, at the latest.
func (s *stopCases) step() *clockstep.Step {
	s.t.Helper()
	st, err := clockstep.Start(s.t.Context(), []string{filepath.Join(s.box.Bin, "tagout"), "drill", "hold-clock"}, drill.ClockStep)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { st.Back() }) // back already, where all went well
	return st
}
