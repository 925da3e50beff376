package killswitch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

// proofRig is a rig whose sandboxd, credd, kernel and socket do what a proof needs; a func field that is set takes a
// part's place.
type proofRig struct {
	*rig
	s *Switch

	mu     sync.Mutex
	n      int
	active map[string]bool // token -> accepted
	gone   []string        // kids that were destroyed
	every  time.Duration

	spawn func(ctx context.Context, k wire.ProofKid) (wire.ProofKid, error)
	lost  func() // of the last proof's kid
	flow  func(mark uint32, f Flow) Flow
	token func(active bool) (bool, error)
	send  func(ctx context.Context, r wire.StopRequest) // before an order is given

	daemons Flow                                                              // what was counted of packets at the daemons' cgroups
	packet  func(daemon string, stopped bool) (f Flow, arrived, refused bool) // what a packet adds to it; nil: what it must
}

func newProofRig(t *testing.T) *proofRig {
	p := &proofRig{rig: newRig(t, "real"), active: map[string]bool{}, every: time.Hour}
	cfg := p.config()
	cfg.Proof = &ProofConfig{Every: func() time.Duration { p.mu.Lock(); defer p.mu.Unlock(); return p.every }, Kids: proofKids{p}, Orders: p, Network: p, Tokens: p}
	p.s = New(cfg)
	return p
}

type proofKids struct{ p *proofRig }

func (k proofKids) Spawn(ctx context.Context, lost func()) (wire.ProofKid, error) {
	p := k.p
	p.mu.Lock()
	p.n++
	name, mark, token := fmt.Sprintf("%s%d", wire.ProofPrefix, p.n), uint32(0x54100100+p.n), fmt.Sprintf("tgo_%d", p.n)
	p.active[token] = true
	p.mu.Unlock()
	p.rig.mu.Lock()
	p.lost = lost
	p.add(name, wire.ProofCard, mark)
	p.rig.mu.Unlock()
	out := wire.ProofKid{Kid: wire.Kid{Name: name, Session: "s-" + name, Mark: mark}, Token: token, MaxTime: time.Second}
	if f := hook(p.rig, &p.spawn); f != nil {
		return f(ctx, out)
	}
	return out, nil
}

// Packet passes and arrives until the session is stopped, and is dropped from then on.
func (k proofKids) Packet(_ context.Context, daemon, nonce string) (arrived bool, err error) {
	p := k.p
	p.mu.Lock()
	n := p.n
	p.mu.Unlock()
	on, err := p.Stopped(uint32(0x54100100 + n))
	if err == nil && nonce == "" {
		err = errors.New("there is no nonce")
	}
	if err != nil {
		return false, err
	}
	f, arrived, refused := Flow{DaemonPassed: 1}, true, false
	if on {
		f, arrived = Flow{DaemonDropped: 1}, false
	}
	if change := hook(p.rig, &p.packet); change != nil {
		f, arrived, refused = change(daemon, on)
	}
	if refused {
		return false, errors.New("its cgroup is gone")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.daemons.DaemonPassed += f.DaemonPassed
	p.daemons.DaemonDropped += f.DaemonDropped
	return arrived, nil
}

func (k proofKids) Destroy(context.Context) error {
	k.p.mu.Lock()
	defer k.p.mu.Unlock()
	k.p.gone = append(k.p.gone, fmt.Sprintf("%s%d", wire.ProofPrefix, k.p.n))
	return nil
}

// Stop is the socket: it hands the order over as serveStop does.
func (p *proofRig) Stop(ctx context.Context, r wire.StopRequest) (wire.StopReport, error) {
	if f := hook(p.rig, &p.send); f != nil {
		f(ctx, r)
	}
	if err := ctx.Err(); err != nil {
		return wire.StopReport{}, err
	}
	if !p.s.prover.owns(self, &r) {
		return wire.StopReport{}, errors.New("not the proof's")
	}
	h, err := p.s.Stop(Order{StopRequest: r, Received: time.Now(), proof: true})
	if err != nil {
		return wire.StopReport{}, err
	}
	return h.Report(ctx)
}

// Flow has packets that pass until the session is stopped and are dropped from then on.
func (p *proofRig) Flow(mark uint32) (Flow, error) {
	on, err := p.Stopped(mark)
	if err != nil {
		return Flow{}, err
	}
	p.mu.Lock()
	f := p.daemons
	p.mu.Unlock()
	f.KidPassed, f.LinkPassed = 5, 5
	if on {
		f.KidDropped = uint64(drops.Add(1))
	}
	if change := hook(p.rig, &p.flow); change != nil {
		f = change(mark, f)
	}
	return f, nil
}

var drops atomic.Int64

func (p *proofRig) Active(_ context.Context, token string) (bool, error) {
	p.mu.Lock()
	on := p.active[token]
	p.mu.Unlock()
	if f := hook(p.rig, &p.token); f != nil {
		return f(on)
	}
	return on, nil
}

// forget makes every token unknown, as credd does when it revokes.
func (p *proofRig) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.active = map[string]bool{}
}

