package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// agent starts the hostile agent in the kid and returns its token once bytes flow and the token is accepted.
func (s *stopCases) agent(kid wire.Kid) (token string) {
	s.t.Helper()
	running(s.t, s.box, kid.Name, "/workspace/hostile", "agent", "-parts", "ticks,token", "-tag", kid.Name)
	s.until("the agent is at work", func() error {
		token = s.box.Net.Sink.Token(kid.Name)
		if token == "" || s.box.Net.API.Uses.Tally("agent:"+kid.Name).Accepted < 3 {
			return errors.New("not yet")
		}
		return nil
	})
	return token
}

// reallyStopped looks from outside, whatever the report says: no process, no byte after the report, no token.
func (s *stopCases) reallyStopped(what string, kid wire.Kid, token string, reported time.Duration) {
	s.t.Helper()
	if left := s.members(kid.Name); len(left) > 0 {
		s.t.Errorf("%s: %v is left", what, left)
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Second)
	defer cancel()
	if s.accepted(ctx, token) {
		s.t.Errorf("%s: its token is accepted", what)
	}
	if last := s.box.Net.Sink.LastByte(kid.Name); last > reported {
		s.t.Errorf("%s: a byte arrived %v after the report", what, last-reported)
	}
}

// accepted says whether credd accepts the token now. No answer is a no.
func (s *stopCases) accepted(ctx context.Context, token string) bool {
	credd := control.NewClient(s.box.Inst.Socket(instance.Credd))
	defer credd.CloseIdle()
	active, err := practice.Introspect(ctx, credd, token)
	return err == nil && active
}

// everythingElseBroken (S12): each part of the box but killswitchd is broken in the middle of a kid's work. The
// stop is complete in time all the same, as seen from outside, and its report says what it did without. (The BPF
// filesystem really unmounted: TestStopWithHalfTheBoxBroken in cmd/killswitchd.)
func (s *stopCases) everythingElseBroken() {
	for _, how := range []struct {
		name   string
		breaks func() (repair func())
		want   string // in what was degraded, or in a layer's detail
	}{
		{"the audit disk is full", s.auditDiskFull, "no space left on device"},
		{"the audit disk hangs", s.auditDiskHangs, "the disk has not answered"},
		{"sandboxd stands still", func() func() { s.box.Freeze(instance.Sandboxd); return func() { s.box.Thaw(instance.Sandboxd) } }, "sandboxd stands still"},
		{"proxy is dead", s.proxyDead, "proxy is not running"},
		{"credd stands still", func() func() { s.box.Freeze(instance.Credd); return func() { s.box.WaitHealthy(instance.Credd) } }, "credd killed"},
		{"the pins are gone", s.pinsGone, "the BPF filesystem is not what it was"},
	} {
		kid := s.spawn(strings.ToLower(strings.ReplaceAll(how.name, " ", "-")))
		token := s.agent(kid)
		repair := sync.OnceFunc(how.breaks())
		s.t.Cleanup(repair)
		began := time.Now()
		rep := s.stop(kid.Name)
		took, reported := time.Since(began), practice.Now()
		if took > 5*time.Second {
			s.t.Errorf("%s: the stop took %v", how.name, took)
		}
		if rep.State != wire.StateObserved {
			s.t.Errorf("%s: %+v", how.name, rep)
		}
		told := strings.Join(rep.Degraded, "; ") + rep.Layers[wire.LayerCredential].Detail
		if !strings.Contains(told, how.want) {
			s.t.Errorf("%s: the report does not say %q: %q", how.name, how.want, told)
		}
		s.reallyStopped(how.name, kid, token, reported)
		repair()
	}
	s.tagDiskFull()
	healthy := s.spawn("healthy")
	token := s.agent(healthy)
	if rep := s.stop(healthy.Name); len(rep.Degraded) > 0 {
		s.t.Errorf("with all repaired the report says %q", rep.Degraded)
	}
	s.reallyStopped("healthy", healthy, token, practice.Now())
}

// ownAuditDisk has killswitchd write its log to a disk of its own.
func (s *stopCases) ownAuditDisk() (d *disk, repair func()) {
	s.t.Helper()
	d = s.newDisk(2, filepath.Dir(s.box.Inst.AuditFile(instance.Killswitchd)))
	s.box.Kill9(instance.Killswitchd)
	s.box.WaitHealthy(instance.Killswitchd)
	return d, func() {
		d.remove()
		s.box.Kill9(instance.Killswitchd)
		s.box.WaitHealthy(instance.Killswitchd)
	}
}

func (s *stopCases) auditDiskFull() func() {
	d, repair := s.ownAuditDisk()
	d.fill()
	s.noteSomething()
	return repair
}

func (s *stopCases) auditDiskHangs() func() {
	d, repair := s.ownAuditDisk()
	d.tell("freeze")
	s.noteSomething()
	return repair
}

// noteSomething gives killswitchd things to record until it has found out that its log takes nothing: the file's
// last block has room for the first few.
func (s *stopCases) noteSomething() {
	s.t.Helper()
	client := s.box.Client(instance.Killswitchd)
	s.until("killswitchd knows of its log", func() error {
		err := client.Call(s.t.Context(), http.MethodPost, "/v1/release", wire.ReleaseRequest{Stop: "none", By: "test", Reason: "test"}, nil)
		if err == nil {
			s.t.Fatal("a tag that never hung was released")
		}
		var health wire.Health
		if err := client.Call(s.t.Context(), http.MethodGet, "/healthz", nil, &health); err != nil {
			return err
		}
		if health.Warning == "" {
			return errors.New("no warning")
		}
		return nil
	})
}

