package dnsfilter

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/vaddr"
)

// kid is one loaded session, as it stands until its next deadline. Its fields are set once; limit and names have
// locks of their own.
type kid struct {
	doc    *session.Session
	spec   policy.Spec           // of the policy: without what has run out
	policy *policy.Policy        // nil denies everything
	until  time.Duration         // CLOCK_BOOTTIME of the next deadline; 0 where there is none
	exact  map[string]netip.Addr // of the policy's exact hosts
	names  *names                // of names that match wildcards
	ready  map[string]*exactName // what fast answers
	limit  *limiter
}

// address returns the virtual address of an allowed name.
func (k *kid) address(name string) (netip.Addr, reason.Code, error) {
	if addr, ok := k.exact[name]; ok {
		return addr, reason.OK, nil
	}
	return k.names.address(name)
}

// nameOf returns the name that addr stands for in the session, if the policy still allows it.
func (k *kid) nameOf(addr netip.Addr) (string, bool) {
	name, ok := k.names.table.Name(addr)
	if !ok {
		return "", false
	}
	if _, exact := k.exact[name]; !exact {
		if name, ok = k.names.name(addr); !ok {
			return "", false
		}
	}
	_, d := k.policy.Lookup(name)
	return name, d.Verdict == policy.Allow
}

// tables is an immutable view of the loaded sessions.
type tables struct {
	byAddr map[netip.Addr]*kid
	byMark map[uint32]*kid
	byKid  map[string]*kid
}

// sessions is read without a lock by every query.
type sessions struct {
	mu  sync.Mutex // held by writers
	now atomic.Pointer[tables]
}

func (s *sessions) init() {
	s.now.Store(&tables{byAddr: map[netip.Addr]*kid{}, byMark: map[uint32]*kid{}, byKid: map[string]*kid{}})
}

// byAddr and byMark find who asks, without what has run out. byKid tells only what is loaded.
func (s *sessions) byAddr(a netip.Addr) *kid { return s.fresh(s.now.Load().byAddr[a]) }
func (s *sessions) byMark(mark uint32) *kid  { return s.fresh(s.now.Load().byMark[mark]) }
func (s *sessions) byKid(name string) *kid   { return s.now.Load().byKid[name] }
func (s *sessions) len() int                 { return len(s.now.Load().byKid) }

// replace takes old out and puts k in; either may be nil. Callers hold mu.
func (s *sessions) replace(old, k *kid) {
	was := s.now.Load()
	next := &tables{byAddr: maps.Clone(was.byAddr), byMark: maps.Clone(was.byMark), byKid: maps.Clone(was.byKid)}
	if old != nil {
		delete(next.byAddr, old.doc.Addr)
		delete(next.byMark, old.doc.Mark)
		delete(next.byKid, old.doc.Kid)
	}
	if k != nil {
		next.byAddr[k.doc.Addr], next.byMark[k.doc.Mark], next.byKid[k.doc.Kid] = k, k, k
	}
	s.now.Store(next)
}

func (s *sessions) closeAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.now.Load().byKid {
		k.names.close()
	}
}

// errConflict is returned for a session that cannot stand beside those that are loaded.
var errConflict = errors.New("conflict")

// sessionIDRE is what may become a file name.
var sessionIDRE = regexp.MustCompile(`^[0-9A-Za-z]{1,64}$`)

const namesSuffix = ".vaddr"

func (f *Filter) namesPath(id string) string { return filepath.Join(f.cfg.StateDir, id+namesSuffix) }

// load makes the session's policy the one in force, replacing an older generation of the same session. When
// it returns nil the next query is judged by it. errors.Is errConflict where another session has the kid's
// name, address or mark, or a newer generation is in force.
func (f *Filter) load(doc *session.Session) error {
	if err := doc.Check(); err != nil {
		return err
	}
	if err := f.cfg.Check(doc); err != nil {
		return err
	}
	if !sessionIDRE.MatchString(doc.ID) {
		return fmt.Errorf("session %q: its id cannot be a file name", doc.ID)
	}
	f.sessions.mu.Lock()
	defer f.sessions.mu.Unlock()
	old := f.sessions.byKid(doc.Kid)
	for _, other := range []*kid{old, f.sessions.byAddr(doc.Addr), f.sessions.byMark(doc.Mark)} {
		if other != nil && (other.doc.ID != doc.ID || other != old) {
			return fmt.Errorf("loading session %s of kid %s: session %s of kid %s is loaded with the same name, address or mark: remove that one first: %w",
				doc.ID, doc.Kid, other.doc.ID, other.doc.Kid, errConflict)
		}
	}
	if old != nil && old.doc.Generation > doc.Generation {
		return fmt.Errorf("loading session %s: generation %d is in force, this is %d: %w", doc.ID, old.doc.Generation, doc.Generation, errConflict)
	}
	k, err := f.compile(doc, old)
	if err != nil {
		return err
	}
	f.sessions.replace(old, k)
	f.cfg.Metrics.Sessions(f.sessions.len())
	f.cfg.Audit.Log(audit.Record{Event: audit.EventPolicyLoaded, Outcome: audit.OutcomeOK, Session: doc.ID, Kid: doc.Kid, Mark: doc.Mark,
		Card: doc.Card, Generation: doc.Generation})
	return nil
}

