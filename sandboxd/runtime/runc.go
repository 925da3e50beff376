package runtime

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	gorunc "github.com/containerd/go-runc"
	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
)

// Runc drives the runc program. Safe for concurrent use; calls for one container are the caller's to order.
type Runc struct {
	// Patience bounds every call of runc: one that takes longer hangs, and is killed with what it has started. Set it before
	// the first call.
	Patience time.Duration

	root    string
	runc    gorunc.Runc
	program sealed // runc's
	procs   processes

	mu      sync.Mutex
	masters map[string]*master // guarded by mu; of the containers that this process made
}

// NewRunc returns a driver that keeps its state below root (inst.RuncRoot()). It makes this process the
// reaper of the containers' processes (PR_SET_CHILD_SUBREAPER, prctl(2)): runc itself is gone long before
// they are.
func NewRunc(root string) (*Runc, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("becoming the reaper of the kids' processes: %w", err)
	}
	if err := os.MkdirAll(root, 0o700); err != nil {
		return nil, fmt.Errorf("making runc's state directory: %w", err)
	}
	return &Runc{
		Patience: patience, root: root, runc: gorunc.Runc{Root: root, LogFormat: gorunc.JSON}, program: sealed{name: gorunc.DefaultCommand},
		procs: processes{ours: map[int]bool{}}, masters: map[string]*master{},
	}, nil
}

// Create makes the container and its kid-init, which does not run before Start. bundle is an existing
// directory for the runtime's own files of this container.
func (r *Runc) Create(ctx context.Context, bundle string, s Spec) (State, error) {
	fail := func(err error) (State, error) {
		return State{}, fmt.Errorf("creating container %s: %w", s.ID, err)
	}
	if err := s.check(); err != nil {
		return fail(err)
	}
	config, err := build(s)
	if err != nil {
		return fail(err)
	}
	raw, err := json.Marshal(config)
	if err != nil {
		return fail(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), raw, 0o600); err != nil {
		return fail(err)
	}
	ctx, cancel := context.WithTimeout(ctx, r.Patience)
	defer cancel()
	pidFile, logFile := filepath.Join(bundle, "init.pid"), filepath.Join(bundle, "create.log")
	driver := r.runc
	driver.Log = logFile
	if driver.Command, err = r.program.path(); err != nil {
		return fail(err)
	}
	null, err := gorunc.NewNullIO() // a pipe would be held open by kid-init
	if err != nil {
		return fail(err)
	}
	m, theirs, err := newMaster(r.abandon)
	if err != nil {
		return fail(err)
	}
	defer theirs.Close() // kid-init has its own
	if err := driver.Create(ctx, s.ID, bundle, &gorunc.CreateOpts{IO: null, PidFile: pidFile, ExtraFiles: []*os.File{theirs}}); err != nil {
		null.Close() // closed already unless runc could not be started
		m.close()
		return fail(errors.Join(r.hung(ctx, explain(err, logFile)), roomIn(bundle), roomIn(r.root), roomToFork()))
	}
	m.init, m.unit, err = r.made(pidFile, s)
	if err != nil {
		m.close()
		return fail(err)
	}
	go m.read()
	r.mu.Lock()
	r.masters[s.ID] = m
	r.mu.Unlock()
	return State{Status: StatusCreated, PID: m.init}, nil
}

// made returns kid-init's pid and the container's cgroup in the v2 hierarchy, by what runc wrote down. That is looked at
// before it is believed: sandboxd goes by the pid into the kid's files.
func (r *Runc) made(pidFile string, s Spec) (pid int, unit string, err error) {
	if pid, err = readPID(pidFile); err != nil {
		return 0, "", err
	}
	if unit, err = unifiedDir(filepath.Join(r.root, s.ID)); err != nil {
		return 0, "", err
	}
	if !strings.HasSuffix(unit, s.Cgroup) {
		return 0, "", fmt.Errorf("runc put it into the cgroup %s, not into %s", unit, s.Cgroup)
	}
	pids, err := cgroup.Procs(unit)
	if err == nil && !slices.Contains(pids, pid) {
		err = fmt.Errorf("process %d, which runc says is kid-init, is not in the kid's cgroup", pid)
	}
	return pid, unit, err
}

// master returns the socket of the container's kid-init, nil where there is none.
func (r *Runc) master(id string) *master {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.masters[id]
}

// dismiss gives the socket of the container's kid-init up.
func (r *Runc) dismiss(id string) {
	r.mu.Lock()
	m := r.masters[id]
	delete(r.masters, id)
	r.mu.Unlock()
	if m != nil {
		m.close()
	}
}

// hung says so where a call of runc was killed because its time was over.
func (r *Runc) hung(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return fmt.Errorf("runc hangs: it did not end within %v and was killed: %w", r.Patience, err)
	}
	return err
}

