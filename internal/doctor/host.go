package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// minKernel is the oldest kernel on which the BPF programs were tried, Debian 12's. It has all that is needed, with
// clsact in the place of tcx (6.6).
var minKernel = version{6, 1}

func hostProbes() []probe {
	return []probe{
		{Check{Name: "root", Needed: true, Cost: "nothing can be set up", Fix: "run it with sudo"}, probeRoot},
		{Check{
			Name: "kernel", Needed: true, Since: minKernel.String(),
			Cost: "nobody has tried the BPF programs on it",
			Fix:  "boot a kernel from Linux 6.1 on, as Debian 12 has it",
		}, probeKernel},
		{Check{
			Name: "user-namespaces", Needed: true, Option: "CONFIG_USER_NS", Since: "3.8",
			Cost: "a kid's root would be the box's root", Fix: "set sysctl user.max_user_namespaces above 0",
		}, probeUserNS},
		{Check{
			Name: "time-namespaces", Needed: true, Option: "CONFIG_TIME_NS", Since: minKernel.String(),
			Cost: "no kid could be made: each has a monotonic clock of its own", Fix: "boot a kernel with this option, and install util-linux",
		}, probeTimeNS},
		{Check{
			Name: "seccomp", Needed: true, Option: "CONFIG_SECCOMP_FILTER", Since: "5.0",
			Cost: "a kid could make any system call", Fix: "boot a kernel with this option",
		}, probeSeccomp},
	}
}

func probeRoot(context.Context) (string, error) {
	if uid := os.Geteuid(); uid != 0 {
		return "", fmt.Errorf("running as uid %d, which leaves out what only root can try", uid)
	}
	return "uid 0", nil
}

func probeKernel(context.Context) (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", fmt.Errorf("asking for the kernel's version: %w", err)
	}
	release := unix.ByteSliceToString(u.Release[:])
	v, err := parseVersion(release)
	if err != nil {
		return "", err
	}
	if v.less(minKernel) {
		return "", fmt.Errorf("this is Linux %s, older than %s", release, minKernel)
	}
	return "Linux " + release, nil
}

// probeUserNS makes a user namespace with a uid map, as every kid gets one.
func probeUserNS(ctx context.Context) (string, error) {
	cmd := exec.CommandContext(ctx, "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  unix.CLONE_NEWUSER | unix.CLONE_NEWPID,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1 << 30, Size: 1 << 16}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: 1 << 30, Size: 1 << 16}},
	}
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("making a user namespace: %w", err)
	}
	return "made one with a uid range of its own", nil
}

// probeTimeNS makes a time namespace as every kid gets one, and starts a program in it with the one that joins a kid's.
func probeTimeNS(ctx context.Context) (string, error) {
	join, err := exec.LookPath("nsenter")
	if err != nil {
		return "", fmt.Errorf("looking for nsenter(1): %w", err)
	}
	cmd := exec.CommandContext(ctx, join, "--time=/proc/self/ns/time_for_children", "--", "/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWTIME}
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("making a time namespace: %w", err)
	}
	return "made one and joined it", nil
}

func probeSeccomp(context.Context) (string, error) {
	raw, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil {
		return "", fmt.Errorf("reading seccomp's actions: %w", err)
	}
	for _, want := range []string{"errno", "kill_process", "user_notif"} {
		if !bytes.Contains(raw, []byte(want)) {
			return "", fmt.Errorf("seccomp has no action %s", want)
		}
	}
	return strings.TrimSpace(string(raw)), nil
}

func comfortProbes() []probe {
	return []probe{
		{Check{
			Name: "sys-resource", Cost: "killswitchd cannot be protected from the out-of-memory killer",
			Fix: "give this machine's root CAP_SYS_RESOURCE",
		}, probeSysResource},
		{Check{
			Name: "clock", Cost: "times in the log may be off; deadlines are not affected, they follow the boot clock",
			Fix: "run a time service, for example `apt-get install systemd-timesyncd`",
		}, probeClock},
		{Check{
			Name: "disk", Cost: "the audit log may fill the disk; records are then lost, with a gap record in their place",
			Fix: "free some space under /var/lib/tagout and /run",
		}, probeDisk},
	}
}

func probeSysResource(context.Context) (string, error) {
	set, err := unix.PrctlRetInt(unix.PR_CAPBSET_READ, unix.CAP_SYS_RESOURCE, 0, 0, 0)
	if err != nil {
		return "", fmt.Errorf("reading the bounding set: %w", err)
	}
	if set == 0 {
		return "", errors.New("CAP_SYS_RESOURCE is not in the bounding set")
	}
	return "CAP_SYS_RESOURCE is in the bounding set", nil
}

// probeClock asks the kernel whether something keeps its clock right (adjtimex(2)).
func probeClock(context.Context) (string, error) {
	var boot unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &boot); err != nil {
		return "", fmt.Errorf("reading the boot clock: %w", err)
	}
	var tx unix.Timex
	state, err := unix.Adjtimex(&tx)
	if err != nil {
		return "", fmt.Errorf("asking about the wall clock: %w", err)
	}
	if state == unix.TIME_ERROR || tx.Status&unix.STA_UNSYNC != 0 {
		return "", errors.New("nothing keeps the wall clock right")
	}
	return "the wall clock is kept right", nil
}

const (
	minState = 1 << 30
	minRun   = 64 << 20
)

func probeDisk(context.Context) (string, error) {
	var found []string
	for _, d := range []struct {
		dirs []string
		min  uint64
	}{{[]string{"/var/lib/tagout", "/var/lib", "/"}, minState}, {[]string{"/run/tagout", "/run", "/"}, minRun}} {
		for _, dir := range d.dirs {
			var fs unix.Statfs_t
			if err := unix.Statfs(dir, &fs); err != nil {
				continue
			}
			free := fs.Bavail * uint64(fs.Bsize) // block sizes are positive
			if free < d.min {
				return "", fmt.Errorf("%d MiB free in %s, less than %d", free>>20, dir, d.min>>20)
			}
			found = append(found, fmt.Sprintf("%d MiB free in %s", free>>20, dir))
			break
		}
	}
	return strings.Join(found, ", "), nil
}
