package killswitch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"tagout/internal/audit"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// enforcer is what the enforcement loop remembers between ticks. Only that loop touches it.
type enforcer struct {
	docs     []*session.Session
	docsAt   time.Time       // monotonic; when docs were read
	occupied map[string]bool // cgroup directories that were populated at the last tick
	credd    string          // credd's processes when it last acknowledged
	creddAt  time.Time       // monotonic
}

// docsAge is how old the session documents may be that enforcement works with. A stop always reads its own.
const docsAge = 500 * time.Millisecond

// Run enforces the tags that hang, those that were loaded from disk first of all, and watches the sentinel
// file, until ctx ends. That is what finishes a stop in whose middle a predecessor was killed.
func (s *Switch) Run(ctx context.Context) error {
	defer s.endLife()
	var others sync.WaitGroup
	defer others.Wait()
	others.Go(func() { s.slowly(ctx) })
	go s.tidyOrders(ctx) // not waited for: a disk may hang for ever
	tick := time.NewTicker(s.t.Tick)
	defer tick.Stop()
	s.tick() // what hangs is in force before anything passes
	others.Go(func() { s.keepLeases(ctx) })
	if s.prover != nil {
		go s.prover.run(ctx) // not waited for: it may be cleaning up
	}
	others.Go(func() { s.watchKids(ctx) })
	for {
		select {
		case <-tick.C:
			s.tick()
		case <-ctx.Done():
			return nil
		}
	}
}

// tick stops again what lives in the scope of a tag. It touches kernel interfaces and the session documents
// (on tmpfs) only, never the disk or another daemon.
func (s *Switch) tick() {
	s.checkSentinel()
	occupied := map[string]bool{}
	for _, t := range s.enforced(wire.LayerSession) {
		for _, tg := range s.inForce(t) {
			s.enforceDeath(t, tg, occupied)
		}
	}
	s.enforce.occupied = occupied
	for _, t := range s.enforced(wire.LayerNetwork) {
		s.enforceCut(t)
	}
	s.cameRound()
}

// checkSentinel stops everything while the sentinel file exists. A state of the file that cannot be read
// counts as existing.
func (s *Switch) checkSentinel() {
	info, err := os.Lstat(s.cfg.Sentinel)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	by, why := "unknown", "the file "+s.cfg.Sentinel+" exists"
	if err != nil {
		why = "the file that stops everything cannot be looked at: " + err.Error()
	} else if st, ok := info.Sys().(*syscall.Stat_t); ok {
		by = fmt.Sprintf("uid:%d", st.Uid)
	}
	for _, t := range s.Tags() {
		if t.Cause == CauseSentinel {
			return
		}
	}
	o := Order{StopRequest: wire.StopRequest{Scope: wire.Scope{All: true}, By: by, Reason: why, Cause: CauseSentinel}, Received: time.Now()}
	if _, err := s.Stop(o); err != nil {
		s.cfg.Log.Error("stopping because of the sentinel file", "error", err)
	}
}

// inForce returns what a tag covers now.
func (s *Switch) inForce(t wire.Tag) []target {
	switch {
	case t.Scope.All:
		return []target{{dir: s.cfg.KidsDir, freezer: s.cfg.KidsFreezer}}
	case t.Scope.Kid != "":
		if d, err := s.cfg.Sessions.Get(t.Scope.Kid); err == nil {
			return []target{s.known(d)}
		}
		return []target{s.unknown(t.Scope.Kid, nil)}
	}
	return s.targets(s.currentDocs(), func(d *session.Session) bool { return d.Card == t.Scope.Card })
}

// currentDocs returns the session documents, read at most docsAge ago.
func (s *Switch) currentDocs() []*session.Session {
	if e := &s.enforce; e.docsAt.IsZero() || time.Since(e.docsAt) > docsAge {
		docs, err := s.cfg.Sessions.Load()
		if err != nil {
			s.cfg.Log.Error("reading session documents to enforce a tag", "error", err)
		}
		e.docs, e.docsAt = docs, time.Now()
	}
	return s.enforce.docs
}

func (s *Switch) enforceDeath(t wire.Tag, tg target, occupied map[string]bool) {
	some, err := s.cfg.Cgroups.Populated(tg.dir)
	if err == nil && !some {
		if s.enforce.occupied[tg.dir] {
			s.tellLate(t, tg)
		}
		return
	}
	occupied[tg.dir] = true
	if s.isDying(tg.dir) {
		return
	}
	err = s.cfg.Cgroups.Kill(tg.dir)
	if t.Scope.All {
		s.thaw(tg.dir, s.targets(s.currentDocs(), func(*session.Session) bool { return true }))
	} else {
		s.thaw(tg.dir, []target{tg})
	}
	if s.enforce.occupied[tg.dir] || s.busy(t.Stop) {
		return // told before, or being told by the stop itself
	}
	s.again(t, tg, wire.LayerSession, "processes were found under the tag and killed", err)
}

func (s *Switch) enforceCut(t wire.Tag) {
	marks := map[uint32]target{}
	for _, m := range t.Marks {
		marks[m] = target{mark: m}
	}
	for _, d := range s.currentDocs() {
		if inScope(t.Scope, d.Kid, d.Card) {
			marks[d.Mark] = s.known(d)
		}
	}
	if t.Scope.All {
		s.enforceFlag(t)
	}
	for m, tg := range marks {
		on, err := s.cfg.Network.Stopped(m)
		if err == nil && on || errors.Is(err, fs.ErrNotExist) {
			continue
		}
		err = s.cfg.Network.StopSession(m)
		if err == nil && !s.busy(t.Stop) {
			s.again(t, tg, wire.LayerNetwork, "the session was not stopped in the kernel and was stopped again", nil)
		}
	}
}