// waits says whether the container was created and not started: then runc's init waits at this FIFO.
func (r *Runc) waits(id string) bool {
	_, err := os.Lstat(filepath.Join(r.root, id, fifoName))
	return err == nil
}

// State says what became of a container, by what runc wrote down of it and by what the kernel says of kid-init; ErrNotFound
// where there is no such container. It does not ask runc: whoever takes running kids over must not depend on a program
// that may be missing or hang just then.
func (r *Runc) State(_ context.Context, id string) (State, error) {
	fail := func(err error) (State, error) { return State{}, fmt.Errorf("looking for container %s: %w", id, err) }
	if !r.known(id) {
		return fail(ErrNotFound)
	}
	noted, err := readState(filepath.Join(r.root, id))
	if err != nil {
		return fail(err)
	}
	unit := noted.CgroupPaths[""]
	if unit == "" {
		return fail(errNotUnified)
	}
	pids, err := cgroup.Procs(unit)
	switch {
	case err != nil:
		return fail(err)
	case !slices.Contains(pids, noted.PID) || startOf(noted.PID) != noted.Start:
		return State{Status: StatusStopped}, nil
	case r.waits(id):
		return State{Status: StatusCreated, PID: noted.PID}, nil
	}
	return State{Status: StatusRunning, PID: noted.PID}, nil
}

// startOf is when the process was started, in clock ticks since boot (proc_pid_stat(5)): with its pid it names a process. 0
// where it is gone.
func startOf(pid int) uint64 {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:])) // after the command's name, which may hold anything
	if len(fields) < 20 {
		return 0
	}
	start, err := strconv.ParseUint(fields[19], 10, 64)
	if err != nil {
		return 0
	}
	return start
}

// Kill sends a signal to kid-init. It is no stop: stopping a kid is writing cgroup.kill.
func (r *Runc) Kill(ctx context.Context, id string, sig unix.Signal) error {
	ctx, cancel := context.WithTimeout(ctx, r.Patience)
	defer cancel()
	if err := r.runc.Kill(ctx, id, int(sig), nil); err != nil {
		return fmt.Errorf("signalling container %s: %w", id, err)
	}
	return nil
}

// Delete removes what runc keeps of the container. The caller has seen that nothing can run in it any more
// (its cgroup is empty). A container that is not known is not an error.
//
// runc itself refuses while kid-init is on its way out, and kid-init cannot leave before every process that
// entered its pid namespace from outside was reaped (pid_namespaces(7)): by us, or, where they are a killed
// predecessor's, by somebody who may never do it. A dead process must not hold a destroy up, so then the
// state is removed without runc: there is nothing else that its delete would do.
func (r *Runc) Delete(ctx context.Context, id string) error {
	r.dismiss(id)
	if !r.known(id) {
		return nil
	}
	r.reapStrays()
	ctx, cancel := context.WithTimeout(ctx, min(r.Patience, deletePatience))
	defer cancel()
	if err := r.runc.Delete(ctx, id, nil); err == nil && !r.known(id) {
		return nil
	}
	if err := RemoveState(filepath.Join(r.root, id)); err != nil {
		return fmt.Errorf("deleting container %s: %w", id, err)
	}
	return nil
}

// List returns the ids of the containers that runc has anything of.
func (r *Runc) List() ([]string, error) {
	entries, err := os.ReadDir(r.root)
	if err != nil {
		return nil, fmt.Errorf("listing containers: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

func (r *Runc) known(id string) bool {
	_, err := os.Stat(filepath.Join(r.root, id))
	return err == nil
}

func readPID(file string) (int, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, fmt.Errorf("reading the pid that runc wrote: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil || pid <= 1 {
		return 0, fmt.Errorf("runc wrote the pid %q", raw)
	}
	return pid, nil
}

// explain replaces go-runc's "exit status 1" with the last error of runc's log, which says why.
func explain(err error, logFile string) error {
	raw, rerr := os.ReadFile(logFile)
	if rerr != nil {
		return err
	}
	why := ""
	for line := range strings.Lines(string(raw)) {
		var entry struct{ Level, Msg string }
		if json.Unmarshal([]byte(line), &entry) == nil && (entry.Level == "error" || entry.Level == "fatal") {
			why = entry.Msg
		}
	}
	if why == "" {
		return err
	}
	for _, errno := range []unix.Errno{unix.ENOSPC, unix.EAGAIN, unix.ENOMEM, unix.EMFILE, unix.ENFILE} { // what the machine has run out of
		if before, ok := strings.CutSuffix(why, errno.Error()); ok {
			return fmt.Errorf("%s%w", before, errno)
		}
	}
	return errors.New(why)
}
