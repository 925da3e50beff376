package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// successThatIsNone (S01): every write to cgroup.kill succeeds, and a process is still there. The stop is not
// complete: it says which process, and without the other layers it is not even contained. (A network that goes on,
// and writes that are refused: killswitch/stop_test.go.)
func (s *stopCases) successThatIsNone() {
	kid := s.spawn("held")
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	letGo := s.hold(s.pidOf(kid, "sleep"))
	defer letGo()
	rep := s.stop(kid.Name, wire.LayerSession)
	lr := rep.Layers[wire.LayerSession]
	if rep.State != wire.StatePartial || lr.Observed != 0 || !strings.Contains(lr.Detail, "(sleep) in state t") || !strings.Contains(lr.Detail, "nothing contains them") {
		s.t.Errorf("report %+v", rep)
	}
	if lr.Fired == 0 {
		s.t.Error("the write did not succeed: the case shows nothing")
	}
	if code := s.box.Tagout("stop", "--kid", kid.Name, "--layer", "session", "--by", "test", "--reason", "again").Code; code != 5 {
		s.t.Errorf("tagout stop ended with %d, want 5: it was not seen complete", code)
	}
	letGo()
	s.waitState(rep.Stop, wire.StateObserved)
}

// everyDescendant (S02): the agent double-forks, sets sessions, renames itself and breeds until its limit; when
// the stop is complete nothing of it is left in any hierarchy.
func (s *stopCases) everyDescendant() {
	kid := s.spawn("tree")
	running(s.t, s.box, kid.Name, "/workspace/hostile", "agent", "-tag", kid.Name, "-parts", "ticks,storm")
	s.until("the tree stands", func() error {
		if n := len(s.pids(kid)); n < 200 {
			return fmt.Errorf("%d processes", n)
		}
		return nil
	})
	before := s.members(kid.Name)
	if len(before) < 100 {
		s.t.Errorf("only %d processes are found by their cgroups: the case shows nothing", len(before))
	}
	s.observed(s.stop(kid.Name))
	if left := s.members(kid.Name); len(left) > 0 {
		s.t.Errorf("of %d processes %d are left: %v", len(before), len(left), left)
	}
	layout, err := cgroup.Detect()
	if err != nil {
		s.t.Fatal(err)
	}
	for _, dir := range []string{kid.Cgroup, layout.Freezer(s.box.Inst.KidsCgroupRel() + "/" + kid.Name)} {
		if pids, err := cgroup.Procs(dir); dir != "" && (err != nil || len(pids) > 0) {
			s.t.Errorf("%s holds %v, %v", dir, pids, err)
		}
	}
	s.box.Destroy(kid.Name)
	if _, err := os.Stat(kid.Cgroup); !errors.Is(err, os.ErrNotExist) {
		s.t.Errorf("its cgroup is still there: %v", err)
	}
}

// members are the processes of the machine whose cgroup path in any hierarchy names the kid. One that has given up
// its program runs nothing any more: a zombie, or an init that waits for sandboxd to reap its namespace's zombies.
func (s *stopCases) members(kid string) []string {
	s.t.Helper()
	procs, err := filepath.Glob("/proc/[0-9]*/cgroup")
	if err != nil {
		s.t.Fatal(err)
	}
	var out []string
	for _, file := range procs {
		raw, err := os.ReadFile(file)
		if err != nil || !strings.Contains(string(raw), s.box.Inst.KidsCgroupRel()+"/"+kid+"\n") && !strings.Contains(string(raw), s.box.Inst.KidsCgroupRel()+"/"+kid+"/") {
			continue
		}
		stat, err := os.ReadFile(filepath.Join(filepath.Dir(file), "stat"))
		if err != nil {
			continue
		}
		if _, err := os.Readlink(filepath.Join(filepath.Dir(file), "exe")); err != nil {
			continue
		}
		out = append(out, string(stat[:min(len(stat), 40)]))
	}
	return out
}

// theCallerIsTold (S03): a tool call that would run 30 s more ends at once, and whoever called it is told why, by
// the command line too.
func (s *stopCases) theCallerIsTold() {
	kid := s.spawn("tool")
	type ended struct {
		code int
		text string
	}
	cli := make(chan ended, 1)
	go func() {
		r := s.box.Tagout("exec", kid.Name, "--", "/bin/sh", "-c", "touch cli; exec sleep 30")
		cli <- ended{r.Code, r.Stderr}
	}()
	api := s.run(kid.Name, "/bin/sh", "-c", "trap '' TERM INT; while [ ! -e cli ]; do sleep 0.01; done; touch up; sleep 30; sleep 30")
	began := time.Now()
	s.observed(s.stop(kid.Name))
	if out := wait(s.t, "the exec", api); out.Exit.Result != "stopped" {
		s.t.Errorf("the exec ended with %+v", out.Exit)
	}
	select {
	case e := <-cli:
		if e.code != 3 || !strings.Contains(e.text, "stopped") {
			s.t.Errorf("tagout exec ended with %d: %s", e.code, e.text)
		}
	case <-time.After(soon):
		s.t.Error("tagout exec hangs")
	}
	if took := time.Since(began); took > 15*time.Second {
		s.t.Errorf("the callers were told after %v", took)
	}
}

