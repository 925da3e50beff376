package kids

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/filelog"
	"tagout/sandboxd/filewatch"
	"tagout/sandboxd/runtime"
)

var (
	// ErrTagged is what a Stopper's Clear wraps when a tag hangs on the scope.
	ErrTagged = errors.New("a tag hangs here")
	// ErrDown is what Delete and Forget wrap when no process serves the daemon's socket: there is nobody
	// who could still hold the session, and whoever starts next reads the session documents first.
	ErrDown = errors.New("the daemon is not running")
)

// Stopper is killswitchd.
type Stopper interface {
	// Clear returns nil where nothing hangs on the scope, an error that wraps ErrTagged where something
	// does, and any other error where killswitchd could not say.
	Clear(ctx context.Context, scope wire.Scope) error
	Tags(ctx context.Context) ([]wire.Tag, error)
}

// PolicyPoint is a daemon that enforces a session's egress policy: the proxy and dnsfilter.
type PolicyPoint interface {
	Name() string
	Put(ctx context.Context, s *session.Session) (wire.Ack, error)
	Delete(ctx context.Context, kid string) error
}

// Credentials is credd.
type Credentials interface {
	Mint(ctx context.Context, r wire.MintRequest) (wire.MintReply, error)
	// Renew returns the JWTs that the kid holds itself. Its error is an *Error where the kid has none for good.
	Renew(ctx context.Context, kid string) (wire.MintReply, error)
	Forget(ctx context.Context, kid string) error
	// Use says what the kid's session has made of what it was granted; nil where credd knows nothing of it.
	Use(ctx context.Context, kid string) (*wire.CredentialUse, error)
}

// Kernel is the instance's BPF maps. Nothing passes that has no entry there.
type Kernel interface {
	// Admit makes the entries of a kid: its session, the TCP ports towards virtual addresses, its cgroup and
	// its link.
	Admit(e Entry) error
	// Withdraw removes them; entries that are not there are not an error. IfIndex 0 is unknown.
	Withdraw(e Entry) error
	// SetPorts makes ports the session's TCP ports. Ports that stay are never closed in between.
	SetPorts(mark uint32, ports []uint16) error
	// Sweep removes the entries of every session whose mark keep does not want.
	Sweep(keep func(mark uint32) bool) error
	// Stop denies the session everything from now on, for good.
	Stop(mark uint32) error
	// Stopped says whether the session's entry is there and says stopped.
	Stopped(mark uint32) (bool, error)
	// StoppedMarks returns the marks of all sessions whose entries are there and say stopped, with a number of
	// system calls that does not grow with theirs.
	StoppedMarks() (map[uint32]bool, error)
}

// Entry is what the kernel knows of a kid.
type Entry struct {
	Mark     uint32
	Addr     netip.Addr
	CgroupID uint64
	IfIndex  int
	Ports    []uint16
	OnHost   bool            // it lives on the machine's network
	Reach    []session.Reach // of one that does
}

// Runtime runs containers; *runtime.Runc is one.
type Runtime interface {
	Create(ctx context.Context, bundle string, s runtime.Spec) (runtime.State, error)
	Start(ctx context.Context, id string) error
	Exec(ctx context.Context, id, name, bundle string, p runtime.Process) (*runtime.Running, error)
	// Adopt goes on with a command of another process, of which Running.Keep returned files there.
	Adopt(id, group string, files []int) (*runtime.Running, error)
	Kill(ctx context.Context, id string, sig unix.Signal) error
	Delete(ctx context.Context, id string) error
	State(ctx context.Context, id string) (runtime.State, error)
	List() ([]string, error)
	// Parked is the pid of kid-init's child that waits for the next command, 0 where there is none.
	Parked(id string) int
	// Groups returns the cgroups of commands below the container's own, unit.
	Groups(unit string) ([]string, error)
	// EndGroup kills what is in one, and removes it when it can be.
	EndGroup(dir string)
	// Reap clears away what commands that did not start left behind.
	Reap()
}

// Store keeps descriptors open beyond the end of this process; *fdstore.Client is one.
type Store interface {
	Put(id string, files []int) error
	// Get returns copies. errors.Is(err, fdstore.ErrNotKept) where there are none.
	Get(id string) ([]int, error)
	Drop(id string) error
	List() ([]string, error)
}

// FileWatch watches which programs kids start and which files they write; *filewatch.Watch is one.
type FileWatch interface {
	// Add begins, where there is anything to watch for; late says that something may have run already.
	Add(s *session.Session, pid int, wants filewatch.Wants, late bool) error
	Remove(session string)
}

// FileLog records what kids do to their files; *filelog.Watch is one.
type FileLog interface {
	// Add begins; late says that something may have been done already.
	Add(s *session.Session, places []filelog.Place, late bool)
	// End returns when everything until now is recorded, with the tops of the places, which the caller closes.
	End(session string) []filelog.Root
}

// Image makes root filesystems; *image.Host is one. dir is the kid's root directory, below the kid's own.
type Image interface {
	Env(dir string) map[string]string
	// Root makes the root directory of one kid, and may mount something there and at image.LayersDir beside it, which the
	// caller unmounts.
	// A kid without a network has no address, and is told of no resolver.
	Root(dir, kid string, addr netip.Addr) ([]runtime.Mount, error)
}

// Cgroups is this machine's layout; cgroup.Layout is one.
type Cgroups interface {
	V2(rel string) string
	Freezer(rel string) string
	V1(controller, rel string) string // "" where the controller is not mounted as v1
	Create(rel string) error
	Remove(ctx context.Context, rel string) error
	Stats(rel string) (cgroup.Stats, error) // wraps fs.ErrNotExist where it is not there
}

// Recorder is the audit log. Neither method may block.
type Recorder interface {
	Log(audit.Record)
	// Err is why the log takes no records at the moment, nil where it does.
	Err() error
}

// Lessons keeps what was learned from kids; *lessons.Store does.
type Lessons interface {
	// Keep returns the name of the note. It is not asked for twice in vain: a session has one note. secrets are values
	// that must not be in it.
	Keep(l wire.Lesson, secrets []string) (name string, err error)
}

// Metrics is what the manager reports to.
type Metrics interface {
	Spawned(outcome string, took time.Duration)
	SpawnStage(stage string, took time.Duration) // one of wire.SpawnStages, or the first command
	SpawnStep(step string, took time.Duration)
	Destroyed(outcome string)
	OutOfMemory()
	ExecEnded(result string, took time.Duration)
	Kids(n int)
}
