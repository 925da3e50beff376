package killswitch

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"tagout/internal/wire"
)

// proofOrder is the order in which a proof fires the layers on its kid: each leaves the next one something to show.
var proofOrder = []wire.Layer{wire.LayerCredential, wire.LayerNetwork, wire.LayerSession}

// prove makes one proof. err is why it was missed.
func (p *prover) prove(ctx context.Context) (rep wire.ProofReport, err error) {
	rep = wire.ProofReport{Outcome: wire.ProofMissed, Nonce: newNonce(), Layers: map[wire.Layer]wire.LayerProof{}}
	if t, clear := p.s.Clear(wire.Scope{Card: wire.ProofCard}); !clear {
		rep.Detail = fmt.Sprintf("tag %s hangs on %s: nothing can be spawned that a proof could stop", t.Stop, scopeText(t.Scope))
		return rep, errBlocked
	}
	ctx, cancel := context.WithTimeout(ctx, proofLimit)
	defer cancel()
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	t := &ticket{nonce: rep.Nonce, interrupt: interrupt}
	p.begin(t)
	defer p.end()
	k, err := p.cfg.Kids.Spawn(ctx, func() { interrupt(errLost) })
	if err == nil {
		defer p.destroy(k.Kid.Name)
		err = p.check(k)
	}
	switch {
	case context.Cause(ctx) == errInterrupted:
		rep.Outcome = wire.ProofInterrupted
		return rep, nil
	case err != nil:
		rep.Detail = err.Error()
		return rep, err
	}
	rep.Kid, rep.Outcome = k.Kid.Name, wire.ProofPassed
	p.name(t, k.Kid.Name)
	for _, l := range proofOrder {
		lp := p.layer(ctx, t, k, l)
		switch context.Cause(ctx) {
		case errInterrupted:
			rep.Outcome, rep.Layers = wire.ProofInterrupted, map[wire.Layer]wire.LayerProof{}
			return rep, nil
		case errLost:
			rep.Outcome, rep.Detail, rep.Layers = wire.ProofMissed, errLost.Error(), map[wire.Layer]wire.LayerProof{}
			return rep, errLost
		}
		if rep.Layers[l] = lp; !lp.Passed {
			rep.Outcome = wire.ProofFailed
		}
	}
	return rep, nil
}

// check makes sure that nothing but a proof's kid is stopped.
func (p *prover) check(k wire.ProofKid) error {
	if !wire.IsProofKid(k.Kid.Name) || !fileName(k.Kid.Name) {
		return fmt.Errorf("sandboxd gave kid %q for a proof, whose name is no proof's", k.Kid.Name)
	}
	doc, err := p.s.cfg.Sessions.Get(k.Kid.Name)
	if err != nil {
		return err
	}
	if doc.Mark != k.Kid.Mark || doc.ID != k.Kid.Session {
		return fmt.Errorf("sandboxd gave kid %s for a proof as another session than its document says", k.Kid.Name)
	}
	return nil
}

// destroy has the proof's kid removed, also when the proof was cut short. sandboxd goes on where it cannot be at once.
func (p *prover) destroy(kid string) {
	ctx, cancel := context.WithTimeout(context.Background(), proofDestroy)
	defer cancel()
	if err := p.cfg.Kids.Destroy(ctx); err != nil {
		p.log.Warn("destroying the kid of a proof", "kid", kid, "error", err)
	}
}

// failure is what was wrong at an enforcement point.
type failure struct{ point, detail string }

func (f *failure) Error() string { return f.point + ": " + f.detail }

func wrong(point, format string, args ...any) error {
	return &failure{point, fmt.Sprintf(format, args...)}
}

