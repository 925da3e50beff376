package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

func cgroupProbes() []probe {
	return []probe{
		{Check{
			Name: "cgroup-v2", Needed: true, Option: "CONFIG_CGROUPS", Since: "4.5", Cost: "kids cannot be told apart or killed as a whole",
			Fix: "mount it: `mkdir -p /sys/fs/cgroup/unified && mount -t cgroup2 none /sys/fs/cgroup/unified`, or boot with systemd.unified_cgroup_hierarchy=1",
		}, probeLayout},
		{Check{
			Name: "cgroup-kill", Needed: true, Option: "CONFIG_CGROUPS", Since: "5.14", Cost: "a stop could not kill a kid that forks faster than it is killed",
			Fix: "boot a kernel from Linux 5.14 on",
		}, probeKill},
		{Check{
			Name: "cgroup-limits", Needed: true, Option: "CONFIG_CGROUP_PIDS, CONFIG_MEMCG, CONFIG_CGROUP_SCHED", Since: "4.5",
			Cost: "a kid could take all pids, memory or CPU time of the box",
			Fix:  "boot a kernel with these options, and without cgroup_disable=memory",
		}, probeLimits},
	}
}

func probeLayout(context.Context) (string, error) {
	l, err := cgroup.Detect()
	if err != nil {
		return "", err
	}
	kind := "unified"
	if l.Hybrid() {
		kind = "hybrid"
	}
	return fmt.Sprintf("%s, v2 at %s", kind, l.V2("/")), nil
}

// probeKill kills a real process through a cgroup of its own.
func probeKill(ctx context.Context) (string, error) {
	l, err := cgroup.Detect()
	if err != nil {
		return "", err
	}
	rel := trialPrefix + strconv.Itoa(os.Getpid())
	dir := l.V2(rel)
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := removeOldTrials(ctx, l); err != nil {
		return "", fmt.Errorf("removing what a killed doctor left: %w", err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil { // as the kernel makes them
		return "", fmt.Errorf("making a cgroup: %w", err)
	}
	defer l.Remove(ctx, rel) // reported by the next run's Mkdir
	cmd := exec.Command("/bin/sleep", "60")
	if err := cmd.Start(); err != nil {
		return "", fmt.Errorf("starting a process to kill: %w", err)
	}
	defer cmd.Wait()         // killed on purpose
	defer cmd.Process.Kill() // killed already, if all is well
	if err := cgroup.Join(dir, cmd.Process.Pid); err != nil {
		return "", fmt.Errorf("moving a process into a cgroup: %w", err)
	}
	if err := cgroup.Kill(dir); err != nil {
		return "", fmt.Errorf("killing a cgroup: %w", err)
	}
	begun := time.Now()
	if err := cgroup.WaitEmpty(ctx, dir); err != nil {
		return "", fmt.Errorf("waiting for a killed cgroup to be empty: %w", err)
	}
	return fmt.Sprintf("killed a process in %s", time.Since(begun).Round(time.Microsecond)), nil
}

// trialPrefix begins the name of the cgroup in which a doctor tries things; its pid ends it.
const trialPrefix = "/tagout-doctor-"

// removeOldTrials removes the trial cgroups of doctors that were killed.
func removeOldTrials(ctx context.Context, l cgroup.Layout) error {
	dirs, err := filepath.Glob(l.V2(trialPrefix + "*"))
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		pid, err := strconv.Atoi(strings.TrimPrefix(filepath.Base(dir), filepath.Base(trialPrefix)))
		if err != nil {
			continue // not a doctor's
		}
		if err := unix.Kill(pid, 0); pid != os.Getpid() && !errors.Is(err, unix.ESRCH) {
			continue // it may be at it
		}
		if err := cgroup.Kill(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := l.Remove(ctx, trialPrefix+strconv.Itoa(pid)); err != nil {
			return err
		}
	}
	return nil
}

// probeLimits looks for the controllers in whichever hierarchy has them.
func probeLimits(context.Context) (string, error) {
	l, err := cgroup.Detect()
	if err != nil {
		return "", err
	}
	raw, err := os.ReadFile(filepath.Join(l.V2("/"), "cgroup.controllers"))
	if err != nil {
		return "", fmt.Errorf("reading the v2 controllers: %w", err)
	}
	v2 := strings.Fields(string(raw))
	var found, missing []string
	for _, c := range []string{"pids", "memory", "cpu"} {
		switch {
		case contains(v2, c):
			found = append(found, c+" (v2)")
		case l.V1(c, "/") != "":
			found = append(found, c+" (v1)")
		default:
			missing = append(missing, c)
		}
	}
	if len(missing) > 0 {
		return "", errors.New("no hierarchy has the controllers " + strings.Join(missing, ", "))
	}
	return strings.Join(found, ", "), nil
}

func contains(list []string, s string) bool {
	for _, l := range list {
		if l == s {
			return true
		}
	}
	return false
}
