package killswitch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"tagout/internal/wire"
)

// rekill is how often a cgroup that does not empty is killed and thawed again: a process that somebody moves
// into it after the first kill (an exec under way) must die as well.
const rekill = 50 * time.Millisecond

// A kill walks over every process of the cgroup, the dying ones too, and holds locks that they need to die: with
// thousands of them a write takes hundreds of milliseconds. So the pause after it grows with what it took.
const (
	restPerKill = 4
	maxRest     = time.Second
)

// rest is the pause after a kill that took d.
func rest(d time.Duration) time.Duration { return min(max(rekill, restPerKill*d), maxRest) }

// kill kills dir's processes and says how long the kernel took for it.
func (s *Switch) kill(dir string) (time.Duration, error) {
	began := time.Now()
	err := s.cfg.Cgroups.Kill(dir)
	return time.Since(began), err
}

// dying counts a stop that kills dir again and again until the returned function is called: enforcement leaves dir
// to it meanwhile.
func (s *Switch) dying(dir string) (ended func()) {
	count := func(n int) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.killing[dir] += n; s.killing[dir] == 0 {
			delete(s.killing, dir)
		}
	}
	count(1)
	return func() { count(-1) }
}

func (s *Switch) isDying(dir string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.killing[dir] > 0
}

// fireSession kills the processes of every target through their cgroups.
func (s *Switch) fireSession(r *run, found *future) {
	if r.scope.All {
		s.fireAllSessions(r, found)
		return
	}
	ts := found.get()
	if len(ts) == 0 {
		r.emit("", wire.LayerSession, pointCgroup, wire.StateObserved, "no kid in scope")
	}
	var wg sync.WaitGroup
	for _, t := range ts {
		wg.Go(func() {
			defer s.dying(t.dir)()
			took, err := s.kill(t.dir) // the first action of the layer: one write
			r.emitKill(t.kid, err)
			s.seeDead(r, t.kid, t.dir, []target{t}, took)
		})
	}
	wg.Wait()
}

// fireAllSessions kills the cgroup above all kids with one write, before it is known which kids there are.
func (s *Switch) fireAllSessions(r *run, found *future) {
	defer s.dying(s.cfg.KidsDir)()
	took, err := s.kill(s.cfg.KidsDir)
	r.emitKill("", err)
	ts := found.get()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		// The one write was refused: kill each kid by its own.
		for _, t := range ts {
			s.cfg.Cgroups.Kill(t.dir) // what counts is whether it empties, seen below
		}
	}
	s.seeDead(r, "", s.cfg.KidsDir, ts, took)
}

func (r *run) emitKill(kid string, err error) {
	switch {
	case err == nil:
		r.emit(kid, wire.LayerSession, pointCgroup, wire.StateFired, "")
	case errors.Is(err, fs.ErrNotExist):
		r.emit(kid, wire.LayerSession, pointCgroup, wire.StateFired, "there is no such cgroup")
	default:
		r.emit(kid, wire.LayerSession, pointCgroup, wire.StateFailed, err.Error())
	}
}

// seeDead thaws the targets and waits until dir is empty. What is seen decides, not what the writes answered. took is
// what the first kill took.
func (s *Switch) seeDead(r *run, kid, dir string, ts []target, took time.Duration) {
	ctx, cancel := context.WithDeadline(context.Background(), r.from.Add(s.t.Session))
	defer cancel()
	killErr := s.killUntilEmpty(ctx, dir, ts, took)
	if killErr == nil {
		r.emit(kid, wire.LayerSession, pointCgroup, wire.StateObserved, "")
		return
	}
	state, detail := s.describeSurvivors(dir, killErr)
	r.emit(kid, wire.LayerSession, pointCgroup, state, detail)
	if !r.proof { // sandboxd destroys a proof's kid
		go s.watchLate(r, kid, dir, ts)
	}
}

// killUntilEmpty thaws, waits and kills again until dir is empty or ctx ends. took is what the last kill took.
func (s *Switch) killUntilEmpty(ctx context.Context, dir string, ts []target, took time.Duration) error {
	var last error
	for {
		s.thaw(dir, ts)
		wait, cancel := context.WithTimeout(ctx, rest(took))
		err := s.cfg.Cgroups.WaitEmpty(wait, dir)
		cancel()
		if err == nil {
			return nil
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			last = err
			select { // looking failed: do not spin
			case <-time.After(rekill):
			case <-ctx.Done():
			}
		}
		if ctx.Err() != nil {
			return errors.Join(last, ctx.Err())
		}
		if took, err = s.kill(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			last = err
			for _, t := range ts {
				s.cfg.Cgroups.Kill(t.dir) // the next look decides
			}
		} else {
			last = nil
		}
	}
}

// thaw lets killed processes die: a task that the v1 freezer holds takes no signal.
func (s *Switch) thaw(dir string, ts []target) {
	if dir == s.cfg.KidsDir {
		// Nobody freezes the cgroup above the kids; where somebody did, and we may, it is thawed too.
		s.cfg.Cgroups.Thaw(dir, s.cfg.KidsFreezer) // its files need not be ours
	}
	for _, t := range ts {
		if err := s.cfg.Cgroups.Thaw(t.dir, t.freezer); err != nil {
			s.cfg.Log.Error("thawing a kid that is being stopped", "kid", t.kid, "error", err)
		}
	}
}

// maxSurvivors bounds how many processes a report names.
const maxSurvivors = 8

// describeSurvivors names what is still alive in dir.
func (s *Switch) describeSurvivors(dir string, cause error) (wire.State, string) {
	procs, err := s.cfg.Cgroups.Survivors(dir)
	if err != nil {
		return wire.StatePartial, fmt.Sprintf("cannot see whether it is empty: %v", errors.Join(cause, err))
	}
	var names []string
	for i, p := range procs {
		if i == maxSurvivors {
			names = append(names, "…")
			break
		}
		names = append(names, fmt.Sprintf("%d (%s) in state %s", p.PID, p.Comm, p.State))
	}
	detail := fmt.Sprintf("%d processes remain: %s", len(procs), strings.Join(names, ", "))
	if len(procs) == 0 {
		detail = "the kernel still counts a process, and lists none"
	}
	if onlyTimeout(cause) {
		return wire.StateContained, detail
	}
	// Not even the order to die got through: that is a failure, not a slow death.
	return wire.StateFailed, fmt.Sprintf("%s: %v", detail, cause)
}

// onlyTimeout says whether nothing went wrong except that it took too long.
func onlyTimeout(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok { // looks at this layer on purpose
		for _, e := range joined.Unwrap() {
			if !onlyTimeout(e) {
				return false
			}
		}
		return true
	}
	return errors.Is(err, context.DeadlineExceeded)
}