// layer fires one layer on the kid and says whether it did what it must.
func (p *prover) layer(ctx context.Context, t *ticket, k wire.ProofKid, l wire.Layer) wire.LayerProof {
	prove := map[wire.Layer]func(context.Context, wire.ProofKid, func() error) error{
		wire.LayerCredential: p.credential, wire.LayerNetwork: p.network, wire.LayerSession: p.session,
	}[l]
	var lp wire.LayerProof
	fire := func() error {
		rep, err := p.cfg.Orders.Stop(ctx, wire.StopRequest{
			Scope: wire.Scope{Kid: k.Kid.Name}, Layers: []wire.Layer{l}, By: proofBy, Reason: "proof " + t.nonce, Cause: CauseProof, Nonce: t.nonce,
		})
		if err != nil {
			return wrong(pointSocket, "the order did not get through killswitchd's own socket: %v", err)
		}
		lr := rep.Layers[l]
		lp.Fired, lp.Observed = lr.Fired, lr.Observed
		switch {
		case rep.Tag == nil || rep.Tag.Cause != CauseProof:
			return wrong(pointSocket, "killswitchd did not take the order for the proof's")
		case lr.State != wire.StateObserved:
			return wrong(pointOf[l], "%s: %s", lr.State, lr.Detail)
		case lr.Observed > k.MaxTime:
			return wrong(pointOf[l], "it took %v, and the card allows %v", lr.Observed, k.MaxTime)
		}
		return nil
	}
	err := prove(ctx, k, fire)
	var f *failure
	switch {
	case err == nil:
		lp.Passed = true
	case errors.As(err, &f):
		lp.Point, lp.Detail = f.point, f.detail
	default:
		lp.Point, lp.Detail = pointOf[l], err.Error()
	}
	lp.Detail = strings.ReplaceAll(lp.Detail, "\n", "; ") // joined errors
	return lp
}

// pointOf is the enforcement point of each layer for one kid; pointSocket is what comes before all of them.
var pointOf = map[wire.Layer]string{wire.LayerCredential: pointCredd, wire.LayerNetwork: pointSession, wire.LayerSession: pointCgroup}

const (
	pointSocket = "socket"
	pointLink   = "bpf-link"
	proofBy     = "killswitchd"
)

// credential proves that a token which credd accepts is one that it does not, afterwards.
func (p *prover) credential(ctx context.Context, k wire.ProofKid, fire func() error) error {
	if k.Token == "" {
		return fmt.Errorf("there is no token to revoke: %s", k.NoToken)
	}
	on, err := p.cfg.Tokens.Active(ctx, k.Token)
	if err != nil {
		return err
	}
	if !on {
		return errors.New("credd does not accept the kid's token, so its revocation shows nothing")
	}
	if err := fire(); err != nil {
		return err
	}
	if on, err = p.cfg.Tokens.Active(ctx, k.Token); err != nil {
		return err
	}
	if on {
		return errors.New("credd accepts the token that it said it has revoked")
	}
	return nil
}

// network proves that packets which pass at the kid's cgroup and on its link are dropped, afterwards, though they are
// still sent, and that none passes any more; and the same of packets with the kid's mark at the daemons' cgroups.
func (p *prover) network(ctx context.Context, k wire.ProofKid, fire func() error) error {
	mark := k.Kid.Mark
	before, err := p.until(ctx, mark, func(f Flow) bool { return f.KidPassed > 0 && f.LinkPassed > 0 })
	switch {
	case err != nil:
		return err
	case before.KidPassed == 0 && before.LinkPassed > 0:
		return errors.New("packets leave the kid that no program at the kids' cgroup has seen: run `tagout setup` again")
	case before.KidPassed == 0:
		return errors.New("no packet of the kid was seen at the kids' cgroup, so a cut shows nothing: run `tagout setup` again")
	case before.LinkPassed == 0:
		return wrong(pointLink, "packets leave the kid that no program at its link has seen: run `tagout setup` again")
	}
	if err := p.eachDaemon(ctx, mark, passedBefore); err != nil {
		return err
	}
	if err := fire(); err != nil {
		return err
	}
	at, err := p.cfg.Network.Flow(mark)
	if err != nil {
		return err
	}
	after, err := p.until(ctx, mark, func(f Flow) bool { return f.KidDropped > at.KidDropped || f.KidPassed > at.KidPassed })
	switch {
	case err != nil:
		return err
	case after.KidPassed > at.KidPassed || after.LinkPassed > at.LinkPassed:
		return fmt.Errorf("%d packets passed after the stop was observed", after.KidPassed-at.KidPassed+after.LinkPassed-at.LinkPassed)
	case after.KidDropped == at.KidDropped:
		return errors.New("no packet was seen to be dropped after the stop")
	}
	return p.eachDaemon(ctx, mark, droppedAfter)
}

