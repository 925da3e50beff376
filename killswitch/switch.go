package killswitch

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// Sessions reads the session documents. session.Store fulfils it.
type Sessions interface {
	Get(kid string) (*session.Session, error)
	Load() ([]*session.Session, error) // what is readable; the rest is in the error
}

// Cgroups acts on cgroup directories. OSCgroups fulfils it.
type Cgroups interface {
	Kill(dir string) error
	// KillAndWait kills what is in dir and returns once all n processes that were in it are gone, whatever was
	// started there since.
	KillAndWait(ctx context.Context, dir string) (n int, err error)
	CanKill(dir string) error
	Thaw(v2dir, freezerDir string) error
	Populated(dir string) (bool, error)
	WaitEmpty(ctx context.Context, dir string) error
	Survivors(dir string) ([]Process, error)
	Children(dir string) ([]string, error) // names of the cgroups right below; none where dir does not exist
	ID(dir string) (uint64, error)         // by which the kernel's programs know it
}

// Process is one process that a stop did not see die.
type Process struct {
	PID   int
	Comm  string
	State string // as in /proc/PID/stat: D, t, R, …
}

// Network cuts packets in the kernel. An error that is fs.ErrNotExist means that the kernel knows no such
// session, which it denies anyway. A session that was stopped stays so until it is forgotten.
type Network interface {
	StopSession(mark uint32) error
	StopAll(on bool) error
	Stopped(mark uint32) (bool, error) // what the kernel holds now
	AllStopped() (bool, error)         // what the kernel holds now
	Sessions() ([]uint32, error)       // marks of all sessions that the kernel knows
	Counters(mark uint32) (Counters, error)
	// RevokeSecrets drops, from now on and for good, what the session's sockets send that carry a secret, and no more.
	RevokeSecrets(mark uint32) error
	// Secrets says whether that is so now, and when (CLOCK_BOOTTIME) such a socket's last packet passed; 0: none ever.
	Secrets(mark uint32) (revoked bool, last time.Duration, err error)
	// Owner returns the session for which a kid's cgroup stands, by the cgroup's id, and the kid's address.
	Owner(cgroupID uint64) (mark uint32, addr netip.Addr, err error)
	Armed() error // nil where the writes above would be taken
}

// Counters are what the kernel let pass for one session, both directions together.
type Counters struct {
	Packets  uint64
	LastPass time.Duration // CLOCK_BOOTTIME of the last packet that passed; 0: none ever
}

// Sockets destroys sockets in the host's network namespace.
type Sockets interface {
	// Destroy destroys the sockets that carry one of the marks or are connected to one of the addresses, and
	// returns how many there were. A mark with session.SecretBit means the sockets alone that carry a secret. It returns nil only after a look that found none left.
	Destroy(ctx context.Context, marks []uint32, addrs []netip.Addr) (int, error)
}

// Credentials talks to credd. Every call returns when ctx ends, at the latest.
type Credentials interface {
	Revoke(ctx context.Context, r wire.RevokeRequest) (tokens int, err error)
	Reachable(ctx context.Context) error
	// Server returns the process that listens on credd's socket; 0 where nobody does.
	Server(ctx context.Context) (pid int, err error)
}

// Kept are the tags that were kept.
type Kept struct {
	Hanging  []wire.Tag
	Noted    []wire.Tag // hang too; a predecessor died before the disk had them
	Released []wire.Tag
	Damaged  []wire.Tag // one for each file that cannot be read: a tag on everything that says which file it is
}

// Tags keeps tags on disk. Put and Release may hang as long as the disk does.
type Tags interface {
	// Load returns what is kept.
	Load() Kept
	// Note keeps a tag in memory that outlives this process, though not the machine. It waits for no disk.
	Note(t wire.Tag) error
	Put(t wire.Tag) error     // on disk, fsynced, when it returns nil; its note is gone then
	Release(t wire.Tag) error // likewise
}

// Recorder takes audit records.
type Recorder interface{ Log(r audit.Record) }

// Metrics is told what happened. internal/metrics fulfils it.
type Metrics interface {
	StopBegan(cause string)
	LayerFired(layer string, after time.Duration)
	LayerObserved(layer string, after time.Duration)
	StopEnded(state string)
	Enforced(layer string) // something in the scope of a tag had to be stopped again
	TagsHanging(n int)
	RecordsLost(n uint64)
	Tripped(rule string)              // by a trip rule about that, package trip's word
	LeasesRenewed(n int, ok bool)     // n leases in the kernel; ok: all that there were
	KidLease(age, left time.Duration) // since the last renewal, and until it runs out
	KidLeaseExpired(kids int)         // so many were stopped
}

// Timing holds every deadline and period. Zero fields get the values of DefaultTiming.
type Timing struct {
	Note       time.Duration // how long a stop may wait for its note before it fires all the same
	Credential time.Duration // how long credd may take to acknowledge a revocation before it is killed
	CreddDeath time.Duration // how long its death may take to be seen
	Session    time.Duration // how long processes may take to die before they are reported
	Network    time.Duration // how long silence may take to be proved
	Sample     time.Duration // between the two looks at the packet counters
	Persist    time.Duration // how long the disk may take to keep a tag before the report says partial
	Tick       time.Duration // period of the enforcement loop
	Slow       time.Duration // period of its slow part: re-revoking, keeping tags that the disk refused

	KernelLease time.Duration // how long packets pass after the last renewal of the leases in the kernel
	Renew       time.Duration // period of these renewals
	KidLease    time.Duration // how long the kids live after sandboxd last renewed their lease
	KidLook     time.Duration // period of the looks at that lease
}

