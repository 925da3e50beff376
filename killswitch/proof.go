package killswitch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// ProofKids makes the kids of proofs. SandboxdProofs fulfils it.
type ProofKids interface {
	// Spawn returns a kid that sends packets to the gateway. It is destroyed when ctx ends, at the latest. lost is
	// called once sandboxd does not answer for the kid any more.
	Spawn(ctx context.Context, lost func()) (wire.ProofKid, error)
	// Packet sends one packet with the kid's mark out of a daemon's cgroup, and says whether it arrived.
	Packet(ctx context.Context, daemon, nonce string) (arrived bool, err error)
	Destroy(ctx context.Context) error // whatever proofs have left; returns when it is gone
}

// ProofOrders gives orders as people give them: over killswitchd's own socket. SocketOrders fulfils it.
type ProofOrders interface {
	Stop(ctx context.Context, r wire.StopRequest) (wire.StopReport, error)
}

// ProofNetwork tells the packets of a kid apart by where the kernel saw them.
type ProofNetwork interface {
	Flow(mark uint32) (Flow, error)
}

// Flow is what the programs saw of a kid's packets on their way out.
type Flow struct {
	KidPassed, KidDropped uint64 // at the kid's cgroup
	LinkPassed            uint64 // at its link

	DaemonPassed, DaemonDropped uint64 // with its mark, at the cgroups of the daemons
}

// ProofTokens says what credd would accept. Credd fulfils it.
type ProofTokens interface {
	Active(ctx context.Context, token string) (bool, error)
}

// ProofConfig is what proofs work with. No field may be nil.
type ProofConfig struct {
	Every   func() time.Duration // asked before each wait; above 0
	Kids    ProofKids
	Orders  ProofOrders
	Network ProofNetwork
	Tokens  ProofTokens
}

const (
	proofLimit   = 30 * time.Second // for one proof, from the spawn to the last layer
	proofDestroy = 20 * time.Second // for its kid's end
	proofFresh   = 2.5              // periods that a proof is good for
	firstRetry   = 250 * time.Millisecond
	lastRetry    = time.Minute
	downRetry    = 2 * time.Second  // while sandboxd is not there, or a tag hangs: asking costs nothing then
	longWait     = 10 * time.Second // Go's timers stand still while the machine sleeps; CLOCK_BOOTTIME does not
)

// errInterrupted ends a proof: a real stop has begun.
var errInterrupted = errors.New("a stop began")

// errLost ends a proof: sandboxd has ended, and may take the kid away from under it when it starts again.
var errLost = errors.New("sandboxd ended in the middle of it")

// errBlocked means that a tag hangs where the proof's kid would be.
var errBlocked = errors.New("a tag hangs")

// prover proves, again and again, that each layer works: it stops a kid of its own by the route that a person's order
// takes. It has a goroutine of its own, nothing waits for it, and a stop that begins ends the proof under way.
type prover struct {
	s   *Switch
	cfg ProofConfig
	log *slog.Logger
	ask chan chan wire.ProofReport

	mu     sync.Mutex                    // guards the fields below; never held across a call
	ticket *ticket                       // of the proof under way, nil between proofs
	last   map[wire.Layer]wire.LastProof // Age holds the boot time of the proof
	missed string                        // why the last attempt was not carried out, "" where it was
	tries  int                           // attempts in a row that did not pass
	tried  bool                          // there was an attempt, and what it needs was there
	began  time.Duration                 // boot time
}

func newProver(s *Switch, cfg ProofConfig) *prover {
	return &prover{s: s, cfg: cfg, log: s.cfg.Log, ask: make(chan chan wire.ProofReport), last: map[wire.Layer]wire.LastProof{}, began: bootTime()}
}

// run proves at once and then on schedule, until ctx ends.
func (p *prover) run(ctx context.Context) {
	var asked chan wire.ProofReport
	for ctx.Err() == nil {
		rep, err := p.prove(ctx)
		if ctx.Err() != nil {
			return
		}
		wait := p.note(rep, err)
		if asked != nil {
			asked <- rep // has room for it
		}
		asked = p.wait(ctx, bootTime()+wait)
	}
}

// wait returns when the time has come or ctx has ended, or earlier with the channel of somebody who asks for a proof.
func (p *prover) wait(ctx context.Context, until time.Duration) chan wire.ProofReport {
	for left := until - bootTime(); left > 0; left = until - bootTime() {
		t := time.NewTimer(min(left, longWait))
		select {
		case asked := <-p.ask:
			t.Stop()
			return asked
		case <-ctx.Done():
			t.Stop()
			return nil
		case <-t.C:
		}
	}
	return nil
}

