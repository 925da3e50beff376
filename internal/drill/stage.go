package drill

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/lease"
)

// auditSpace is room for the records of a long drill.
const auditSpace = "size=256m,mode=755"

// StageLeases are the shortest terms that a box takes, so that a drill does not wait long for a killswitchd that
// stands still to be killed and started again.
var StageLeases = lease.Terms{Watchdog: lease.WatchdogBound.Least, Kernel: lease.KernelBound.Least}

// stageSource names the drill's own mounts, so that nobody else's is ever taken for one.
const stageSource = "tagout-drill"

// Stage gives an instance that is not set up yet filesystems of its own for its audit log and its BPF pins, so that
// a knock-out can fill the one and unmount the other without anybody else noticing. Unstage undoes it; so does
// the instance's cleanup.
func Stage(inst instance.Instance) error {
	for _, m := range []struct{ dir, fs, options string }{
		{inst.AuditDir(), "tmpfs", auditSpace},
		{inst.PinDir(), "bpf", "mode=755"},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil { // setup narrows it
			return errors.Join(fmt.Errorf("staging the drill: %w", err), Unstage(inst))
		}
		if err := unix.Mount(stageSource, m.dir, m.fs, unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, m.options); err != nil {
			return errors.Join(fmt.Errorf("staging the drill: mounting %s: %w", m.dir, err), Unstage(inst))
		}
	}
	return nil
}

// Unstage unmounts what Stage mounted. Doing it twice is fine.
func Unstage(inst instance.Instance) error {
	var errs []error
	for _, dir := range []string{inst.PinDir(), inst.AuditDir()} {
		for staged(dir) {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				errs = append(errs, fmt.Errorf("unmounting %s: %w", dir, err))
				break
			}
		}
	}
	return errors.Join(errs...)
}

// Staged lists what Stage mounted and Unstage did not.
func Staged(inst instance.Instance) []string {
	var out []string
	for _, dir := range []string{inst.PinDir(), inst.AuditDir()} {
		if staged(dir) {
			out = append(out, "the drill's mount "+dir)
		}
	}
	return out
}

// staged says whether a mount of Stage's is at exactly that path (proc_pid_mountinfo(5)).
func staged(path string) bool {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return false
	}
	defer f.Close() // only read
	sc := bufio.NewScanner(f)
	sc.Buffer(nil, 1<<20) // overlay lines are long
	for sc.Scan() {
		head, tail, _ := strings.Cut(sc.Text(), " - ")
		left, right := strings.Fields(head), strings.Fields(tail)
		if len(left) > 4 && left[4] == path && len(right) > 1 && right[1] == stageSource {
			return true
		}
	}
	return false
}
