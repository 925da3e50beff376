package sandboxd

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/card"
	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/kids"
	"tagout/sandboxd/runtime"
)

// PlanFromCard reads the request's card and derives the plan from it; rules that expire do so as of now. The
// error has the line and column of whatever is wrong with the card.
func PlanFromCard(r wire.SpawnRequest) (kids.Plan, error) {
	file := cardName(r.CardFile)
	c, egress, err := readCard(file, r.Card)
	if err != nil {
		return kids.Plan{}, err
	}
	compiled, err := policy.Compile(egress)
	if err != nil {
		return kids.Plan{}, fmt.Errorf("%s: %w", file, err)
	}
	inputs, err := planInputs(r.InputDir, c.Filesystem.Inputs)
	if err != nil {
		return kids.Plan{}, fmt.Errorf("%s: %w", file, err)
	}
	return kids.Plan{
		Card: c.Name, CardHash: c.Hash, CardText: r.Card, Image: c.Image, Network: c.Network, Reach: c.Reach,
		Egress: egress, Ports: compiled.Ports(), Hosts: compiled.ExactHosts(),
		Inputs: inputs, Workspace: c.Filesystem.Workspace, Tmp: c.Filesystem.Tmp, Root: c.Filesystem.Root, NoExec: c.Filesystem.NoExec,
		Secrets: c.Identity.Scope, Mints: c.Identity.Mint, TokenLifetime: c.Identity.Lifetime, NotKeys: c.Identity.NotKeys, Env: c.Env, Stop: c.Stop,
		Owner: c.Owner, Idle: c.Limits.Idle, Lifetime: c.Limits.Lifetime,
		Limits: runtime.Limits{PIDs: c.Limits.PIDs, Memory: c.Limits.Memory, CPUs: c.Limits.CPUs, OpenFiles: c.Limits.OpenFiles, DiskRate: c.Limits.DiskRate},
	}, nil
}

// planner is PlanFromCard that lets no kid reach the box's daemons: served is where they serve over TCP.
func planner(served []netip.AddrPort) func(wire.SpawnRequest) (kids.Plan, error) {
	return func(r wire.SpawnRequest) (kids.Plan, error) {
		plan, err := PlanFromCard(r)
		if err != nil {
			return plan, err
		}
		for _, to := range plan.Reach {
			if i := slices.IndexFunc(served, func(at netip.AddrPort) bool { return covers(to, at) }); i >= 0 {
				return kids.Plan{}, fmt.Errorf("%s: %s port %d is in reach, and Tagout itself serves at %s, which no kid may call: take it out", cardName(r.CardFile), to.To, to.Port, served[i])
			}
		}
		return plan, nil
	}
}

// covers says whether a connection within reach can end at a server; one that listens everywhere is at every address.
func covers(to session.Reach, at netip.AddrPort) bool {
	return to.Port == at.Port() && (at.Addr().IsUnspecified() || to.To.Contains(at.Addr().Unmap()))
}

// cardName is what messages call the card.
func cardName(file string) string {
	if file == "" {
		return "card"
	}
	return file
}

// readCard reads a card and makes the policy to enforce of it: rules that expire do so as of now.
func readCard(file, text string) (*card.Card, policy.Spec, error) {
	c, err := card.Parse(file, []byte(text))
	if err != nil {
		return nil, policy.Spec{}, err
	}
	return c, c.EgressAt(time.Now(), bootclock.Now()), nil
}

func planInputs(dir string, inputs []card.Input) ([]files.Input, error) {
	if len(inputs) > 0 && !filepath.IsAbs(dir) {
		return nil, errors.New("the card has inputs: say with input_dir, as an absolute path, which directory they are in")
	}
	out := make([]files.Input, 0, len(inputs))
	for _, in := range inputs {
		to, ok := strings.CutPrefix(in.To, runtime.Home+"/")
		if !ok {
			return nil, fmt.Errorf("input %s: its target %s is not below %s", in.From, in.To, runtime.Home)
		}
		out = append(out, files.Input{Dir: dir, From: filepath.FromSlash(in.From), To: to, Mode: in.Mode})
	}
	return out, nil
}
