package testenv

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
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