// compile builds the session's tables. old is the generation before, nil where there is none; the file of
// names passes from it to the new one, or stays with it where compiling fails before.
func (f *Filter) compile(doc *session.Session, old *kid) (*kid, error) {
	whole, err := policy.Compile(doc.Egress)
	if err != nil {
		return nil, fmt.Errorf("loading session %s: %w", doc.ID, err)
	}
	doc.AddNames(whole.ExactHosts()) // of what has run out too: no name's address may move
	table, err := vaddr.New(f.cfg.Virtual, doc.Names)
	if err != nil {
		return nil, fmt.Errorf("loading session %s: %w", doc.ID, err)
	}
	k := &kid{doc: doc, spec: doc.Egress, exact: make(map[string]netip.Addr, len(doc.Names)), limit: newLimiter(f.cfg.Rate, f.cfg.Burst)}
	for _, name := range doc.Names {
		k.exact[name], _ = table.Addr(name)
	}
	if k, err = k.at(bootclock.Now()); err != nil {
		return nil, err
	}
	if old != nil {
		k.limit = old.limit
		old.names.close()
	}
	k.names, err = openNames(f.namesPath(doc.ID), table, func(name string) bool {
		_, d := k.policy.Lookup(name)
		return d.Verdict == policy.Allow
	})
	if err != nil {
		return nil, fmt.Errorf("loading session %s: %w", doc.ID, err)
	}
	return k, nil
}

// unload removes the kid's session and what was kept of it; removing what is not there is no error.
func (f *Filter) unload(name string) error {
	f.sessions.mu.Lock()
	defer f.sessions.mu.Unlock()
	k := f.sessions.byKid(name)
	if k == nil {
		return nil
	}
	f.sessions.replace(k, nil)
	f.conns.cut(k.doc.Addr)
	f.cfg.Metrics.Sessions(f.sessions.len())
	f.cfg.Audit.Log(audit.Record{Event: audit.EventPolicyRemoved, Outcome: audit.OutcomeOK, Session: k.doc.ID, Kid: k.doc.Kid, Mark: k.doc.Mark,
		Card: k.doc.Card, Generation: k.doc.Generation})
	k.names.close()
	if err := os.Remove(f.namesPath(k.doc.ID)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing the virtual addresses of kid %s: %w", name, err)
	}
	return nil
}

// loadAll loads the sessions that are there at start. One that cannot be loaded stays denied and is reported.
func (f *Filter) loadAll() {
	docs, err := f.cfg.Load()
	whole := err == nil
	errs := []error{err}
	for _, doc := range docs {
		errs = append(errs, f.load(doc))
	}
	for _, err := range errs {
		if err == nil {
			continue
		}
		f.cfg.Log.Error("a session stays denied because it cannot be loaded", "error", err)
		f.cfg.Audit.Log(audit.Record{Event: audit.EventPolicyLoaded, Outcome: audit.OutcomeFail, Reason: reason.PolicyNotLoaded, Detail: err.Error()})
	}
	f.cfg.Metrics.Sessions(f.sessions.len())
	if whole {
		f.removeOrphans(docs)
	}
}

// removeOrphans deletes the files of sessions that ended while the filter was down.
func (f *Filter) removeOrphans(docs []*session.Session) {
	living := map[string]bool{}
	for _, doc := range docs {
		living[doc.ID] = true
	}
	entries, err := os.ReadDir(f.cfg.StateDir)
	for _, e := range entries {
		id, _, ok := strings.Cut(e.Name(), namesSuffix)
		if ok && !living[id] {
			err = errors.Join(err, os.Remove(filepath.Join(f.cfg.StateDir, e.Name())))
		}
	}
	if err != nil {
		f.cfg.Log.Warn("removing virtual addresses of sessions that have ended", "error", err)
	}
}
