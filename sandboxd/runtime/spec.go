package runtime

import (
	"errors"
	"fmt"
	"os"
	"path"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// InitPath is where kid-init is inside every kid.
const InitPath = "/.tagout/kid-init"

// RootFiles are the empty files and directories that a root filesystem must have for the runtime's own
// mounts: the root is read-only, so nothing can be made later.
func RootFiles() (dirs, files []string) {
	return []string{"/proc", "/dev", "/tmp", path.Dir(InitPath), Home}, []string{InitPath}
}

const (
	devSize  = "64k"
	shmSize  = "16m"
	maxTmpNr = "nr_inodes=16384"
	period   = 100_000 // microseconds, the kernel's default
)

// maskedPaths tell about the machine or reach its kernel; inside they are empty.
var maskedPaths = []string{
	"/proc/acpi", "/proc/asound", "/proc/config.gz", "/proc/interrupts", "/proc/kallsyms", "/proc/kcore", "/proc/keys",
	"/proc/key-users", "/proc/kmsg", "/proc/kpagecgroup", "/proc/kpagecount", "/proc/kpageflags", "/proc/latency_stats",
	"/proc/modules", "/proc/sched_debug", "/proc/scsi", "/proc/slabinfo", "/proc/timer_list", "/proc/timer_stats",
	"/proc/vmallocinfo", "/proc/driver", "/proc/diskstats", "/proc/partitions", "/proc/iomem", "/proc/ioports",
	"/proc/cmdline", "/proc/bootconfig", "/proc/consoles",
}

var readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}

// build turns a Spec into an OCI runtime configuration.
func build(s Spec) (*specs.Spec, error) {
	resources, err := resources(s.Limits)
	if err != nil {
		return nil, err
	}
	out := &specs.Spec{
		Version:  "1.0.2",
		Hostname: s.ID,
		Root:     &specs.Root{Path: s.Root, Readonly: !s.Writable},
		Process:  process(Process{Argv: append([]string{InitPath}, s.InitArgs...), Env: []string{}, Dir: "/"}, InitUID),
		Mounts:   mounts(s),
		Linux: &specs.Linux{
			CgroupsPath:   s.Cgroup,
			UIDMappings:   []specs.LinuxIDMapping{{HostID: s.UIDFirst, Size: s.UIDCount}},
			GIDMappings:   []specs.LinuxIDMapping{{HostID: s.UIDFirst, Size: s.UIDCount}},
			Namespaces:    namespaces(s),
			Resources:     resources,
			MaskedPaths:   maskedPaths,
			ReadonlyPaths: readonlyPaths,
		},
	}
	out.Process.Rlimits = rlimits(s.Limits.OpenFiles)
	out.Process.Capabilities = &specs.LinuxCapabilities{
		Bounding: initCaps, Effective: initCaps, Permitted: initCaps, Inheritable: initCaps, Ambient: initCaps,
	}
	if s.Unconfined {
		return out, nil
	}
	profile, err := seccompProfile(s.Refusals, s.NoExec, s.HostNetwork)
	if err != nil {
		return nil, err
	}
	out.Linux.Seccomp = profile
	return out, nil
}

func namespaces(s Spec) []specs.LinuxNamespace {
	out := []specs.LinuxNamespace{
		{Type: specs.UserNamespace, Path: s.UserNS},
		{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
		{Type: specs.UTSNamespace}, {Type: specs.CgroupNamespace},
	}
	if !s.HostNetwork {
		out = append(out, specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: s.NetNS})
	}
	return out
}