// Prove proves now, or after the proof that is under way, and returns the outcome.
func (s *Switch) Prove(ctx context.Context) (wire.ProofReport, error) {
	if s.prover == nil {
		return wire.ProofReport{}, errors.New("this killswitchd makes no proofs")
	}
	answer := make(chan wire.ProofReport, 1)
	select {
	case s.prover.ask <- answer:
	case <-ctx.Done():
		return wire.ProofReport{}, ctx.Err()
	}
	select {
	case rep := <-answer:
		return rep, nil
	case <-ctx.Done():
		return wire.ProofReport{}, ctx.Err()
	}
}

func (s *Switch) serveProof(w http.ResponseWriter, r *http.Request) {
	rep, err := s.Prove(r.Context())
	if err != nil {
		control.Refuse(w, http.StatusServiceUnavailable, reason.OK, err.Error())
		return
	}
	control.Reply(w, rep)
}

// note keeps what a proof has shown and returns how long to wait before the next.
func (p *prover) note(rep wire.ProofReport, err error) time.Duration {
	every := p.cfg.Every()
	p.mu.Lock()
	fresh := p.keep(rep, err)
	tries := p.tries
	p.mu.Unlock()
	if fresh {
		p.record(rep)
	}
	switch {
	case rep.Outcome == wire.ProofPassed:
		return every
	case errors.Is(err, errBlocked), nobodyThere(err):
		return min(every, downRetry)
	case rep.Outcome == wire.ProofInterrupted: // where stops follow each other it would be in their way
		return min(every, lastRetry, downRetry<<min(tries, 10))
	}
	return min(every, lastRetry, firstRetry<<min(tries, 10))
}

// keep says whether the outcome is news. p.mu is held.
func (p *prover) keep(rep wire.ProofReport, err error) bool {
	switch rep.Outcome {
	case wire.ProofInterrupted:
		p.tries++
		return false // it has shown nothing
	case wire.ProofMissed:
		news := rep.Detail != p.missed && !errors.Is(err, errBlocked) && (p.tried || !nobodyThere(err))
		p.missed = rep.Detail
		p.tried = p.tried || !nobodyThere(err)
		p.tries++
		return news
	}
	p.missed, p.tried = "", true
	if p.tries++; rep.Outcome == wire.ProofPassed {
		p.tries = 0
	}
	for l, lp := range rep.Layers {
		p.last[l] = wire.LastProof{LayerProof: lp, Age: bootTime()}
	}
	return true
}

// nobodyThere says whether the proof was missed because sandboxd is not running: at every start for a while.
func nobodyThere(err error) bool {
	return errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.ECONNREFUSED)
}

func (p *prover) record(rep wire.ProofReport) {
	rec := audit.Record{Event: audit.EventProofFailed, Outcome: audit.OutcomeFail, Kid: rep.Kid, Fields: map[string]string{"nonce": rep.Nonce}}
	if rep.Outcome == wire.ProofPassed {
		rec.Event, rec.Outcome = audit.EventProofPassed, audit.OutcomeOK
	}
	said := []string{}
	if rep.Detail != "" {
		said = append(said, "not carried out: "+rep.Detail)
	}
	for _, l := range wire.AllLayers() {
		lp, ok := rep.Layers[l]
		if !ok {
			continue
		}
		rec.Fields[string(l)] = fmt.Sprintf("fired %v, observed %v", lp.Fired, lp.Observed)
		if !lp.Passed {
			said = append(said, fmt.Sprintf("%s: %s: %s", l, lp.Point, lp.Detail))
		}
	}
	rec.Detail = strings.Join(said, "; ")
	p.s.audit.send(rec)
	if rep.Outcome != wire.ProofPassed {
		p.log.Error("a proof of the stop layers did not pass", "kid", rep.Kid, "why", rec.Detail)
	}
}

// lasts returns the last proofs with their ages, why the last attempt was missed, and whether none was made yet.
func (p *prover) lasts() (last map[wire.Layer]wire.LastProof, missed string, busy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	last = maps.Clone(p.last)
	for l, lp := range last {
		lp.Age = bootTime() - lp.Age
		last[l] = lp
	}
	return last, p.missed, p.ticket != nil || !p.tried
}