// DefaultTiming returns the timing of a production box.
//
// Credential is a trade: credd's death takes the tokens of every kid, and a credd that works was seen to take
// 26 ms where 700 processes of a kid fight for two processors; killing one that hangs, and seeing it dead, takes
// some 5 ms more, and together they must stay below the 50 ms that a drill allows.
func DefaultTiming() Timing {
	return Timing{
		Note:       5 * time.Millisecond,
		Credential: 35 * time.Millisecond, CreddDeath: time.Second, Session: 5 * time.Second,
		Network: time.Second, Sample: 10 * time.Millisecond, Persist: time.Second,
		Tick: 50 * time.Millisecond, Slow: time.Second,
		KernelLease: 5 * time.Second, Renew: time.Second, KidLease: 30 * time.Second, KidLook: 250 * time.Millisecond,
	}
}

// fill sets the zero fields of t.
func (t Timing) fill() Timing {
	d := DefaultTiming()
	for _, f := range []struct{ have, def *time.Duration }{
		{&t.Note, &d.Note}, {&t.Credential, &d.Credential}, {&t.CreddDeath, &d.CreddDeath}, {&t.Session, &d.Session},
		{&t.Network, &d.Network}, {&t.Sample, &d.Sample}, {&t.Persist, &d.Persist},
		{&t.Tick, &d.Tick}, {&t.Slow, &d.Slow}, {&t.KernelLease, &d.KernelLease}, {&t.Renew, &d.Renew},
		{&t.KidLease, &d.KidLease}, {&t.KidLook, &d.KidLook},
	} {
		if *f.have <= 0 {
			*f.have = *f.def
		}
	}
	return t
}

// Config holds what a Switch works with. No field may be nil or empty except KidsFreezer, Around and Proof.
type Config struct {
	Sessions    Sessions
	Cgroups     Cgroups
	Network     Network
	Leases      Leases
	Sockets     Sockets
	Credentials Credentials
	Tags        Tags
	Authorities Authorities
	Used        UsedOrders
	Audit       Recorder
	Metrics     Metrics
	Log         *slog.Logger

	KidsDir     string // v2 directory of the cgroup above every kid
	KidsFreezer string // the same in the v1 freezer, "" where there is none
	CreddDir    string // v2 directory of credd's own cgroup
	Sentinel    string // a file whose existence stops everything
	UID, GID    int    // killswitchd's own uid, and the instance's group
	Timing      Timing
	Around      Around
	Proof       *ProofConfig // nil: there are no proofs, and no lamp shows armed
}

// Switch fires stops and enforces tags. Make it with New and call Run once; everything else is safe for
// concurrent use, before and during Run.
type Switch struct {
	cfg    Config
	t      Timing
	audit  *courier
	prover *prover // nil: there are no proofs

	mu       sync.Mutex // guards the fields below; never held across a system call
	running  map[string]*run
	hanging  map[string]*hung
	released map[string]wire.Tag
	killing  map[string]int // cgroup directories that stops are killing, and how many stops

	flagMu  sync.Mutex // held while enforcement or a release writes the global stop flag; never by a stop
	life    context.Context
	endLife context.CancelFunc // called when Run ends
	enforce enforcer           // the credd fields: slow loop only; the rest: fast loop only

	boot     func() time.Duration // CLOCK_BOOTTIME; tests set another before Run
	progress struct {             // of the fast loop
		at     atomic.Int64 // boot time, ns
		rounds atomic.Uint64
	}
	kids kidLease
}

// New returns a Switch with the tags that hang on disk already in force: from now on Clear refuses what they
// cover. Enforcement begins with Run.
func New(cfg Config) *Switch {
	s := &Switch{
		cfg: cfg, t: cfg.Timing.fill(), audit: newCourier(cfg.Audit, cfg.Metrics),
		running: map[string]*run{}, hanging: map[string]*hung{}, released: map[string]wire.Tag{}, killing: map[string]int{}, boot: bootclock.Now,
	}
	s.kids.renewed = s.boot()
	s.life, s.endLife = context.WithCancel(context.Background())
	if cfg.Proof != nil {
		s.prover = newProver(s, *cfg.Proof)
	}
	kept := cfg.Tags.Load()
	for _, t := range kept.Released {
		s.released[t.Stop] = t
	}
	for _, t := range kept.Noted {
		s.hanging[t.Stop] = &hung{tag: t} // goes to disk as soon as Run begins
		cfg.Log.Warn("a tag hangs whose stop was interrupted: finishing it", "stop", t.Stop, "scope", scopeText(t.Scope), "by", t.By, "reason", t.Reason)
	}
	for _, t := range kept.Damaged {
		s.hanging[t.Stop] = &hung{tag: t, kept: true, damaged: true}
		cfg.Log.Error("a tag file cannot be read: treating it as a tag on everything", "stop", t.Stop, "reason", t.Reason)
	}
	for _, t := range kept.Hanging {
		s.hanging[t.Stop] = &hung{tag: t, kept: true}
		cfg.Log.Warn("a tag hangs", "stop", t.Stop, "scope", scopeText(t.Scope), "by", t.By, "reason", t.Reason)
	}
	cfg.Metrics.TagsHanging(len(s.hanging))
	return s
}

// Wait returns when no stop is under way any more and what was to be recorded was handed over, or when ctx
// ends.
func (s *Switch) Wait(ctx context.Context) {
	for s.underWayNow() && ctx.Err() == nil {
		pause(ctx, waitLook)
	}
	s.audit.flush(ctx)
}

// Idle says whether no stop is under way.
func (s *Switch) Idle() bool { return !s.underWayNow() }

const waitLook = 5 * time.Millisecond

func (s *Switch) underWayNow() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.running) > 0
}

// newID returns a ULID.
func newID() string { return ulid.MustNew(ulid.Now(), rand.Reader).String() }
