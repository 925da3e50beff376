package kids

import (
	"fmt"
	"regexp"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/sandboxd/files"
	"tagout/sandboxd/runtime"
	"tagout/sandboxd/sockwatch"
)

// Plan is what a job card asks for, in plain values. Whoever made it has checked the card.
type Plan struct {
	Card      string
	CardHash  string
	CardText  string `json:"-"` // the card itself, kept beside the record
	Image     string
	Network   string          `json:",omitempty"` // session.NetworkNone, session.NetworkHost, or empty
	Reach     []session.Reach `json:",omitempty"` // with session.NetworkHost: all that it may connect to
	Root      int64           `json:",omitempty"` // bytes that its root may write outside of the workspace and /tmp; 0: it has no root
	Egress    policy.Spec
	Ports     []uint16 // TCP ports of all allow rules
	Hosts     []string // exact host names of all allow rules
	Inputs    []files.Input
	Workspace int64 // bytes
	Tmp       int64 // bytes
	NoExec    bool  `json:",omitempty"` // nothing in the two can be executed
	Secrets   []session.Secret
	Mints     []session.Mint `json:",omitempty"`
	Env       map[string]string

	TokenLifetime time.Duration    `json:",omitempty"` // of the session's tokens; 0: what the box allows
	NotKeys       []session.NotKey `json:",omitempty"` // what may look like a key in what it is given

	Limits   runtime.Limits
	Owner    string        // for the budget of kids
	Idle     time.Duration // after which it is destroyed when nothing runs in it; 0: never
	Lifetime time.Duration // after which it is destroyed; 0: never
	Stop     session.Stop
	InitArgs []string `json:",omitempty"` // for kid-init; none: it only waits
	Proof    bool     `json:",omitempty"` // killswitchd's own kid, for one proof
}

// Request asks for a kid.
type Request struct {
	Name    string // empty: one is made up
	Purpose string
	Actor   string // who asks, for the record
	Origin  string // stands for a request that may be repeated; a kid that it made already is the answer. May be empty
	Held    bool   // it lives as long as somebody holds it: see Hold
	Plan    Plan
	// Vouch is asked once, before anything is made and after a repeated request was recognised, who vouches for the
	// request. Its error is the answer. nil: nobody is asked.
	Vouch func() (Signature, error)
	// Approve is asked once, after Vouch, who approved that the kid lives on the machine's network, where the plan says that
	// it does. Its error is the answer. nil: nobody did.
	Approve func() (Approval, error)

	approved Approval // Approve's answer
}

var (
	nameRE = regexp.MustCompile(`^[a-z][a-z0-9-]{0,30}$`)
	envRE  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)
)

// CheckName says whether name can name a kid.
func CheckName(name string) error {
	if !nameRE.MatchString(name) {
		return refuse(Invalid, reason.Malformed, "kid name %q: use 1 to 31 lower-case letters, digits and dashes, starting with a letter", name)
	}
	return nil
}

func (m *Manager) checkRequest(r Request) error {
	if r.Name != "" {
		if err := CheckName(r.Name); err != nil {
			return err
		}
	}
	if err := checkProofName(r); err != nil {
		return err
	}
	if _, err := m.image(&r.Plan, "", 0); err != nil {
		return refuse(Invalid, reason.Malformed, "%w", err)
	}
	if r.Plan.Workspace <= 0 || r.Plan.Tmp <= 0 {
		return refuse(Invalid, reason.Malformed, "the plan gives no size for the workspace or for /tmp")
	}
	for name := range r.Plan.Env {
		if err := checkEnv(name); err != nil {
			return err
		}
	}
	for _, s := range r.Plan.Secrets {
		if err := checkEnv(s.Env); err != nil {
			return err
		}
	}
	if err := checkMints(r.Plan.Mints); err != nil {
		return err
	}
	return m.keySearch(audit.Record{Kid: r.Name, Card: r.Plan.Card, Actor: r.Actor}, &r.Plan).variables(r.Plan.Env)
}

// image returns the plan's image, for the kid called kid whose root is uid outside.
func (m *Manager) image(p *Plan, kid string, uid uint32) (Image, error) {
	img, ok := m.cfg.Images[p.Image]
	switch {
	case p.Root > 0 && m.cfg.Writable != nil:
		return m.cfg.Writable(p.Image, m.pins(kid).User, int(uid), p.Root)
	case ok:
		return img, nil
	case p.Root > 0 || m.cfg.Stored == nil:
		return nil, fmt.Errorf("image %q is not known: there is the image `host`", p.Image)
	}
	return m.cfg.Stored(p.Image, m.pins(kid).User)
}

func (m *Manager) imageOf(k *kid) (Image, error) {
	first, _ := m.cfg.Inst.KidUIDRange(k.rec.Session.Index)
	return m.image(&k.rec.Plan, k.name, first)
}

func checkEnv(name string) error {
	if !envRE.MatchString(name) {
		return refuse(Invalid, reason.Malformed, "%q cannot name an environment variable: use letters, digits and underscores", name)
	}
	return nil
}

// container turns the plan into what the runtime needs.
func (m *Manager) container(k *kid, mounts []runtime.Mount) runtime.Spec {
	s := &k.rec.Session
	first, count := m.cfg.Inst.KidUIDRange(s.Index)
	return runtime.Spec{
		ID: k.name, Root: m.rootDir(k), Writable: k.rec.Plan.Root > 0, Init: m.cfg.Init, InitArgs: k.rec.Plan.InitArgs,
		Mounts: append(mounts, runtime.Mount{Source: m.workspaceDir(k), Target: runtime.Home, Writable: true}),
		UserNS: m.pins(k.name).User, NetNS: s.NetNS, HostNetwork: k.onHost(), UIDFirst: first, UIDCount: count,
		Cgroup: m.cgroupRel(k.name), Limits: k.rec.Plan.Limits, Tmp: k.rec.Plan.Tmp, NoExec: k.rec.Plan.NoExec,
		Refusals:   runtime.Refusals{Listener: m.cfg.SocketWatch, Metadata: sockwatch.Metadata(s.Mark)},
		Unconfined: m.unconfined,
	}
}

// owner is the kid's user on the host.
func (m *Manager) owner(k *kid) files.Owner {
	first, _ := m.cfg.Inst.KidUIDRange(k.rec.Session.Index)
	id := int(first) + runtime.KidUID
	return files.Owner{UID: id, GID: id}
}

// runsAs is the uid on the host that the kid's commands have.
func (m *Manager) runsAs(k *kid) int {
	if k.rec.Plan.Root > 0 {
		return m.owner(k).UID - runtime.KidUID
	}
	return m.owner(k).UID
}

// environment merges what the image, the card, the tokens and the request say; later ones win.
func environment(sources ...map[string]string) []string {
	all := map[string]string{}
	for _, src := range sources {
		for name, value := range src {
			all[name] = value
		}
	}
	out := make([]string, 0, len(all))
	for name, value := range all {
		out = append(out, fmt.Sprintf("%s=%s", name, value))
	}
	return out
}