func (p *proofRig) prove(t *testing.T) wire.ProofReport {
	t.Helper()
	rep, err := p.s.Prove(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func (p *proofRig) lamps(t *testing.T) map[wire.Layer]wire.LayerStatus {
	t.Helper()
	return p.s.Status(t.Context()).Layers
}

func (p *proofRig) start(t *testing.T) {
	t.Helper()
	p.rig.revoke = func(_ context.Context, r wire.RevokeRequest) (int, error) { p.forget(); return len(r.Marks), nil }
	running(t, p.s)
}

// TestProofPasses: all three layers, one after the other, on a kid that is gone afterwards; no tag, no stop record, no
// real kid touched.
func TestProofPasses(t *testing.T) {
	p := newProofRig(t)
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampDegraded || !strings.Contains(ls.Detail, "not proven yet") {
			t.Errorf("%s before the first proof: %+v", l, ls)
		}
	}
	var fired []wire.Layer
	var under []error
	p.send = func(_ context.Context, r wire.StopRequest) {
		fired = append(fired, r.Layers...)
		if r.Nonce == "" || !strings.Contains(r.Reason, r.Nonce) || r.Cause != CauseProof {
			under = append(under, fmt.Errorf("order %+v", r))
		}
		if len(fired)%3 != 1 { // the tag of the proof's first stop hangs by now, on that kid alone
			if _, clear := p.s.Clear(r.Scope); clear {
				under = append(under, errors.New("nothing hangs on the proof's kid"))
			}
			if tag, clear := p.s.Clear(wire.Scope{Kid: "real", Card: "card-r"}); !clear {
				under = append(under, fmt.Errorf("tag %+v hangs on a real kid", tag))
			}
		}
		if n := len(p.s.Tags()); n != 0 {
			under = append(under, fmt.Errorf("%d tags are shown", n))
		}
	}
	p.start(t)
	rep := p.prove(t)
	if rep.Outcome != wire.ProofPassed || len(rep.Layers) != 3 {
		t.Fatalf("report %+v", rep)
	}
	if want := "[credential network session credential network session]"; fmt.Sprint(fired) != want {
		t.Errorf("fired %v, want the proof at the start and this one: %s", fired, want)
	}
	for _, err := range under {
		t.Error(err)
	}
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampArmed || ls.Proof == nil || !ls.Proof.Passed || ls.Proof.Age < 0 {
			t.Errorf("%s: %+v", l, ls)
		}
	}
	if fmt.Sprint(p.gone) != "[proof-1 proof-2]" {
		t.Errorf("destroyed %v", p.gone)
	}
	if tag, clear := p.s.Clear(wire.Scope{Kid: rep.Kid}); !clear {
		t.Errorf("tag %+v hangs after the proof", tag)
	}
	if p.count1("kill "+kidsDir+"/real")+p.count1("put")+p.count1("note") != 0 {
		t.Errorf("calls %v", p.calls)
	}
	waitFor(t, "two records", func() bool { return len(p.recorded(audit.EventProofPassed)) == 2 })
	for _, event := range []string{audit.EventStopReceived, audit.EventStopProgress, audit.EventStopCompleted, audit.EventProofFailed} {
		if recs := p.recorded(event); len(recs) != 0 {
			t.Errorf("%s: %+v", event, recs)
		}
	}
}

