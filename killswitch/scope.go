package killswitch

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"tagout/internal/session"
	"tagout/internal/wire"
)

// ErrUnknownKid is returned for a stop of a kid that has neither a session document nor a cgroup.
var ErrUnknownKid = errors.New("no such kid")

// ErrBadOrder is returned for an order that cannot be understood.
var ErrBadOrder = errors.New("bad order")

// target is one kid in the scope of a stop.
type target struct {
	kid     string
	dir     string     // its cgroup in the v2 hierarchy
	freezer string     // in the v1 freezer, "" where there is none
	mark    uint32     // 0: not known, its document is missing or unreadable, and so is the kernel's own list
	addr    netip.Addr // invalid: not known
	card    string
	id      string // of the session
	problem error  // why mark and addr are not known
	unborn  bool   // an empty cgroup and no document: a spawn that has just begun, or a teardown about to end
}

func (s *Switch) known(d *session.Session) target {
	t := target{kid: d.Kid, dir: d.Cgroup, freezer: d.Freezer, mark: d.Mark, addr: d.Addr, card: d.Card, id: d.ID}
	if t.freezer == "" {
		t.freezer = s.freezerOf(d.Kid)
	}
	return t
}

// unknown is a kid of which only the cgroup is certain.
func (s *Switch) unknown(kid string, problem error) target {
	return target{kid: kid, dir: filepath.Join(s.cfg.KidsDir, kid), freezer: s.freezerOf(kid), problem: problem}
}

func (s *Switch) freezerOf(kid string) string {
	if s.cfg.KidsFreezer == "" {
		return ""
	}
	return filepath.Join(s.cfg.KidsFreezer, kid)
}

// resolveKid finds one kid, in whatever state: a document makes it known, and a cgroup makes it stoppable even
// where the document is gone or unreadable.
func (s *Switch) resolveKid(kid string) (target, error) {
	d, err := s.cfg.Sessions.Get(kid)
	if err == nil {
		return s.known(d), nil
	}
	names, listErr := s.cfg.Cgroups.Children(s.cfg.KidsDir)
	if errors.Is(err, fs.ErrNotExist) && listErr == nil && !slices.Contains(names, kid) {
		return target{}, fmt.Errorf("stopping kid %s: %w: `tagout list` shows the living ones", kid, ErrUnknownKid)
	}
	return s.stray(kid, err), nil
}

// stray is a kid whose document cannot be read. Where there is none, and its cgroup is empty, its spawn has just
// begun or its teardown is about to end: a spawn makes the cgroup, then the document, and asks for tags before
// anything runs.
func (s *Switch) stray(kid string, problem error) target {
	t := s.unknown(kid, problem)
	if errors.Is(problem, fs.ErrNotExist) {
		some, err := s.cfg.Cgroups.Populated(t.dir)
		t.unborn = err == nil && !some
	}
	if !t.unborn {
		s.askKernel(&t)
	}
	return t
}

// askKernel fills in mark and address of a kid whose document is lost: the kernel knows for which session the cgroup
// stands, or it would deny the kid everything.
func (s *Switch) askKernel(t *target) {
	id, err := s.cfg.Cgroups.ID(t.dir)
	if err == nil {
		t.mark, t.addr, err = s.cfg.Network.Owner(id)
	}
	if err != nil {
		t.problem = fmt.Errorf("%w; and the kernel's own list does not help: %w", t.problem, err)
	}
}

// resolveMany finds every kid that want accepts. A cgroup without a readable document is always in scope: it
// may be what the stop is meant for, and an unknown session is denied everything anyway.
func (s *Switch) resolveMany(want func(*session.Session) bool) []target {
	docs, err := s.cfg.Sessions.Load()
	if err != nil {
		s.cfg.Log.Error("reading session documents for a stop", "error", err)
	}
	return s.targets(docs, want)
}

func (s *Switch) targets(docs []*session.Session, want func(*session.Session) bool) []target {
	var out []target
	var named []string
	for _, d := range docs {
		named = append(named, d.Kid)
		if want(d) {
			out = append(out, s.known(d))
		}
	}
	children, err := s.cfg.Cgroups.Children(s.cfg.KidsDir)
	if err != nil {
		s.cfg.Log.Error("listing the kids' cgroups", "error", err)
	}
	for _, kid := range children {
		if slices.Contains(named, kid) {
			continue
		}
		d, err := s.cfg.Sessions.Get(kid) // it may have come since
		switch {
		case err != nil:
			out = append(out, s.stray(kid, err))
		case want(d):
			out = append(out, s.known(d))
		}
	}
	return out
}

// inScope says whether a session is covered by a scope.
func inScope(sc wire.Scope, kid, card string) bool {
	return sc.All || sc.Kid != "" && sc.Kid == kid || sc.Card != "" && sc.Card == card
}

// checkScope says whether a stop's scope is one of kid, card and all.
func checkScope(sc wire.Scope) error {
	n := 0
	for _, set := range []bool{sc.Kid != "", sc.Card != "", sc.All} {
		if set {
			n++
		}
	}
	if n != 1 {
		return fmt.Errorf("%w: the scope must be exactly one of kid, card and all", ErrBadOrder)
	}
	if sc.Kid != "" && !fileName(sc.Kid) {
		return fmt.Errorf("%w: %q cannot be a kid's name", ErrBadOrder, sc.Kid)
	}
	return nil
}

// fileName says whether a name may become a part of a path.
func fileName(s string) bool {
	return len(s) <= 128 && !strings.HasPrefix(s, ".") && !strings.ContainsAny(s, "/\x00")
}

func scopeText(sc wire.Scope) string {
	switch {
	case sc.All:
		return "everything"
	case sc.Card != "":
		return "card " + sc.Card
	}
	return "kid " + sc.Kid
}