// whateverStateTheKidIsIn (S04).
func (s *stopCases) whateverStateTheKidIsIn() {
	s.frozenKid()
	s.spawningKid()
	s.destroyedKid()
	if r := s.box.Tagout("stop", "--kid", "nobody", "--by", "test", "--reason", "test"); r.Code == 0 || !strings.Contains(r.Stderr, "no such kid") || !strings.Contains(r.Stderr, "tagout list") {
		s.t.Errorf("an unknown kid: %+v", r)
	}
	kid := s.spawn("twice")
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	letGo := s.hold(s.pidOf(kid, "sleep")) // so that the first stop is under way when the second is ordered
	defer letGo()
	reports := make([]wire.StopReport, 2)
	var wg sync.WaitGroup
	for i := range reports {
		wg.Go(func() { reports[i] = s.box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}}) })
	}
	wg.Wait()
	if reports[0].Stop != reports[1].Stop || reports[0].State != reports[1].State || reports[0].Tag == nil {
		s.t.Errorf("two orders at once: %+v", reports)
	}
}

func (s *stopCases) frozenKid() {
	kid := s.spawn("frozen")
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	layout, err := cgroup.Detect()
	if err != nil {
		s.t.Fatal(err)
	}
	freezer := layout.Freezer(s.box.Inst.KidsCgroupRel() + "/" + kid.Name)
	if err := cgroup.Freeze(kid.Cgroup, freezer); err != nil {
		s.t.Fatal(err)
	}
	s.until("the kid is frozen", func() error {
		if freezer == "" {
			raw, err := os.ReadFile(kid.Cgroup + "/cgroup.events")
			if err == nil && !strings.Contains(string(raw), "frozen 1") {
				err = errors.New("not frozen")
			}
			return err
		}
		raw, err := os.ReadFile(freezer + "/freezer.state")
		if err == nil && string(raw) != "FROZEN\n" {
			err = fmt.Errorf("%q", raw)
		}
		return err
	})
	s.observed(s.stop(kid.Name))
	if left := s.pids(kid); len(left) > 0 {
		s.t.Errorf("frozen: %v is left", left)
	}
}

// spawningKid holds a spawn up in its middle by a proxy that does not answer, and stops the kid there.
func (s *stopCases) spawningKid() {
	s.box.Freeze(instance.Proxy)
	defer s.box.Thaw(instance.Proxy)
	name := s.id + "-spawning"
	spawned := make(chan error, 1)
	go func() {
		_, err := s.box.TrySpawn(name, s.stopCard("spawning", 64, "64MiB"), s.inputs())
		spawned <- err
	}()
	s.until("the kid is spawning", func() error { return s.inState(name, wire.KidSpawning) })
	s.observed(s.stop(name))
	s.box.Thaw(instance.Proxy)
	select {
	case err := <-spawned:
		if control.Status(err) != http.StatusLocked {
			s.t.Errorf("a kid that was stopped while it spawned: %v", err)
		}
	case <-time.After(soon):
		s.t.Error("the spawn hangs")
	}
	if left := s.members(name); len(left) > 0 {
		s.t.Errorf("spawning: %v is left", left)
	}
}

// destroyedKid holds a destruction up in its middle by a process that cannot die, and stops the kid there.
func (s *stopCases) destroyedKid() {
	kid := s.spawn("destroyed")
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	letGo := s.hold(s.pidOf(kid, "sleep"))
	defer letGo()
	gone := make(chan int, 1)
	go func() { gone <- s.box.Tagout("destroy", kid.Name, "--reason", "test").Code }()
	s.until("the kid is being destroyed", func() error { return s.inState(kid.Name, wire.KidDestroying) })
	rep := s.stop(kid.Name)
	if rep.State != wire.StateContained {
		s.t.Errorf("while it is being destroyed: %+v", rep)
	}
	letGo()
	<-gone
	s.until("the kid is gone", func() error {
		if err := s.inState(kid.Name, wire.KidDestroying); err == nil {
			return errors.New("it is still being destroyed")
		}
		_, err := os.Stat(kid.Cgroup)
		if err == nil {
			return errors.New("its cgroup is there")
		}
		return nil
	})
	s.waitState(rep.Stop, wire.StateObserved)
}

func (s *stopCases) inState(kid string, want wire.KidState) error {
	var kids []wire.Kid
	if err := s.box.Client(instance.Sandboxd).Call(s.t.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil {
		return err
	}
	for _, k := range kids {
		if k.Name == kid && k.State == want {
			return nil
		}
	}
	return fmt.Errorf("%s is not %s: %+v", kid, want, kids)
}

// initIsDead (S05): the kid's init is dead, and with it its pid namespace; what others have put into its cgroup
// lives, and dies of the stop.
func (s *stopCases) initIsDead() {
	kid := s.spawn("orphans")
	s.run(kid.Name, "/bin/sh", "-c", "touch up; exec sleep 1000")
	helper := s.outsider(kid)
	init := s.pidOf(kid, "kid-init")
	if err := syscall.Kill(init, syscall.SIGKILL); err != nil {
		s.t.Fatal(err)
	}
	s.until("only the helper lives", func() error {
		if pids := s.pids(kid); len(pids) != 1 || pids[0] != helper {
			return fmt.Errorf("%v", pids)
		}
		return nil
	})
	s.observed(s.stop(kid.Name, wire.LayerSession))
	if _, err := os.Stat("/proc/" + strconv.Itoa(helper) + "/exe"); err == nil && len(s.pids(kid)) > 0 {
		s.t.Errorf("the helper lives: %v", s.pids(kid))
	}
}