// TestProofFails breaks each layer in turn: its lamp says so, with the point and the reason, the others stay armed, and
// after the repair all are armed again.
func TestProofFails(t *testing.T) {
	const late = 200 * time.Millisecond // more than what revoke may take
	for name, c := range map[string]struct {
		layer wire.Layer
		point string
		why   string
		brake func(p *proofRig)
	}{
		"credd is silent": {wire.LayerCredential, pointCredd, "a stop would have killed it", func(p *proofRig) {
			p.revoke = func(ctx context.Context, _ wire.RevokeRequest) (int, error) { pause(ctx, late); return 0, ctx.Err() }
		}},
		"credd says so and does not": {wire.LayerCredential, pointCredd, "accepts the token that it said it has revoked", func(p *proofRig) {
			p.revoke = func(context.Context, wire.RevokeRequest) (int, error) { return 1, nil }
		}},
		"the token was never good": {wire.LayerCredential, pointCredd, "shows nothing", func(p *proofRig) {
			p.token = func(bool) (bool, error) { return false, nil }
		}},
		"no token": {wire.LayerCredential, pointCredd, "no token to revoke: the vault is away", func(p *proofRig) {
			p.spawn = func(_ context.Context, k wire.ProofKid) (wire.ProofKid, error) {
				k.Token, k.NoToken = "", "the vault is away"
				return k, nil
			}
		}},
		"the kids' programs are gone": {wire.LayerNetwork, pointSession, "no program at the kids' cgroup has seen", func(p *proofRig) {
			p.flow = func(_ uint32, f Flow) Flow { f.KidPassed, f.KidDropped = 0, 0; return f }
		}},
		"the link's programs are gone": {wire.LayerNetwork, pointLink, "no program at its link has seen", func(p *proofRig) {
			p.flow = func(_ uint32, f Flow) Flow { f.LinkPassed = 0; return f }
		}},
		"packets go on passing": {wire.LayerNetwork, pointSession, "passed after the stop was observed", func(p *proofRig) {
			p.flow = func(_ uint32, f Flow) Flow { f.KidPassed += uint64(drops.Add(1)); f.KidDropped = 0; return f }
		}},
		"nothing is dropped": {wire.LayerNetwork, pointSession, "no packet was seen to be dropped", func(p *proofRig) {
			p.flow = func(_ uint32, f Flow) Flow { f.KidDropped = 0; return f }
		}},
		"the proxy's program is gone": {wire.LayerNetwork, "bpf-proxy", "no program at the daemon's cgroup has seen", func(p *proofRig) {
			p.packet = func(string, bool) (Flow, bool, bool) { return Flow{}, true, false }
		}},
		"dnsfilter's alone is gone": {wire.LayerNetwork, "bpf-dnsfilter", "no program at the daemon's cgroup has seen", func(p *proofRig) {
			p.packet = func(daemon string, on bool) (Flow, bool, bool) {
				if daemon == "dnsfilter" {
					return Flow{}, true, false
				}
				return Flow{DaemonPassed: 1}, true, false
			}
		}},
		"a daemon's packets never pass": {wire.LayerNetwork, "bpf-proxy", "so a cut shows nothing", func(p *proofRig) {
			p.packet = func(string, bool) (Flow, bool, bool) { return Flow{DaemonDropped: 1}, false, false }
		}},
		"another program lets all pass": {wire.LayerNetwork, "bpf-proxy", "left after the stop was observed", func(p *proofRig) {
			p.packet = func(string, bool) (Flow, bool, bool) { return Flow{DaemonPassed: 1}, true, false }
		}},
		"a daemon's packets arrive uncounted": {wire.LayerNetwork, "bpf-dnsfilter", "left after the stop was observed", func(p *proofRig) {
			p.packet = func(daemon string, on bool) (Flow, bool, bool) {
				if !on {
					return Flow{DaemonPassed: 1}, true, false
				}
				return Flow{DaemonDropped: 1}, daemon == "dnsfilter", false
			}
		}},
		"something else drops a daemon's packets": {wire.LayerNetwork, "bpf-proxy", "seen to be dropped at the daemon's cgroup", func(p *proofRig) {
			p.packet = func(_ string, on bool) (Flow, bool, bool) {
				if on {
					return Flow{}, false, false
				}
				return Flow{DaemonPassed: 1}, true, false
			}
		}},
		"a daemon's cgroup is gone": {wire.LayerNetwork, "bpf-proxy", "its cgroup is gone", func(p *proofRig) {
			p.packet = func(string, bool) (Flow, bool, bool) { return Flow{}, false, true }
		}},
		"the counters move": {wire.LayerNetwork, pointSession, "packets passed within", func(p *proofRig) {
			p.count = func(uint32) (Counters, error) { return Counters{Packets: uint64(drops.Add(1))}, nil }
		}},
		"the map cannot be written": {wire.LayerNetwork, pointSession, "not stopped in the kernel", func(p *proofRig) {
			p.cut = func(uint32) error { return syscall.EPERM }
		}},
		"the cgroup cannot be written": {wire.LayerSession, pointCgroup, "permission denied", func(p *proofRig) {
			p.kill = func(string) error { return syscall.EACCES }
		}},
		"processes do not die": {wire.LayerSession, pointCgroup, "still counts a process", func(p *proofRig) {
			p.kill = func(string) error { return nil }
		}},
		"too late for the card": {wire.LayerSession, pointCgroup, "the card allows", func(p *proofRig) {
			p.kill = func(dir string) error { pause(context.Background(), 20*time.Millisecond); return p.reallyKill(dir) }
			p.spawn = func(_ context.Context, k wire.ProofKid) (wire.ProofKid, error) {
				k.MaxTime = 20 * time.Millisecond
				return k, nil
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newProofRig(t)
			p.start(t)
			if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
				t.Fatalf("before: %+v", rep)
			}
			sound := p.hooks()
			p.rig.mu.Lock()
			c.brake(p)
			p.rig.mu.Unlock()
			rep := p.prove(t)
			if lp := rep.Layers[c.layer]; rep.Outcome != wire.ProofFailed || lp.Passed || lp.Point != c.point || !strings.Contains(lp.Detail, c.why) {
				t.Fatalf("%+v", rep)
			}
			for l, ls := range p.lamps(t) {
				want := wire.LampArmed
				if l == c.layer {
					want = wire.LampDegraded
				}
				if ls.State != want || l == c.layer && !strings.Contains(ls.Detail, c.why) {
					t.Errorf("%s: %+v", l, ls)
				}
			}
			if n := p.count1("kill " + creddDir); n != 0 {
				t.Errorf("credd was killed %d times for a proof", n)
			}
			waitFor(t, "a record", func() bool { return len(p.recorded(audit.EventProofFailed)) > 0 })
			p.rig.mu.Lock()
			sound()
			p.rig.mu.Unlock()
			if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
				t.Errorf("after the repair: %+v", rep)
			}
		})
	}
}