// proxyDead kills the proxy and holds the supervisor, so that it stays dead during the stop.
func (s *stopCases) proxyDead() func() {
	layout, err := cgroup.Detect()
	if err != nil {
		s.t.Fatal(err)
	}
	pids, err := cgroup.Procs(layout.V2(s.box.Inst.DaemonCgroupRel(instance.Proxy)))
	if err != nil || len(pids) == 0 {
		s.t.Fatalf("the proxy does not run: %v", err)
	}
	supervisor, err := parentOf(pids[0])
	if err != nil {
		s.t.Fatal(err)
	}
	if err := unix.Kill(supervisor, unix.SIGSTOP); err != nil {
		s.t.Fatal(err)
	}
	s.box.Kill9(instance.Proxy)
	return func() {
		unix.Kill(supervisor, unix.SIGCONT) // it lives: it is this test's child
		s.box.WaitHealthy(instance.Proxy)
	}
}

func parentOf(pid int) (parent int, err error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, err = fmt.Sscanf(string(raw[strings.LastIndexByte(string(raw), ')')+1:]), " %1s %d", new(string), &parent)
	return parent, err
}

// pinsGone takes the instance's pins out of its sight, as an unmount would.
func (s *stopCases) pinsGone() func() {
	dir := s.box.Inst.PinDir()
	if err := os.Rename(dir, dir+"-away"); err != nil {
		s.t.Fatal(err)
	}
	return func() {
		if err := os.Rename(dir+"-away", dir); err != nil {
			s.t.Error(err)
		}
	}
}

// tagDiskFull is about the one disk that a stop needs in the end: while it takes no tag the stop is partial, and it
// says so; when there is room it completes by itself.
func (s *stopCases) tagDiskFull() {
	d := s.newDisk(2, s.box.Inst.TagDir())
	d.fill()
	kid := s.spawn("untagged")
	token := s.agent(kid)
	rep := s.stop(kid.Name)
	s.reallyStopped("no room for the tag", kid, token, practice.Now())
	if rep.State != wire.StatePartial {
		s.t.Errorf("no room for the tag: %+v", rep)
	}
	s.waitState(rep.Stop, wire.StatePartial)
	if err := os.Remove(filepath.Join(d.dir, "fill")); err != nil {
		s.t.Fatal(err)
	}
	s.waitState(rep.Stop, wire.StateObserved)
	d.remove()
}

// killedInItsMiddle (S13): killswitchd is killed with -9 as soon as it says the first word of a stop. Its successor
// finishes the stop from what was kept, and tells the end of it. (Before the disk has the tag:
// TestKilledBeforeTheDiskTookTheTag in cmd/killswitchd.)
func (s *stopCases) killedInItsMiddle() {
	kid := s.spawn("cut-short")
	token := s.agent(kid)
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	letGo := s.hold(s.pidOf(kid, "sleep")) // so that the stop has a middle
	defer letGo()
	err := s.orderAndKill(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, By: "test", Reason: "test"})
	if err == nil {
		s.t.Fatal("the stop has reported: the case shows nothing")
	}
	s.box.WaitHealthy(instance.Killswitchd)
	tag := s.tagOn(kid.Name)
	held := s.pidOf(kid, "sleep")
	s.until("only what is held is left", func() error {
		for _, pid := range s.pids(kid) {
			if state, err := stateOf(pid); err == nil && pid != held && state != "Z" && !s.isInit(pid) {
				return fmt.Errorf("%v", s.pids(kid))
			}
		}
		return nil
	})
	s.until("no token", func() error {
		if s.accepted(s.t.Context(), token) {
			return errors.New("it is accepted")
		}
		return nil
	})
	letGo()
	s.waitState(tag.Stop, wire.StateObserved)
	s.reallyStopped("after the restart", kid, token, practice.Now())
	s.box.WaitRecord("the successor's word", func(r *audit.Record) bool {
		return r.Event == audit.EventStopCompleted && r.Fields["stop"] == tag.Stop && strings.Contains(r.Detail, "before killswitchd was restarted")
	})
}

// isInit: with a process of its pid namespace held, the kid's init cannot end either.
func (s *stopCases) isInit(pid int) bool {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return err == nil && strings.TrimSpace(string(raw)) == "kid-init"
}

// orderAndKill orders a stop and kills killswitchd at its first word.
func (s *stopCases) orderAndKill(req wire.StopRequest) error {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), soon)
	defer cancel()
	kill := sync.OnceFunc(func() { s.box.Kill9(instance.Killswitchd) })
	return s.box.Client(instance.Killswitchd).Each(ctx, http.MethodPost, "/v1/stop", req, func(json.RawMessage) error {
		kill()
		return nil
	})
}

// tagOn returns the one tag that hangs on a kid.
func (s *stopCases) tagOn(kid string) wire.Tag {
	s.t.Helper()
	var tags []wire.Tag
	if err := s.box.Client(instance.Killswitchd).Call(s.t.Context(), http.MethodGet, "/v1/tags", nil, &tags); err != nil {
		s.t.Fatal(err)
	}
	for _, tag := range tags {
		if tag.Scope.Kid == kid {
			return tag
		}
	}
	s.t.Fatalf("no tag on %s among %+v", kid, tags)
	return wire.Tag{}
}