func (s *Switch) enforceFlag(t wire.Tag) {
	s.flagMu.Lock()
	defer s.flagMu.Unlock()
	if !s.flagDemanded() { // released since the tick began
		return
	}
	if on, err := s.cfg.Network.AllStopped(); err == nil && on {
		return
	}
	if err := s.cfg.Network.StopAll(true); err == nil && !s.busy(t.Stop) {
		s.again(t, target{}, wire.LayerNetwork, "the flag that stops everything was off and was set again", nil)
	}
}

func (s *Switch) busy(stop string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.underWay(stop)
}

// again records that something had to be stopped again.
func (s *Switch) again(t wire.Tag, tg target, l wire.Layer, what string, err error) {
	s.cfg.Metrics.Enforced(string(l))
	rec := audit.Record{
		Event: audit.EventStopProgress, Outcome: audit.OutcomeOK, Kid: tg.kid, Card: tg.card, Session: tg.id, Mark: tg.mark,
		Detail: what, Fields: map[string]string{"stop": t.Stop, "scope": scopeText(t.Scope), "layer": string(l)},
	}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, lackText(what, err)
	}
	s.audit.send(rec)
	s.cfg.Log.Warn("enforcing a tag", "stop", t.Stop, "kid", tg.kid, "layer", l, "what", what, "error", err)
}

// slowly does the part of enforcement that talks to the disk and to credd, apart from the fast part.
func (s *Switch) slowly(ctx context.Context) {
	tick := time.NewTicker(s.t.Slow)
	defer tick.Stop()
	s.finishCuts(ctx)
	for {
		s.keepUnkept()
		s.enforceRevoked(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// finishCuts destroys the sockets of what the tags cover that were there at the start: a predecessor may have
// been killed before it did. Their packets are dropped all the same.
func (s *Switch) finishCuts(ctx context.Context) {
	tags := s.enforced(wire.LayerNetwork)
	if len(tags) == 0 {
		return
	}
	docs, err := s.cfg.Sessions.Load()
	if err != nil {
		s.cfg.Log.Error("reading session documents to finish stops", "error", err)
	}
	var marks []uint32
	var addrs []netip.Addr
	for _, t := range tags {
		marks = append(marks, t.Marks...)
		for _, d := range docs {
			if inScope(t.Scope, d.Kid, d.Card) {
				marks, addrs = append(marks, d.Mark), append(addrs, d.Addr)
			}
		}
	}
	if len(marks) == 0 {
		return
	}
	call, cancel := context.WithTimeout(ctx, s.t.Network)
	defer cancel()
	if n, err := s.cfg.Sockets.Destroy(call, marks, addrs); n > 0 || err != nil {
		s.again(tags[0], target{}, wire.LayerNetwork, fmt.Sprintf("%d sockets that a stop had left were destroyed", n), err)
	}
}

// revokeAge is how long credd's word is trusted while its processes are the same.
const revokeAge = 30 * time.Second

// enforceRevoked tells a credd that was started since the last acknowledgement what is revoked. It asks for
// the tags itself before it serves; this is the second line.
func (s *Switch) enforceRevoked(ctx context.Context) {
	var req wire.RevokeRequest
	tags := s.enforced(wire.LayerCredential)
	for _, t := range tags {
		req.All = req.All || t.Scope.All
		req.Marks = append(req.Marks, t.Marks...)
	}
	if len(tags) == 1 { // of several, one text would be wrong for some of the marks
		req.Tag = tagText(tags[0])
	}
	if req.All {
		req.Marks = nil // all is all: credd refuses an order that says both
	}
	if len(tags) == 0 || !req.All && len(req.Marks) == 0 {
		return
	}
	now, err := s.creddPIDs()
	if e := &s.enforce; err == nil && e.credd == now && time.Since(e.creddAt) < revokeAge {
		return
	}
	call, cancel := context.WithTimeout(ctx, s.t.Slow)
	defer cancel()
	_, err = s.cfg.Credentials.Revoke(call, req)
	switch {
	case err == nil:
		s.enforce.credd, s.enforce.creddAt = now, time.Now()
	case ctx.Err() != nil, errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ECONNREFUSED):
		// It does not serve, so it accepts no token either; it is asked again at the next round.
	case s.creddReplaced(now):
		// It died over the question; its successor is asked at the next round.
	default:
		killErr := s.cfg.Cgroups.Kill(s.cfg.CreddDir)
		s.again(tags[0], target{}, wire.LayerCredential, fmt.Sprintf("credd did not revoke (%v) and was killed", err), killErr)
	}
}

// creddPIDs tells one run of credd from another.
func (s *Switch) creddPIDs() (string, error) {
	procs, err := s.cfg.Cgroups.Survivors(s.cfg.CreddDir)
	return fmt.Sprint(pids(procs)), err
}

func (s *Switch) creddReplaced(before string) bool {
	now, err := s.creddPIDs()
	return err == nil && now != before
}

func pids(procs []Process) []int {
	out := make([]int, 0, len(procs))
	for _, p := range procs {
		out = append(out, p.PID)
	}
	return out
}