// hooks returns what puts the hooks back as they are now. Call it with rig.mu held.
func (p *proofRig) hooks() func() {
	revoke := p.revoke
	return func() {
		p.revoke, p.token, p.spawn, p.flow, p.count, p.cut, p.kill, p.send = revoke, nil, nil, nil, nil, nil, nil, nil
		p.packet = nil
	}
}

// TestProofYieldsToAStop: a real stop does not wait for a proof, at whatever that is, and ends it; it has shown nothing.
func TestProofYieldsToAStop(t *testing.T) {
	p := newProofRig(t)
	p.start(t)
	if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
		t.Fatalf("%+v", rep)
	}
	for name, hang := range map[string]func(inside chan<- struct{}){
		"spawning": func(inside chan<- struct{}) {
			p.spawn = func(ctx context.Context, _ wire.ProofKid) (wire.ProofKid, error) {
				inside <- struct{}{}
				<-ctx.Done()
				return wire.ProofKid{}, ctx.Err()
			}
		},
		"firing": func(inside chan<- struct{}) {
			p.send = func(ctx context.Context, _ wire.StopRequest) {
				inside <- struct{}{}
				<-ctx.Done()
			}
		},
	} {
		inside := make(chan struct{}, 1)
		p.rig.mu.Lock()
		reset := p.hooks()
		hang(inside)
		p.rig.mu.Unlock()
		done := make(chan wire.ProofReport, 1)
		go func() { rep, _ := p.s.Prove(t.Context()); done <- rep }()
		<-inside
		rep := order(t, p.s, wire.Scope{Kid: "real"})
		if rep.State != wire.StateObserved {
			t.Errorf("%s: the stop: %+v", name, rep)
		}
		if proof := <-done; proof.Outcome != wire.ProofInterrupted {
			t.Errorf("%s: the proof: %+v", name, proof)
		}
		for l, ls := range p.lamps(t) {
			if ls.State != wire.LampStopped || ls.Proof == nil || !ls.Proof.Passed {
				t.Errorf("%s: %s: %+v", name, l, ls)
			}
		}
		p.rig.mu.Lock()
		reset()
		p.rig.mu.Unlock()
		if _, err := signRelease(t, p.s, rep.Stop, "ada"); err != nil {
			t.Fatal(err)
		}
	}
	if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
		t.Errorf("afterwards: %+v", rep)
	}
}