// eachDaemon sends a packet with the kid's mark out of the cgroup of each daemon that sends such packets, and has judge
// say what it makes of what the program there counted and of whether the packet arrived.
func (p *prover) eachDaemon(ctx context.Context, mark uint32, judge func(counted Flow, arrived bool) error) error {
	for _, daemon := range wire.ProofDaemons() {
		point := "bpf-" + daemon
		before, err := p.cfg.Network.Flow(mark)
		if err != nil {
			return wrong(point, "%v", err)
		}
		arrived, err := p.cfg.Kids.Packet(ctx, daemon, newNonce())
		if err != nil {
			return wrong(point, "no packet could be sent: %v", err)
		}
		after, err := p.cfg.Network.Flow(mark)
		if err != nil {
			return wrong(point, "%v", err)
		}
		after.DaemonPassed -= before.DaemonPassed
		after.DaemonDropped -= before.DaemonDropped
		if err := judge(after, arrived); err != nil {
			return wrong(point, "%v", err)
		}
	}
	return nil
}

// passedBefore judges a packet before the stop.
func passedBefore(counted Flow, arrived bool) error {
	switch {
	case arrived && counted.DaemonPassed == 0:
		return errors.New("a packet of the session leaves that no program at the daemon's cgroup has seen: run `tagout setup` again")
	case !arrived || counted.DaemonPassed == 0:
		return errors.New("no packet of the session was seen to pass at the daemon's cgroup before the stop, so a cut shows nothing")
	}
	return nil
}

// droppedAfter judges one after it.
func droppedAfter(counted Flow, arrived bool) error {
	switch {
	case arrived || counted.DaemonPassed > 0:
		return errors.New("a packet of the session left after the stop was observed")
	case counted.DaemonDropped == 0:
		return errors.New("no packet of the session was seen to be dropped at the daemon's cgroup after the stop")
	}
	return nil
}

// flowWait is how long packets that are sent every 20 ms may take to be seen.
const flowWait = 2 * time.Second

// until looks at the kid's packets until ok says so, or for flowWait.
func (p *prover) until(ctx context.Context, mark uint32, ok func(Flow) bool) (Flow, error) {
	ctx, cancel := context.WithTimeout(ctx, flowWait)
	defer cancel()
	for {
		f, err := p.cfg.Network.Flow(mark)
		if err != nil || ok(f) || ctx.Err() != nil {
			return f, err
		}
		pause(ctx, p.s.t.Sample)
	}
}

// session proves that a cgroup which holds processes holds none, afterwards.
func (p *prover) session(_ context.Context, k wire.ProofKid, fire func() error) error {
	dir := p.s.unknown(k.Kid.Name, nil).dir // not what sandboxd says
	some, err := p.s.cfg.Cgroups.Populated(dir)
	if err != nil {
		return err
	}
	if !some {
		return errors.New("nothing runs in the kid, so its death shows nothing")
	}
	if err := fire(); err != nil {
		return err
	}
	if some, err = p.s.cfg.Cgroups.Populated(dir); err != nil {
		return err
	}
	if some {
		return errors.New("processes run in the kid that was seen to be empty")
	}
	return nil
}

func newNonce() string {
	var raw [16]byte
	rand.Read(raw[:]) // never fails: it ends the process instead (crypto/rand)
	return hex.EncodeToString(raw[:])
}
