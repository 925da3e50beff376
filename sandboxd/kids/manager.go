package kids

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

// Config is a manager's configuration. Every field but SocketWatch, Trip, Budget, Files, FileLog, Redact, Lessons and Kept
// is needed.
type Config struct {
	Inst        instance.Instance
	Init        string // path of kid-init
	Runtime     Runtime
	Images      map[string]Image
	Stored      func(name, userns string) (Image, error)                      // images that were imported, for one kid; nil: there are none
	Writable    func(name, userns string, uid int, size int64) (Image, error) // for kids that may install; nil: there are none
	SocketWatch string                                                        // sockwatch's socket; empty: sockets that no kid may have are refused without a record
	Kept        Store                                                         // nil: no command outlives this process
	Cgroups     Cgroups
	Kernel      Kernel
	Stopper     Stopper
	Points      []PolicyPoint
	Credentials Credentials
	Trip        []trip.Rule // the box's, for every kid; may be empty
	Budget      Budget
	Files       FileWatch           // nil: nobody watches programs and files, for tests
	FileLog     FileLog             // nil: nobody records what is done to files, for tests
	Redact      func(string) string // a text without secrets, as records are written; nil: as it is, for tests
	Lessons     Lessons             // nil: none are kept, for tests
	Keys        Keys                // nil: nobody looks for keys, for tests
	Room        func() error        // why no kid may be made for want of room for records; nil: nobody looks
	Audit       Recorder
	Metrics     Metrics
	Log         *slog.Logger
}

// Deadlines of single questions to other daemons. Monotonic, like all of the package's.
const (
	askTimeout      = 2 * time.Second
	mintTimeout     = 12 * time.Second // of a session with secrets: credd gives their providers 10
	teardownTimeout = 15 * time.Second
	retryTeardown   = 2 * time.Second
)

// Manager owns the kids of one instance. Safe for concurrent use.
type Manager struct {
	cfg   Config
	store session.Store

	mu   sync.Mutex
	kids map[string]*kid // guarded by mu; a name is in it from the claim to the end of the teardown
	last int             // index given out last; guarded by mu
	seq  *sequence       // guarded by mu

	carries int // uses of kids' files that are under way; guarded by mu

	proofs int // names of proofs' kids given out; guarded by mu

	// For tests only.
	fault      func(step string, done bool) error // before and after each step of a spawn and of a teardown; nil: none
	unconfined bool
	unwatched  bool // nobody sees a kid run out of memory
}

// New returns a manager without kids; Recover brings in what a predecessor left.
func New(cfg Config) (*Manager, error) {
	kidsDir := filepath.Dir(cfg.Inst.KidDir("x"))
	for dir, mode := range map[string]os.FileMode{kidsDir: 0o711, cfg.Inst.NetNSDir(): 0o711, cfg.Inst.SessionDir(): 0o750} {
		if err := os.MkdirAll(dir, mode); err != nil {
			return nil, fmt.Errorf("preparing to keep kids: %w", err)
		}
	}
	// The kids' root filesystems are below it, and runc reaches them as the kid's root user.
	if err := os.Chmod(kidsDir, 0o711); err != nil { // names only
		return nil, fmt.Errorf("preparing to keep kids: %w", err)
	}
	if err := os.Chown(cfg.Inst.SessionDir(), -1, cfg.Inst.GroupID()); err != nil {
		return nil, fmt.Errorf("preparing to keep kids: %w", err)
	}
	info, err := os.Stat(cfg.Init)
	if err != nil {
		return nil, fmt.Errorf("preparing to keep kids: install kid-init beside sandboxd: %w", err)
	}
	if info.Mode().Perm()&0o005 != 0o005 {
		return nil, fmt.Errorf("preparing to keep kids: %s cannot be run by everybody: chmod 755 it", cfg.Init)
	}
	seq, err := openSequence(filepath.Join(cfg.Inst.StateDir(), instance.Sandboxd, "sequence"))
	if err != nil {
		return nil, err
	}
	return &Manager{cfg: cfg, store: session.NewStore(cfg.Inst.SessionDir()), kids: map[string]*kid{}, seq: seq}, nil
}

// Get returns one kid as people see it.
func (m *Manager) Get(ctx context.Context, name string) (wire.Kid, error) {
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil {
		return wire.Kid{}, notFound(name)
	}
	m.noteStops(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	return k.view(), nil
}

// List returns all kids, by name.
func (m *Manager) List(ctx context.Context) []wire.Kid {
	m.noteStops(ctx)
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]wire.Kid, 0, len(m.kids))
	for _, k := range m.kids {
		out = append(out, k.view())
	}
	slices.SortFunc(out, func(a, b wire.Kid) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// SessionOf returns the kid's name, session id and card for a mark, for records of events in the kernel.
func (m *Manager) SessionOf(mark uint32) (kidName, id, card string, ok bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.kids {
		if k.rec.Session.Mark == mark {
			return k.name, k.rec.Session.ID, k.rec.Session.Card, true
		}
	}
	return "", "", "", false
}

func notFound(name string) error {
	return refuse(NotFound, reason.UnknownSession, "there is no kid called %s: `tagout list` shows those that there are", name)
}

// enter takes the kid on to the state to, or says that there is no way there.
func (m *Manager) enter(k *kid, to wire.KidState) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	return k.state.Enter(to)
}

// log writes an audit record of the kid.
func (m *Manager) log(k *kid, r audit.Record) {
	s := &k.rec.Session
	r.Session, r.Kid, r.Mark, r.Card = s.ID, k.name, s.Mark, s.Card
	m.cfg.Audit.Log(r)
}
