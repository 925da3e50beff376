package testenv

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// SetSecret puts a secret into the box's vault, bound to hosts ("name:port").
func (b *Box) SetSecret(name, value string, hosts ...string) {
	b.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	err := b.Client(instance.Credd).Call(ctx, http.MethodPut, "/v1/vault/"+name, wire.VaultEntry{Value: value, Hosts: hosts}, nil)
	if err != nil {
		b.T.Fatalf("putting %s into the vault: %v", name, err)
	}
}

// WaitAlert waits until the webhook got the alert for the record with the given id.
func (b *Box) WaitAlert(id string) {
	b.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if _, err := b.Net.Webhook.Wait(ctx, "the alert for "+id, func(r audit.Record) bool { return r.ID == id }); err != nil {
		b.T.Error(err)
	}
}

// pids returns the processes of a daemon's cgroup.
func (b *Box) pids(daemon string) []int {
	b.T.Helper()
	layout, err := cgroup.Detect()
	if err != nil {
		b.T.Fatal(err)
	}
	pids, err := cgroup.Procs(layout.V2(b.Inst.DaemonCgroupRel(daemon)))
	if err != nil {
		b.T.Fatal(err)
	}
	return pids
}

// OpenFiles counts what a daemon's processes hold open.
func (b *Box) OpenFiles(daemon string) int {
	b.T.Helper()
	n := 0
	for _, pid := range b.pids(daemon) {
		files, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "fd"))
		if err != nil {
			b.T.Fatal(err)
		}
		n += len(files)
	}
	return n
}

// LeaveFiles lowers what a daemon may have open to what it has, and so many more. The function that it returns gives the
// daemon its limit back.
func (b *Box) LeaveFiles(daemon string, more int) (restore func()) {
	b.T.Helper()
	pid := b.PID(daemon)
	files, err := os.ReadDir(filepath.Join("/proc", strconv.Itoa(pid), "fd"))
	if err != nil {
		b.T.Fatal(err)
	}
	used := map[int]bool{}
	for _, f := range files {
		fd, err := strconv.Atoi(f.Name())
		if err != nil {
			b.T.Fatal(err)
		}
		used[fd] = true
	}
	limit := 0 // of numbers, not of files: those between that are free count
	for ; more > 0 || used[limit]; limit++ {
		if !used[limit] {
			more--
		}
	}
	// As its own user, who needs no capability for it (prlimit(2)).
	prlimit := func(args ...string) string {
		cmd := exec.Command("prlimit", append([]string{"--pid", strconv.Itoa(pid)}, args...)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: b.owner(pid)}
		raw, err := cmd.CombinedOutput()
		if err != nil {
			b.T.Fatalf("prlimit %v of %s: %v: %s", args, daemon, err, raw)
		}
		return strings.TrimSpace(string(raw))
	}
	old := prlimit("--nofile", "--output", "SOFT", "--noheadings")
	prlimit(fmt.Sprintf("--nofile=%d:", limit))
	return func() { prlimit("--nofile=" + old + ":") }
}

// owner is the user and group as whom a process runs.
func (b *Box) owner(pid int) *syscall.Credential {
	b.T.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		b.T.Fatal(err)
	}
	id := func(key string) (n uint32) {
		_, rest, _ := strings.Cut(string(raw), "\n"+key+":")
		if _, err := fmt.Sscan(rest, &n); err != nil {
			b.T.Fatalf("%s of process %d: %v", key, pid, err)
		}
		return n
	}
	return &syscall.Credential{Uid: id("Uid"), Gid: id("Gid")}
}

// PID returns the process of a daemon, which must be running.
func (b *Box) PID(daemon string) int {
	b.T.Helper()
	pids := b.pids(daemon)
	if len(pids) != 1 {
		b.T.Fatalf("%s runs as %v", daemon, pids)
	}
	return pids[0]
}

// signal sends sig to every process of the daemons, which must be running.
func (b *Box) signal(sig unix.Signal, daemons ...string) {
	b.T.Helper()
	for _, d := range daemons {
		pids := b.pids(d)
		if len(pids) == 0 {
			b.T.Fatalf("%s is not running", d)
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
				b.T.Fatalf("signalling %s: %v", d, err)
			}
		}
	}
}

// Kill9 kills a daemon and waits until the killed processes are gone. `tagout up`, where it still runs,
// starts it again.
func (b *Box) Kill9(daemon string) {
	b.T.Helper()
	before := b.pids(daemon)
	b.signal(unix.SIGKILL, daemon)
	b.Until(10*time.Second, daemon+" is dead", func() error {
		for _, pid := range b.pids(daemon) {
			if slices.Contains(before, pid) {
				return fmt.Errorf("pid %d is still there", pid)
			}
		}
		return nil
	})
}

// Freeze stops daemons with SIGSTOP and waits until they stand still: alive, and deaf.
func (b *Box) Freeze(daemons ...string) {
	b.T.Helper()
	b.signal(unix.SIGSTOP, daemons...)
	for _, d := range daemons {
		for _, pid := range b.pids(d) {
			b.Until(10*time.Second, d+" stands still", func() error { return inState(pid, "T") })
		}
	}
}

// Thaw lets frozen daemons go on. A daemon that was killed meanwhile is passed over.
func (b *Box) Thaw(daemons ...string) {
	b.T.Helper()
	for _, d := range daemons {
		for _, pid := range b.pids(d) {
			unix.Kill(pid, unix.SIGCONT) // it may be gone
		}
	}
}

func inState(pid int, want string) error {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return err
	}
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	if len(fields) == 0 || fields[0] != want {
		return fmt.Errorf("pid %d is in state %v", pid, fields[:1])
	}
	return nil
}
