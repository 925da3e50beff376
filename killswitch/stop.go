package killswitch

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"tagout/internal/authority"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// Enforcement points, as they are named in events.
const (
	pointCgroup  = "cgroup"      // a kid's cgroup, or the one above all kids
	pointSession = "bpf-session" // one session's entry in the BPF map
	pointGlobal  = "bpf-all"     // the flag that stops the whole instance
	pointSockets = "sockets"
	pointCredd   = "credd"
	pointSecrets = "bpf-secrets" // what one session's sockets send that carry a secret
	pointTag     = "tag"
)

// Causes of a stop.
const (
	CauseOrder    = "order"
	CauseHTTP     = "http" // a program that calls the socket by itself
	CauseSignal   = "signal"
	CauseSentinel = "sentinel"
	CauseFleet    = "fleet"

	causeDamaged = "damaged" // a tag whose file cannot be read
)

// Order is a stop request with the moment at which its first byte was read.
type Order struct {
	wire.StopRequest
	Received time.Time         // must carry a monotonic reading
	Signed   *authority.Signed // nil: nobody signed
	Peer     string            // "uid:N" of whoever gave an unsigned order over the socket; "" where nobody did
	proof    bool              // of the proof under way
}

// Handle is one caller's view of a stop. Two orders for the same thing at the same time share the stop but
// hold a handle each.
type Handle struct {
	run *run
	own *wire.Tag // set where the caller joined a stop that somebody else had ordered
	put *keeping  // the fate of own on disk
}

// Stop fires o and returns at once with a handle on the stop, which goes on whatever becomes of the caller.
// Errors: ErrBadOrder, ErrUnknownKid.
func (s *Switch) Stop(o Order) (*Handle, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	// Which kids are meant costs one small file of a kid, or all documents of a card. For everything
	// nothing has to be known before firing.
	var targets []target
	switch sc := o.Scope; {
	case sc.Kid != "":
		t, err := s.resolveKid(sc.Kid)
		if err != nil {
			return nil, err
		}
		targets = []target{t}
	case sc.Card != "":
		targets = s.resolveMany(func(d *session.Session) bool { return d.Card == sc.Card })
	}
	return s.begin(o, targets), nil
}

// complete fills in what an order may leave out. A stop is refused only where it cannot be understood.
func (o *Order) complete() error {
	if err := checkScope(o.Scope); err != nil {
		return err
	}
	if len(o.Layers) == 0 {
		o.Layers = wire.AllLayers()
	}
	for _, l := range o.Layers {
		if !slices.Contains(wire.AllLayers(), l) {
			return fmt.Errorf("%w: no layer is called %q: use session, network or credential", ErrBadOrder, l)
		}
	}
	o.Layers = slices.DeleteFunc(wire.AllLayers(), func(l wire.Layer) bool { return !slices.Contains(o.Layers, l) })
	if o.By == "" {
		o.By = "unknown"
	}
	if o.Cause == "" {
		o.Cause = CauseOrder
	}
	if o.Received.IsZero() {
		o.Received = time.Now()
	}
	return nil
}

// key is the same for two orders that ask for the same effect.
func (o *Order) key() string {
	words := []string{scopeText(o.Scope)}
	for _, l := range o.Layers {
		words = append(words, string(l))
	}
	return strings.Join(words, "\x00")
}

// begin hangs the tag in memory, so that nothing new starts in the scope, and fires; or it joins the same
// stop where one is under way.
func (s *Switch) begin(o Order, targets []target) *Handle {
	r := &run{
		s: s, id: newID(), scope: o.Scope, layers: o.Layers, cause: o.Cause, from: o.Received,
		points: map[pointKey]*point{}, wake: make(chan struct{}), proof: o.proof, nonce: o.Nonce,
		at: s.boot() - time.Since(o.Received),
	}
	if r.nonce == "" {
		r.nonce = r.id
	}
	r.tag = wire.Tag{
		Stop: r.id, Scope: o.Scope, Layers: o.Layers, By: o.By, Reason: o.Reason, Cause: o.Cause, Placed: time.Now().UTC(), Peer: o.Peer,
	}
	if o.Signed != nil {
		r.tag.Order, r.tag.Key, r.note = o.Signed.ID, o.Signed.Key, o.Signed.Note
	}
	r.addKids(targets)
	if o.proof {
		return s.beginProof(r, targets)
	}
	s.interruptProof()
	key := o.key()
	s.mu.Lock()
	if cur := s.running[key]; cur != nil && !cur.done() {
		defer s.mu.Unlock()
		return s.join(cur, r.tag)
	}
	s.running[key] = r
	s.hanging[r.id] = &hung{tag: r.currentTag(), run: r, writing: true}
	s.mu.Unlock()
	noted := s.note(r.currentTag())
	go func() {
		s.fire(r, targets, noted)
		s.mu.Lock()
		if s.running[key] == r { // and not a later stop that began when this one had reported
			delete(s.running, key)
		}
		s.mu.Unlock()
	}()
	return &Handle{run: r}
}

