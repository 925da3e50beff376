package kids

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"strconv"

	"tagout/internal/audit"
	"tagout/internal/leaks"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/sandboxd/runtime"
)

// Keys finds what looks like a long-lived key; *leaks.Detector does.
type Keys interface {
	Find(text string) []leaks.Finding
	Guard(r io.Reader, pass func(leaks.Finding) bool) io.Reader
	GuardFile(f io.ReadSeeker, pass func(leaks.Finding) bool) (io.Reader, error)
}

const keyAdvice = "no long-lived key goes into a kid: put it into the vault (`tagout vault set`) and name it in identity.scope; " +
	"where it is no key, say so in the card's identity.notKeys, with the reason"

// keySearch looks for long-lived keys in what one kid is given.
type keySearch struct {
	m     *Manager
	about audit.Record // of which kid
	not   []session.NotKey
}

func (m *Manager) keySearch(about audit.Record, p *Plan) keySearch {
	return keySearch{m: m, about: about, not: p.NotKeys}
}

func (m *Manager) searchIn(k *kid, actor string) keySearch {
	s := &k.rec.Session
	return m.keySearch(audit.Record{Session: s.ID, Kid: k.name, Card: s.Card, Mark: s.Mark, Actor: actor}, &k.rec.Plan)
}

// variables refuses variables that look like a long-lived key.
func (s keySearch) variables(env map[string]string) error {
	if s.m.cfg.Keys == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		for _, f := range s.m.cfg.Keys.Find(name + "=" + env[name]) {
			if !s.pass(f, "variable", name, func(n session.NotKey) bool { return n.Env == name }) {
				return refuse(Invalid, reason.LooksLikeKey, "the variable %s looks like a long-lived key (rule %s): %s", name, f.Rule, keyAdvice)
			}
		}
	}
	return nil
}

// text refuses an argument, or what goes to a command's standard input. Nothing lets it pass.
func (s keySearch) text(what, text string) error {
	if s.m.cfg.Keys == nil || text == "" {
		return nil
	}
	if found := s.m.cfg.Keys.Find(text); len(found) > 0 {
		return refuse(Invalid, reason.LooksLikeKey, "%s has in line %d what looks like a long-lived key (rule %s): %s", what, found[0].Line, found[0].Rule, keyAdvice)
	}
	return nil
}

// file returns a reader of a file's content that ends before the first long-lived key. to is where the file goes, in the
// kid.
func (s keySearch) file(to string, src io.Reader) io.Reader {
	if s.m.cfg.Keys == nil {
		return src
	}
	if found := s.m.cfg.Keys.Find(to); len(found) > 0 {
		return failing{refuse(Invalid, reason.LooksLikeKey, "the name of a file looks like a long-lived key (rule %s): %s", found[0].Rule, keyAdvice)}
	}
	pass := func(f leaks.Finding) bool {
		return s.pass(f, "file", to, func(n session.NotKey) bool {
			ok, err := path.Match(n.File, to)
			return ok && err == nil
		})
	}
	f, ok := src.(io.ReadSeeker)
	if !ok {
		return &keyReader{to: to, Reader: s.m.cfg.Keys.Guard(src, pass)}
	}
	guarded, err := s.m.cfg.Keys.GuardFile(f, pass)
	if err != nil {
		return failing{err}
	}
	return &keyReader{to: to, Reader: guarded}
}

type failing struct{ err error }

// Read implements io.Reader.
func (f failing) Read([]byte) (int, error) { return 0, f.err }

// input does so for an input, whose target is below the workspace.
func (s keySearch) input(to string, src io.Reader) io.Reader {
	return s.file(path.Join(runtime.Home, to), src)
}

// pass says whether the card says that the finding is no key, and then records that it did.
func (s keySearch) pass(f leaks.Finding, kind, name string, meant func(session.NotKey) bool) bool {
	for _, n := range s.not {
		if n.Rule == f.Rule && meant(n) {
			rec := s.about
			rec.Event, rec.Outcome, rec.Detail = audit.EventKeyAllowed, audit.OutcomeAllow, n.Reason
			rec.Fields = map[string]string{kind: name, "rule": f.Rule, "line": strconv.Itoa(f.Line)}
			s.m.cfg.Audit.Log(rec)
			return true
		}
	}
	return false
}

// keyReader puts what was found into an operator's words.
type keyReader struct {
	io.Reader
	to string
}

// Read implements io.Reader.
func (r *keyReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if found := new(leaks.Found); errors.As(err, &found) {
		err = refuse(Invalid, reason.LooksLikeKey, "line %d of %s looks like a long-lived key (rule %s): %s", found.Line, r.to, found.Rule, keyAdvice)
	}
	return n, err
}

// command refuses a command that brings a long-lived key.
func (s keySearch) command(argv []string, env map[string]string, stdin []byte) error {
	err := s.variables(env)
	for i, arg := range argv {
		if err == nil {
			err = s.text(fmt.Sprintf("argument %d", i), arg)
		}
	}
	if err == nil {
		err = s.text("standard input", string(stdin))
	}
	return err
}
