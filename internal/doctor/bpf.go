package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const bpffs = "/sys/fs/bpf"

func (p Probes) bpfProbes() []probe {
	out := []probe{{Check{
		Name: "bpffs", Needed: true, Option: "CONFIG_BPF_SYSCALL", Since: "4.4", Cost: "verdicts would end with the daemon that loaded them",
		Fix: "`mount -t bpf bpf /sys/fs/bpf`",
	}, func(context.Context) (string, error) { return MountBPF(bpffs) }}}
	if p.BPF == nil {
		return append(out, probe{
			Check{Name: "bpf", Needed: true, Option: "CONFIG_BPF_SYSCALL", Cost: "there is no verdict in the kernel", Fix: "use a build of tagout that can probe for it"},
			func(context.Context) (string, error) { return "", errors.New("this build cannot probe for BPF") },
		})
	}
	for _, f := range p.BPF() {
		cost := "Tagout needs it: "
		if f.Optional {
			cost = "lost without it: "
		}
		out = append(out, probe{
			Check{
				Name: f.Name, Needed: !f.Optional, Option: bpfOption(f.Name), Since: f.Since,
				Cost: cost + f.Use, Fix: "boot a kernel from Linux " + f.Since + " on that has this option",
			},
			func(context.Context) (string, error) { return f.Use, f.Err },
		})
	}
	return out
}

// bpfOption names the kernel option behind a feature: the special ones, and the two behind all the rest.
func bpfOption(feature string) string {
	switch {
	case feature == "bpf-link":
		return "CONFIG_NET_XGRESS or CONFIG_NET_SCH_INGRESS with CONFIG_NET_CLS_BPF"
	case feature == "bpf-sched-cls":
		return "CONFIG_NET_CLS_ACT"
	case strings.HasPrefix(feature, "bpf-cgroup"):
		return "CONFIG_CGROUP_BPF"
	}
	return "CONFIG_BPF_SYSCALL"
}

// MountBPF makes sure that a BPF filesystem is mounted at dir, mounting one where there is none. It says what
// it found.
func MountBPF(dir string) (string, error) {
	if ok, err := isBPF(dir); err != nil || ok {
		return "mounted at " + dir, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("making the mount point %s: %w", dir, err)
	}
	// Others may look names up: each pin's own mode says who may open it.
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755"); err != nil {
		return "", fmt.Errorf("mounting the BPF filesystem on %s: %w", dir, err)
	}
	if ok, err := isBPF(dir); err != nil || !ok {
		return "", errors.Join(fmt.Errorf("no BPF filesystem on %s after mounting it", dir), err)
	}
	return "mounted at " + dir + " just now", nil
}

func isBPF(dir string) (bool, error) {
	var fs unix.Statfs_t
	err := unix.Statfs(dir, &fs)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("looking at %s: %w", dir, err)
	}
	return fs.Type == unix.BPF_FS_MAGIC, nil
}
