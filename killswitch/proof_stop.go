package killswitch

import (
	"context"
	"errors"
	"os"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// CauseProof is the cause of the stops by which killswitchd proves that its layers work. Nobody else can use it.
const CauseProof = "proof"

// ticket is a proof under way: it says which orders are the proof's own.
type ticket struct {
	nonce     string
	kid       string // "" while it is being spawned
	tag       *wire.Tag
	interrupt context.CancelCauseFunc
}

func (p *prover) begin(t *ticket) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticket = t
}

func (p *prover) name(t *ticket, kid string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	t.kid = kid
}

// end takes the proof's tag off. Its kid is gone.
func (p *prover) end() { p.begin(nil) }

// owns says whether an order is the one that the proof under way has just sent through the socket. Whatever else
// calls itself a proof is an order like any other: it hangs a tag and stays.
func (p *prover) owns(peer control.Peer, r *wire.StopRequest) bool {
	if p == nil || r.Cause != CauseProof || int(peer.PID) != os.Getpid() || len(r.Layers) != 1 {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ticket != nil && p.ticket.kid != "" && r.Nonce == p.ticket.nonce && r.Scope == wire.Scope{Kid: p.ticket.kid}
}

// isProof says whether the request that carries ctx is the order of the proof under way. What only claims to be is
// made an order; our own of a proof that has ended meanwhile is an error.
func (s *Switch) isProof(ctx context.Context, r *wire.StopRequest) (bool, error) {
	peer, known := control.PeerOf(ctx)
	switch {
	case known && s.prover.owns(peer, r):
		return true, nil
	case known && int(peer.PID) == os.Getpid() && r.Cause == CauseProof:
		return false, errors.New("the proof that this order belongs to is over")
	}
	r.Nonce, r.Cause = "", outsideCause(r.Cause)
	return false, nil
}

// outsideCause is the cause of a stop that came over the socket without a signature. What else pulls the switch
// (signal, sentinel, lease, trip rule, fleet) is known to killswitchd itself, and who takes the tag off depends on it: a
// caller that claims it gets an ordinary order, for no stop is refused over a word.
func outsideCause(claimed string) string {
	if claimed == CauseHTTP {
		return CauseHTTP
	}
	return CauseOrder
}

// interruptProof ends the proof under way, if there is one: a stop has begun. It waits for nothing.
func (s *Switch) interruptProof() {
	if s.prover == nil {
		return
	}
	s.prover.mu.Lock()
	t := s.prover.ticket
	s.prover.mu.Unlock()
	if t != nil {
		t.interrupt(errInterrupted)
	}
}

// proofTag returns the tag of the proof under way where it hangs on the scope. It hangs in memory alone: on disk a
// power cut could leave half of it, which would count as a tag on everything.
func (s *Switch) proofTag(sc wire.Scope) (wire.Tag, bool) {
	if s.prover == nil {
		return wire.Tag{}, false
	}
	s.prover.mu.Lock()
	defer s.prover.mu.Unlock()
	t := s.prover.ticket
	if t == nil || t.tag == nil || sc.Kid != t.kid {
		return wire.Tag{}, false
	}
	return *t.tag, true
}

// beginProof fires a proof's stop. Its tag is no operator's: it is not shown, not kept and not enforced again, and
// needs no release.
func (s *Switch) beginProof(r *run, targets []target) *Handle {
	tag := r.currentTag()
	s.prover.mu.Lock()
	if t := s.prover.ticket; t != nil {
		t.tag = &tag
	}
	s.prover.mu.Unlock()
	go func() {
		s.fireLayers(r, newFuture(targets)).Wait()
		r.finish(true, nil)
	}()
	return &Handle{run: r}
}
