package kids

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/network"
)

// SpawnProof makes the kid of one proof. Unlike any other kid it comes up without a token where credd gives none: it
// is the proof that has to tell. There is one at a time.
func (m *Manager) SpawnProof(ctx context.Context, actor string, plan Plan) (wire.ProofKid, error) {
	name, err := m.proofName()
	if err != nil {
		return wire.ProofKid{}, err
	}
	view, err := m.Spawn(ctx, Request{Name: name, Purpose: "prove that the stop layers work", Actor: actor, Plan: plan})
	if err != nil {
		return wire.ProofKid{}, err
	}
	out := wire.ProofKid{Kid: view, MaxTime: plan.Stop.MaxTime}
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k != nil {
		k.life.Lock()
		out.Token, out.NoToken = k.proofToken, k.noToken
		k.life.Unlock()
	}
	return out, nil
}

// proofName returns a name that no proof has had since this manager began.
func (m *Manager) proofName() (string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kids {
		if wire.IsProofKid(k.name) {
			return "", refuse(Conflict, reason.OK, "%s of another proof is still %s", k.name, k.state.Now())
		}
	}
	m.proofs++
	return fmt.Sprintf("%s%d", wire.ProofPrefix, m.proofs), nil
}

// SendProof sends one packet with the mark of the proof's kid out of a daemon's cgroup, to this machine itself, and says
// whether it arrived.
func (m *Manager) SendProof(ctx context.Context, daemon, nonce string) (arrived bool, err error) {
	if !slices.Contains(wire.ProofDaemons(), daemon) {
		return false, refuse(Invalid, reason.Malformed, "no daemon %q has packets to prove: use %s", daemon, strings.Join(wire.ProofDaemons(), " or "))
	}
	if len(nonce) == 0 || len(nonce) > maxNonce {
		return false, refuse(Invalid, reason.Malformed, "a nonce has 1 to %d bytes", maxNonce)
	}
	mark, err := m.proofMark()
	if err != nil {
		return false, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	arrived, err = network.SendMarked(ctx, m.cfg.Init, m.cfg.Cgroups.V2(m.cfg.Inst.DaemonCgroupRel(daemon)), mark, nonce)
	if err != nil {
		return false, refuse(Unavailable, reason.Internal, "%v", err)
	}
	return arrived, nil
}

// maxNonce fits into one packet.
const maxNonce = 64

// proofMark is the mark of the proof's kid that there is.
func (m *Manager) proofMark() (uint32, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kids {
		if wire.IsProofKid(k.name) {
			return k.rec.Session.Mark, nil
		}
	}
	return 0, refuse(NotFound, reason.UnknownSession, "there is no proof under way")
}

// DestroyProofs destroys every kid of a proof that there is.
func (m *Manager) DestroyProofs(ctx context.Context, actor string) error {
	m.mu.Lock()
	var names []string
	for name := range m.kids {
		if wire.IsProofKid(name) {
			names = append(names, name)
		}
	}
	m.mu.Unlock()
	var errs []error
	for _, name := range names {
		errs = append(errs, m.Destroy(ctx, name, actor, "the proof is over"))
	}
	return errors.Join(errs...)
}

// checkProofName refuses a proof's name to everybody else.
func checkProofName(r Request) error {
	if wire.IsProofKid(r.Name) != r.Plan.Proof {
		return refuse(Invalid, reason.Malformed, "kid name %q: names that begin with %s are those of Tagout's own proofs: choose another", r.Name, wire.ProofPrefix)
	}
	return nil
}

// mintProof asks for the token that a proof revokes. A credd that gives none leaves the kid without.
func (m *Manager) mintProof(ctx context.Context, k *kid) {
	s := &k.rec.Session
	reply, err := m.cfg.Credentials.Mint(ctx, wire.MintRequest{Kid: k.name, Session: s.ID, Card: s.Card, Mark: s.Mark, Secrets: []wire.MintSecret{}, Proof: true})
	if err != nil {
		k.noToken = err.Error()
		return
	}
	if k.proofToken = reply.Tokens[wire.ProofSecret]; k.proofToken == "" {
		k.noToken = "credd gave no token"
	}
}

// countKids reports how many kids there are, proofs' not among them. Call it with mu held.
func (m *Manager) countKids() {
	n := 0
	for name := range m.kids {
		if !wire.IsProofKid(name) {
			n++
		}
	}
	m.cfg.Metrics.Kids(n)
}

// refusedProof is refused for a proof: killswitchd records why it could not be carried out.
func (m *Manager) refusedProof(name string, err error) (wire.Kid, error) {
	m.cfg.Log.Warn("spawning the kid of a proof", "kid", name, "error", err)
	return wire.Kid{}, err
}

// spawned reports a kid that is up.
func (m *Manager) spawned(k *kid, r Request, sig Signature) {
	took := k.rec.Stages[wire.StageTotal]
	if !r.Plan.Proof {
		m.cfg.Metrics.Spawned(audit.OutcomeOK, took)
	}
	fields := map[string]string{"took": took.String(), "image": r.Plan.Image}
	if sig.Order != "" {
		sig.into(fields, r.Actor)
	}
	r.approved.into(fields)
	m.log(k, audit.Record{Event: audit.EventKidSpawned, Actor: r.Actor, Outcome: audit.OutcomeOK, Generation: k.rec.Session.Generation,
		Process: &audit.Process{PID: k.pid}, Detail: r.Purpose, Fields: fields})
}
