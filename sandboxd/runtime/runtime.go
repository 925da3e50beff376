// Package runtime runs kids as OCI containers with runc. It promises what a Spec says: no capability, no new
// privileges, a seccomp filter, a read-only root, namespaces and limits. It makes neither the network
// namespace nor the user namespace (package network does) and knows nothing of sessions.
package runtime

import (
	"errors"
	"time"
)

// ErrNotFound is returned for a container that the runtime does not know.
var ErrNotFound = errors.New("no such container")

// Inside every kid.
const (
	KidUID  = 1000 // uid and gid of the kid's commands
	InitUID = 900  // uid and gid of kid-init, which the kid's commands can therefore not signal or trace
	Home    = "/workspace"
)

// Mount binds a file or directory of the host into the container.
type Mount struct {
	Source   string
	Target   string // exists in the root filesystem
	Writable bool
	Tree     bool // with everything that is mounted below Source
}

// Limits bound one kid. Zero means: no limit of this kind.
type Limits struct {
	PIDs      int64
	Memory    int64   // bytes; swap is part of it
	CPUs      float64 // 1.5 is one and a half processors
	OpenFiles uint64  // per process; never more than the runtime's own hard limit
	DiskRate  int64   // bytes a second read from, and as many written to, each of the machine's disks
}

// Spec describes a container. Nothing in it is optional unless it says so.
type Spec struct {
	ID       string // also the host name
	Root     string // directory; read-only inside unless Writable
	Writable bool   // Root is the kid's own, to write to
	Mounts   []Mount
	Init     string   // path of kid-init on the host
	InitArgs []string // may be empty
	UserNS   string   // pinned namespaces
	NetNS    string   // empty with HostNetwork
	// HostNetwork leaves the container in the machine's own network namespace. It gets no local sockets then but pairs, of
	// netlink only interfaces and routes, TCP alone, and cannot listen.
	HostNetwork bool
	UIDFirst    uint32 // what the user namespace maps, for the files that the runtime makes
	UIDCount    uint32
	Cgroup      string // relative to the root of each hierarchy, with a leading slash
	Limits      Limits
	Tmp         int64 // bytes of /tmp
	NoExec      bool  // no file of a writable place can be executed, nor one that lies in memory alone
	Refusals    Refusals

	// Unconfined leaves the seccomp filter out. Only tests set it, to see that their checks notice.
	Unconfined bool
}

// Refusals says who answers for the sockets that the seccomp filter refuses. Without a Listener the kernel refuses
// them by itself and nobody hears of it.
type Refusals struct {
	Listener string // unix socket to which runc sends the filter's other end; somebody must listen
	Metadata string // sent along
}

// Process is a command to run beside kid-init.
type Process struct {
	TTY       *Size // nil: it gets no terminal, but pipes
	Argv      []string
	Env       []string
	Dir       string
	OpenFiles uint64
	Owner     int  // the host's uid and gid that it has outside: its pipes belong to it
	Root      bool // it is root in the kid's user namespace, with what package managers need, and not KidUID
}

// Exit is how a process ended: Code is its exit code where Signal is 0.
type Exit struct {
	Code    int
	Signal  int
	Unknown bool  // it has ended, and nobody says how
	MaxRSS  int64 // bytes that were the most in memory at once, of the process itself or a child that it waited for; 0: nobody says
}

// Status of a container.
type Status string

// Statuses, as the OCI runtime specification names them.
const (
	StatusCreated Status = "created"
	StatusRunning Status = "running"
	StatusPaused  Status = "paused" // never seen where v1 controllers are: runc asks their freezer
	StatusStopped Status = "stopped"
)

// State is what the runtime knows of a container.
type State struct {
	Status Status
	PID    int // of kid-init, in the host's pid namespace
}

// patience bounds every call of the runtime's program: what takes longer hangs.
const patience = 20 * time.Second

// deletePatience is all that runc gets to remove what it keeps of a container: a destroy can do without it.
const deletePatience = 5 * time.Second