// TestProofIsMissed: without sandboxd, or with a kid that is no proof's, nothing is fired, and what was proven before
// holds until it is too old.
func TestProofIsMissed(t *testing.T) {
	p := newProofRig(t)
	p.spawn = func(context.Context, wire.ProofKid) (wire.ProofKid, error) {
		return wire.ProofKid{}, &control.Unanswered{Route: "/v1/proof", Socket: "sandboxd", Err: syscall.ECONNREFUSED}
	}
	p.start(t)
	if rep := p.prove(t); rep.Outcome != wire.ProofMissed || !strings.Contains(rep.Detail, "is the daemon running?") {
		t.Fatalf("%+v", rep)
	}
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampDegraded || !strings.Contains(ls.Detail, "not proven yet: ") || !strings.Contains(ls.Detail, "is the daemon running?") {
			t.Errorf("%s: %+v", l, ls)
		}
	}
	if recs := p.recorded(audit.EventProofFailed); len(recs) != 0 {
		t.Errorf("a start without sandboxd is recorded: %+v", recs)
	}
	set := func(f func(context.Context, wire.ProofKid) (wire.ProofKid, error)) {
		p.rig.mu.Lock()
		defer p.rig.mu.Unlock()
		p.spawn = f
	}
	set(nil)
	if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
		t.Fatalf("%+v", rep)
	}
	kills := p.count1("kill " + kidsDir + "/real")
	set(func(_ context.Context, k wire.ProofKid) (wire.ProofKid, error) {
		k.Kid = wire.Kid{Name: "real", Session: "s-real", Mark: 0x54100001}
		return k, nil
	})
	if rep := p.prove(t); rep.Outcome != wire.ProofMissed || !strings.Contains(rep.Detail, "no proof's") {
		t.Errorf("%+v", rep)
	}
	set(func(_ context.Context, k wire.ProofKid) (wire.ProofKid, error) {
		k.Kid.Mark = 0x54100001
		return k, nil
	})
	if rep := p.prove(t); rep.Outcome != wire.ProofMissed || !strings.Contains(rep.Detail, "another session") {
		t.Errorf("%+v", rep)
	}
	if n := p.count1("kill " + kidsDir + "/real"); n != kills {
		t.Error("a real kid was killed for a proof")
	}
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampArmed || !strings.Contains(ls.Detail, "could not be carried out") {
			t.Errorf("%s: %+v", l, ls)
		}
	}
	p.mu.Lock()
	p.every = time.Nanosecond
	p.mu.Unlock()
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampDegraded || !strings.Contains(ls.Detail, "old") {
			t.Errorf("%s: %+v", l, ls)
		}
	}
}

// TestASandboxdThatEndsProvesNothing: what its successor takes away is no layer's failure.
func TestASandboxdThatEndsProvesNothing(t *testing.T) {
	p := newProofRig(t)
	p.start(t)
	if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
		t.Fatalf("%+v", rep)
	}
	p.rig.mu.Lock()
	p.send = func(context.Context, wire.StopRequest) { p.lost() }
	p.rig.mu.Unlock()
	if rep := p.prove(t); rep.Outcome != wire.ProofMissed || rep.Detail != errLost.Error() || len(rep.Layers) != 0 {
		t.Errorf("%+v", rep)
	}
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampArmed || !strings.Contains(ls.Detail, errLost.Error()) {
			t.Errorf("%s: %+v", l, ls)
		}
	}
}

// TestNothingIsProvenUnderATagOnEverything, and the lamps say why.
func TestNothingIsProvenUnderATagOnEverything(t *testing.T) {
	p := newProofRig(t)
	p.start(t)
	if rep := p.prove(t); rep.Outcome != wire.ProofPassed {
		t.Fatalf("%+v", rep)
	}
	stop := order(t, p.s, wire.Scope{All: true})
	if rep := p.prove(t); rep.Outcome != wire.ProofMissed || !strings.Contains(rep.Detail, stop.Stop) {
		t.Errorf("%+v", rep)
	}
	for l, ls := range p.lamps(t) {
		if ls.State != wire.LampStopped {
			t.Errorf("%s: %+v", l, ls)
		}
	}
	p.mu.Lock()
	spawned := p.n
	p.mu.Unlock()
	if spawned != 2 {
		t.Errorf("%d kids were spawned for proofs, one of them under the tag", spawned)
	}
}