// initCaps are what kid-init holds, over the kid's own user namespace and nothing else: its children change uid and gid
// with them, and then give them up, the bounding set included (capabilities(7)).
var initCaps = []string{"CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}

// process has no capability in any set, but what asRoot gives, and can never gain one.
func process(p Process, uid uint32) *specs.Process {
	umask, adj := uint32(0o022), 500
	out := &specs.Process{
		User: specs.User{UID: uid, GID: uid, Umask: &umask},
		Args: p.Argv, Env: p.Env, Cwd: p.Dir,
		Capabilities:    &specs.LinuxCapabilities{},
		NoNewPrivileges: true,
		OOMScoreAdj:     &adj, // when the machine runs out of memory, kids go before Tagout
		Rlimits:         rlimits(p.OpenFiles),
	}
	if p.Root {
		asRoot(out)
	}
	return out
}

func mounts(s Spec) []specs.Mount {
	out := []specs.Mount{
		// kid-init and whatever else does not run as the kid's user is out of sight (proc(5)).
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev", "hidepid=invisible"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "noexec", "mode=755", "size=" + devSize}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=" + shmSize, maxTmpNr}},
		{Destination: "/tmp", Type: "tmpfs", Source: "tmp", Options: scratch(s,
			"nosuid", "nodev", "mode=1777", fmt.Sprintf("size=%d", s.Tmp), maxTmpNr,
			fmt.Sprintf("uid=%d", KidUID), fmt.Sprintf("gid=%d", KidUID),
		)},
		{Destination: InitPath, Type: "bind", Source: s.Init, Options: []string{"bind", "ro", "nosuid", "nodev"}},
	}
	for _, m := range s.Mounts {
		options := []string{"bind", "nosuid", "nodev"}
		switch {
		case m.Tree:
			options = []string{"rbind", "nosuid", "nodev", "rro"}
		case !m.Writable:
			options = append(options, "ro")
		default:
			options = scratch(s, options...)
		}
		out = append(out, specs.Mount{Destination: m.Target, Type: "bind", Source: m.Source, Options: options})
	}
	return out
}

// scratch adds what the spec asks for of every place that the kid can write to.
func scratch(s Spec, options ...string) []string {
	if s.NoExec {
		options = append(options, "noexec")
	}
	return options
}

func resources(l Limits) (*specs.LinuxResources, error) {
	out := &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}
	if l.PIDs > 0 {
		out.Pids = &specs.LinuxPids{Limit: &l.PIDs}
	}
	if l.Memory > 0 {
		out.Memory = &specs.LinuxMemory{Limit: &l.Memory}
		if swapAccounted() {
			out.Memory.Swap = &l.Memory // memory and swap together: none of it may be swap
		}
		if !unified() { // or the kid's pages would be swapped out where the whole machine is short of memory
			out.Memory.Swappiness = new(uint64)
		}
	}
	if l.DiskRate > 0 {
		disks, err := disks()
		if err != nil {
			return nil, err
		}
		out.BlockIO = throttle(disks, uint64(l.DiskRate)) // positive
	}
	if l.CPUs > 0 {
		quota, every := int64(l.CPUs*period), uint64(period)
		out.CPU = &specs.LinuxCPU{Quota: &quota, Period: &every}
	}
	if unified() {
		out.Unified = map[string]string{"memory.oom.group": "1"} // a kid that ran out of memory ends whole
	}
	return out, nil
}

func unified() bool {
	var fs unix.Statfs_t
	return unix.Statfs("/sys/fs/cgroup", &fs) == nil && fs.Type == unix.CGROUP2_SUPER_MAGIC
}

// swapAccounted says whether a swap limit can be set. On cgroup v2 runc leaves it out by itself where it
// cannot.
func swapAccounted() bool {
	_, err := os.Stat("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes")
	return unified() || err == nil
}

// check refuses what would otherwise fail later with a puzzling message.
func (s Spec) check() error {
	for name, value := range map[string]string{"id": s.ID, "root": s.Root, "init": s.Init, "user namespace": s.UserNS, "cgroup": s.Cgroup} {
		if value == "" {
			return fmt.Errorf("container without %s", name)
		}
	}
	if (s.NetNS == "") != s.HostNetwork {
		return errors.New("container without a network namespace of its own that is not meant to be on the machine's network, or with one that is")
	}
	if s.UIDCount == 0 || s.UIDFirst == 0 {
		return errors.New("container without a uid range of its own")
	}
	if s.Tmp <= 0 {
		return errors.New("container without a size for /tmp")
	}
	return nil
}