// note puts the tag where it outlives this process, so that nothing fires that no successor would know of. It
// takes microseconds, and where it does not, it is not waited for: the channel closes when it is done.
func (s *Switch) note(t wire.Tag) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := s.cfg.Tags.Note(t); err != nil {
			s.cfg.Log.Error("noting a stop: if killswitchd is killed before the tag is on disk, nobody finishes the stop", "stop", t.Stop, "error", err)
		}
	}()
	limit := time.NewTimer(s.t.Note)
	defer limit.Stop()
	select {
	case <-done:
	case <-limit.C:
	}
	return done
}

// join lets a second order share the stop that is under way. Where another person gave it, that person's own
// tag hangs beside the first: taking the first off must not free what the second one stopped. s.mu is held.
func (s *Switch) join(cur *run, tag wire.Tag) *Handle {
	if sameHand(cur.tag, tag) {
		return &Handle{run: cur}
	}
	s.hanging[tag.Stop] = &hung{tag: tag, run: cur, writing: true}
	return &Handle{run: cur, own: &tag, put: s.keep(tag, nil)}
}

// sameHand says whether two tags can be taken off by the same people, so that one of them is enough.
func sameHand(a, b wire.Tag) bool {
	return a.By == b.By && a.Cause == b.Cause && (a.Order == "") == (b.Order == "")
}

// fire fires all requested layers on all targets at the same time and returns when the report is out.
func (s *Switch) fire(r *run, targets []target, noted <-chan struct{}) {
	found := newFuture(targets)
	if r.scope.All {
		found = &future{done: make(chan struct{})}
	}
	layers := s.fireLayers(r, found)
	s.cfg.Metrics.StopBegan(r.cause)
	if r.scope.All {
		ts := s.resolveMany(func(*session.Session) bool { return true })
		r.addKids(ts)
		found.set(ts)
		s.amend(r.currentTag())
	}
	s.audit.send(r.received())
	// The tag goes to disk while the layers fire: firing does not wait for the disk, and the note bridges the
	// time until then. The report waits for it, within a limit.
	put := s.keep(r.currentTag(), noted)
	layers.Wait()
	around := s.lookAround()
	s.reportTag(r, put)
	rep := r.finish(s.isContained(r, found.get()), s.degraded(around))
	s.settle(r, rep.State)
	s.cfg.Metrics.StopEnded(string(rep.State))
	for l, lr := range rep.Layers {
		s.cfg.Metrics.LayerFired(string(l), lr.Fired)
		if lr.Observed > 0 {
			s.cfg.Metrics.LayerObserved(string(l), lr.Observed)
		}
	}
	s.cfg.Log.Warn("stop", "stop", r.id, "scope", scopeText(r.scope), "by", r.tag.By, "reason", r.tag.Reason,
		"cause", r.cause, "state", rep.State, "kids", len(rep.Kids), "took", time.Since(r.from))
}

// fireLayers begins to fire the layers, all at the same time.
func (s *Switch) fireLayers(r *run, found *future) *sync.WaitGroup {
	if r.scope.Kid != "" {
		r.single = r.scope.Kid
	}
	var wg sync.WaitGroup
	if r.has(wire.LayerNetwork) {
		wg.Go(func() { s.fireNetwork(r, found) })
	}
	if r.has(wire.LayerCredential) {
		wg.Go(func() { s.fireCredential(r, found) })
	}
	if r.has(wire.LayerSession) {
		wg.Go(func() { s.fireSession(r, found) })
	}
	return &wg
}

// isContained says whether the network and the credential layer hold everything in scope: seen done in this
// stop, or demanded by another tag that hangs.
func (s *Switch) isContained(r *run, ts []target) bool {
	for _, l := range []wire.Layer{wire.LayerNetwork, wire.LayerCredential} {
		if r.has(l) {
			r.mu.Lock()
			state := r.layer(l).State
			r.mu.Unlock()
			if state != wire.StateObserved {
				return false
			}
			continue
		}
		for _, t := range ts {
			if !s.demanded(l, t.kid, t.card) {
				return false
			}
		}
	}
	return true
}

// Follow calls fn with every event of the stop, however late it is called, and returns the final one. It ends
// early with an error when ctx ends or fn fails; the stop goes on all the same.
func (h *Handle) Follow(ctx context.Context, fn func(wire.StopEvent) error) (wire.StopEvent, error) {
	final, err := h.run.follow(ctx, fn)
	if err != nil {
		return final, fmt.Errorf("following stop %s: %w", h.run.id, err)
	}
	if h.own == nil {
		return final, nil
	}
	rep := *final.Final
	own := *h.own
	own.Marks = rep.Tag.Marks
	rep.Tag = &own
	if err := h.put.wait(h.run.s.t.Persist); err != nil {
		rep.State = worse(rep.State, wire.StatePartial)
	}
	final.Final, final.State = &rep, rep.State
	return final, nil
}

// Report waits for the end of the stop.
func (h *Handle) Report(ctx context.Context) (wire.StopReport, error) {
	final, err := h.Follow(ctx, func(wire.StopEvent) error { return nil })
	if err != nil {
		return wire.StopReport{}, err
	}
	return *final.Final, nil
}

// future is the list of targets, which a stop of everything learns only after it has fired.
type future struct {
	done chan struct{}
	ts   []target
}

func newFuture(ts []target) *future {
	f := &future{done: make(chan struct{})}
	f.set(ts)
	return f
}

func (f *future) set(ts []target) { f.ts = ts; close(f.done) }

func (f *future) get() []target { <-f.done; return f.ts }
