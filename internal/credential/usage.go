package credential

import (
	"net/http"
	"slices"
	"strings"
	"sync"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// usage remembers what living sessions made of what they were granted, until they end: a revocation ends their tokens and
// not what is to be said of them. It is memory alone, as tokens are.
type usage struct {
	mu    sync.Mutex
	byKid map[string]*sessionUse // guarded by mu, with all below
}

type sessionUse struct {
	h    *holder
	uses map[string]*secretUse // by secret; nil until the first use
}

// secretUse is what a token was used for. Each set is bounded by its binding, but for methods, of which only the first two
// count where any may be used.
type secretUse struct {
	uses                  uint64
	hosts, methods, paths []string
}

func newUsage() *usage { return &usage{byKid: map[string]*sessionUse{}} }

// begin starts to remember a session that was granted something.
func (u *usage) begin(h *holder) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.byKid[h.kid] = &sessionUse{h: h}
}

// note remembers a use that was accepted. b is the secret's binding, nil where it has none.
func (u *usage) note(h *holder, secret string, b *binding, hostport string, req *wire.ResolveRequest) {
	var globs []string // found before the lock: a kid chooses how long a path is
	if b != nil {
		globs = policy.PathGlobs(b.Paths, req.Path)
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.byKid[h.kid]
	if s == nil || s.h != h {
		return // it has ended
	}
	use := s.uses[secret]
	if use == nil {
		if s.uses == nil {
			s.uses = map[string]*secretUse{}
		}
		use = &secretUse{}
		s.uses[secret] = use
	}
	use.uses++
	if b == nil {
		return
	}
	use.hosts = withOne(use.hosts, hostport, maxHosts)
	if len(b.Methods) > 0 {
		use.methods = withOne(use.methods, req.Method, maxMethods)
	} else if len(req.Method) <= maxMethods {
		use.methods = withOne(use.methods, req.Method, 2)
	}
	for _, glob := range globs {
		use.paths = withOne(use.paths, glob, maxPaths)
	}
}

func withOne(list []string, s string, most int) []string {
	if s == "" || len(list) >= most || slices.Contains(list, s) {
		return list
	}
	return append(list, strings.Clone(s)) // not the whole request's memory
}

// end returns what there is of the kid's session and forgets it.
func (u *usage) end(kid string) *sessionUse {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.byKid[kid]
	delete(u.byKid, kid)
	return s
}

// peek returns a copy of what there is of the kid's session; nil where there is nothing.
func (u *usage) peek(kid string) *sessionUse {
	u.mu.Lock()
	defer u.mu.Unlock()
	s := u.byKid[kid]
	if s == nil {
		return nil
	}
	out := &sessionUse{h: s.h, uses: map[string]*secretUse{}}
	for name, use := range s.uses {
		c := *use
		c.hosts, c.methods, c.paths = slices.Clone(use.hosts), slices.Clone(use.methods), slices.Clone(use.paths)
		out.uses[name] = &c
	}
	return out
}

// bindingOf returns what a secret of the session is bound to now; nil where nobody knows.
func (s *Service) bindingOf(h *holder, secret string) *binding {
	if m := h.mints[secret]; m != nil {
		return &m.bound
	}
	return s.vault.bindingOf(secret)
}

// judgeUse compares what a session was granted with what it used. Canaries are granted to lie there.
func (s *Service) judgeUse(use *sessionUse) wire.CredentialUse {
	out := wire.CredentialUse{Granted: []string{}}
	for _, name := range use.h.secrets {
		if name == wire.ProofSecret || use.h.mints[name] == nil && s.vault.canary(name) {
			continue
		}
		out.Granted = append(out.Granted, name)
		u := use.uses[name]
		if m := use.h.mints[name]; m != nil && m.want.Inside && u == nil {
			continue // the kid holds the JWT itself: whether it was used is known to the service alone
		}
		if u == nil {
			out.Unused = append(out.Unused, name)
			continue
		}
		if w, wide := wider(name, s.bindingOf(use.h, name), u); wide {
			out.Wide = append(out.Wide, w)
		}
	}
	return out
}

// wider says in what a binding is wider than the use that was made of it.
func wider(name string, b *binding, u *secretUse) (w wire.WideSecret, wide bool) {
	if b == nil {
		return w, false
	}
	w = wire.WideSecret{Secret: name, Uses: u.uses, Hosts: without(b.Hosts, u.hosts), Methods: without(b.Methods, u.methods), Paths: without(b.Paths, u.paths)}
	if len(b.Methods) == 0 && len(u.methods) == 1 {
		w.OnlyMethod = u.methods[0]
	}
	return w, len(w.Hosts)+len(w.Methods)+len(w.Paths) > 0 || w.OnlyMethod != ""
}

func without(all, used []string) []string {
	var out []string
	for _, s := range all {
		if !slices.Contains(used, s) {
			out = append(out, s)
		}
	}
	return out
}

// recordUses writes down what an ended session made of what it was granted.
func (s *Service) recordUses(use *sessionUse, actor string) {
	judged := s.judgeUse(use)
	if len(judged.Granted) == 0 {
		return
	}
	h := use.h
	rec := audit.Record{Event: audit.EventTokenJudged, Session: h.session, Kid: h.kid, Mark: h.mark, Card: h.card, Actor: actor, Outcome: audit.OutcomeOK,
		Fields: map[string]string{"granted": strings.Join(judged.Granted, ",")}}
	if len(judged.Unused) > 0 {
		rec.Fields["unused"] = strings.Join(judged.Unused, ",")
	}
	for _, w := range judged.Wide {
		rec.Fields["wide"] = strings.TrimPrefix(rec.Fields["wide"]+"; "+w.String(), "; ")
	}
	s.cfg.Audit.Log(rec)
}

// sessionUse answers what a living kid's session has made of what it was granted so far.
func (s *Service) sessionUse(w http.ResponseWriter, r *http.Request) {
	s.tokens.settle() // what was delivered by now is noted
	use := s.usage.peek(r.PathValue("kid"))
	if use == nil {
		control.Refuse(w, http.StatusNotFound, reason.UnknownSession, "credd knows no session of this kid: it has ended, or began before credd did")
		return
	}
	control.Reply(w, s.judgeUse(use))
}