// TestOnlyTheProofsOwnOrderIsAProof: whatever else says that it is one is an order like any other.
func TestOnlyTheProofsOwnOrderIsAProof(t *testing.T) {
	p := newProofRig(t)
	tk := &ticket{nonce: "n1", kid: "proof-1"}
	p.s.prover.begin(tk)
	own := wire.StopRequest{Scope: wire.Scope{Kid: "proof-1"}, Layers: []wire.Layer{wire.LayerSession}, Cause: CauseProof, Nonce: "n1"}
	if !p.s.prover.owns(self, &own) {
		t.Fatal("the proof's own order is not taken for it")
	}
	for name, c := range map[string]struct {
		peer   control.Peer
		change func(r *wire.StopRequest)
	}{
		"another process": {control.Peer{PID: 1}, func(*wire.StopRequest) {}},
		"another nonce":   {self, func(r *wire.StopRequest) { r.Nonce = "n2" }},
		"no nonce":        {self, func(r *wire.StopRequest) { r.Nonce = "" }},
		"another kid":     {self, func(r *wire.StopRequest) { r.Scope.Kid = "real" }},
		"everything":      {self, func(r *wire.StopRequest) { r.Scope = wire.Scope{All: true} }},
		"more scope":      {self, func(r *wire.StopRequest) { r.Scope.Card = "x" }},
		"another cause":   {self, func(r *wire.StopRequest) { r.Cause = CauseOrder }},
		"all layers":      {self, func(r *wire.StopRequest) { r.Layers = nil }},
	} {
		r := own
		if c.change(&r); p.s.prover.owns(c.peer, &r) {
			t.Errorf("%s: taken for the proof's", name)
		}
	}
	p.s.prover.end()
	if p.s.prover.owns(self, &own) {
		t.Error("taken for a proof's that is over")
	}
	// Of an unknown peer it is an order, and hangs a tag like any other.
	claim := own
	if proof, err := p.s.isProof(t.Context(), &claim); proof || err != nil || claim.Cause != CauseOrder || claim.Nonce != "" {
		t.Errorf("%v %v %+v", proof, err, claim)
	}
}

// TestProofsFollowTheSchedule: one at the start, then one a period, never two at once.
func TestProofsFollowTheSchedule(t *testing.T) {
	p := newProofRig(t)
	p.every = 20 * time.Millisecond
	var now, most atomic.Int32
	p.spawn = func(_ context.Context, k wire.ProofKid) (wire.ProofKid, error) {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		pause(t.Context(), 5*time.Millisecond)
		return k, nil
	}
	began := bootTime()
	p.start(t)
	done := make(chan struct{})
	go func() { defer close(done); p.s.Prove(t.Context()) }() // in between
	<-done
	waitFor(t, "six proofs", func() bool { return len(p.recorded(audit.EventProofPassed)) >= 6 })
	if took := bootTime() - began; took < 4*p.every {
		t.Errorf("six proofs took %v, which is less than four periods", took)
	}
	if most.Load() != 1 {
		t.Errorf("%d proofs at once", most.Load())
	}
}

// TestProofRetriesGrowRarer: a proof that fails is repeated soon, and ever less often.
func TestProofRetriesGrowRarer(t *testing.T) {
	p := newProofRig(t)
	failed := wire.ProofReport{Outcome: wire.ProofFailed}
	last := time.Duration(0)
	for range 12 {
		wait := p.s.prover.note(failed, nil)
		if wait < last || wait > lastRetry {
			t.Fatalf("%v after %v", wait, last)
		}
		last = wait
	}
	if last != lastRetry {
		t.Errorf("in the end every %v", last)
	}
	if wait := p.s.prover.note(wire.ProofReport{Outcome: wire.ProofPassed}, nil); wait != time.Hour {
		t.Errorf("after one that passed: %v", wait)
	}
	if wait := p.s.prover.note(failed, nil); wait > time.Second {
		t.Errorf("after the next that failed: %v", wait)
	}
}

// self is this process as the kernel would tell of it.
var self = control.Peer{PID: int32(os.Getpid())} // pids are small

// TestNothingTripsOverAProof: neither a lease that runs out nor a rule of the box hangs a tag on a proof's kid.
func TestNothingTripsOverAProof(t *testing.T) {
	g := newRig(t, "a1", "proof-1")
	s, clock := leased(t, g)
	pass(s, clock, 2*s.t.KidLease)
	if tags := leaseTags(s); len(tags) != 1 || tags[0].Scope.Kid != "a1" {
		t.Errorf("tags of leases: %+v", tags)
	}
	trips := &Trips{s: g.sw(), rules: []trip.Rule{{On: trip.Denied, Fires: wire.AllLayers()}}}
	if n := len(trips.open(g.docs["a1"])); n != 1 {
		t.Errorf("%d rules of a real kid, want 1", n)
	}
	if n := len(trips.open(g.docs["proof-1"])); n != 0 {
		t.Errorf("%d rules of a proof's kid", n)
	}
}
