package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/cgroup"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/session"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

// box is an instance set up for killswitchd alone, in a mount namespace of the test's own: its BPF filesystem
// is nobody else's.
type box struct {
	t      *testing.T
	inst   instance.Instance
	layout cgroup.Layout
	bin    string
	client *control.Client
	cmd    *exec.Cmd
	stderr *lockedBuffer
}

func newBox(t *testing.T, name string) *box {
	t.Helper()
	testroot.Require(t)
	privateMounts(t)
	inst, err := instance.Claim(name)
	must(t, err)
	layout, err := cgroup.Detect()
	must(t, err)
	b := &box{t: t, inst: inst, layout: layout, bin: filepath.Join(t.TempDir(), "killswitchd"), client: control.NewClient(inst.Socket(instance.Killswitchd))}
	t.Cleanup(b.tearDown)
	build := exec.Command("go", "build", "-o", b.bin, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as it is shipped
	out, err := build.CombinedOutput()
	if err != nil {
		t.Fatalf("building: %v: %s", err, out)
	}
	must(t, os.Chmod(b.bin, 0o755))
	for p := filepath.Dir(b.bin); strings.HasPrefix(p, os.TempDir()) && p != os.TempDir(); p = filepath.Dir(p) {
		must(t, os.Chmod(p, 0o755)) // the daemon's user must reach it
	}
	uid, gid := inst.UID(instance.Killswitchd), inst.GroupID()
	for _, dir := range []string{inst.SessionDir(), filepath.Dir(inst.Socket(instance.Killswitchd)), inst.TagDir(), inst.OrderDir(), inst.StopDir(), inst.TripDir(), filepath.Dir(inst.AuditFile(instance.Killswitchd))} {
		must(t, os.MkdirAll(dir, 0o750))
		must(t, os.Chown(dir, uid, gid))
	}
	must(t, os.WriteFile(filepath.Join(inst.StateDir(), instance.TripFile), []byte("[]"), 0o644))
	for _, dir := range []string{inst.RunDir(), inst.StateDir(), filepath.Dir(filepath.Dir(inst.Socket(instance.Killswitchd))), inst.AuditDir()} {
		must(t, os.Chmod(dir, 0o755))
	}
	for _, rel := range []string{inst.KidsCgroupRel(), inst.DaemonCgroupRel(instance.Credd), inst.DaemonCgroupRel(instance.Proxy)} {
		must(t, layout.Create(rel))
		must(t, os.Chown(layout.V2(rel)+"/cgroup.kill", uid, gid))
	}
	return b
}

// privateMounts gives the test's thread mounts of its own with an empty BPF filesystem.
func privateMounts(t *testing.T) {
	t.Helper()
	runtime.LockOSThread() // never unlocked: thread and namespace end with the test
	must(t, unix.Unshare(unix.CLONE_NEWNS))
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(t, unix.Mount("bpf", "/sys/fs/bpf", "bpf", 0, "mode=0755"))
}

func (b *box) tearDown() {
	if b.cmd != nil {
		b.kill()
	}
	b.client.CloseIdle()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	root := b.layout.V2(b.inst.CgroupRel())
	cgroup.Kill(root)           // may be gone
	cgroup.WaitEmpty(ctx, root) // Remove says what is wrong
	if err := b.layout.Remove(ctx, b.inst.CgroupRel()); err != nil {
		b.t.Error(err)
	}
	for _, dir := range []string{b.inst.RunDir(), b.inst.StateDir()} {
		if err := os.RemoveAll(dir); err != nil {
			b.t.Error(err)
		}
	}
	if err := b.inst.Release(); err != nil {
		b.t.Error(err)
	}
}

func (b *box) installBPF() {
	b.t.Helper()
	must(b.t, os.MkdirAll(filepath.Dir(b.inst.PinDir()), 0o755))
	must(b.t, bpf.Install(bpf.Config{
		PinDir: b.inst.PinDir(), KidsCgroup: b.layout.V2(b.inst.KidsCgroupRel()),
		DaemonCgroups: []string{b.layout.V2(b.inst.DaemonCgroupRel(instance.Proxy))}, KidLevel: instance.KidCgroupLevel,
		Gateway: b.inst.Gateway(), KidNet: b.inst.KidNet(), Virtual: b.inst.VirtualNet(), BoxMark: b.inst.BoxMark(),
		GID: b.inst.GroupID(), KillUID: b.inst.UID(instance.Killswitchd),
	}))
}

// start runs the real binary as its own user with the capabilities that a supervisor gives it.
func (b *box) start() {
	b.t.Helper()
	b.stderr = &lockedBuffer{}
	b.cmd = exec.Command(b.bin, "--instance", b.inst.Name())
	b.cmd.Stderr = b.stderr
	b.cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: uint32(b.inst.UID(instance.Killswitchd)), Gid: uint32(b.inst.GroupID())}, // ours
		AmbientCaps: []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN, unix.CAP_IPC_LOCK},
	}
	must(b.t, b.cmd.Start())
	b.until("the daemon serves", func() bool {
		return b.client.Call(context.Background(), http.MethodGet, "/healthz", nil, nil) == nil
	})
}

func (b *box) kill() {
	b.cmd.Process.Kill() // may be dead
	b.cmd.Wait()         // killed on purpose
	b.cmd = nil
	b.client.CloseIdle()
}

func (b *box) until(what string, cond func() bool) {
	b.t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(20 * time.Second)
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			b.t.Fatalf("not seen in 20 s: %s; the daemon said %s", what, b.stderr)
		}
	}
}

// kid makes a kid's cgroup and document.
func (b *box) kid(name string, index int) *session.Session {
	b.t.Helper()
	rel := b.inst.KidsCgroupRel() + "/" + name
	must(b.t, b.layout.Create(rel))
	dir := b.layout.V2(rel)
	id, err := cgroup.ID(dir)
	must(b.t, err)
	for _, f := range []string{"cgroup.kill", "cgroup.freeze"} {
		must(b.t, os.Chown(filepath.Join(dir, f), b.inst.UID(instance.Killswitchd), -1))
	}
	host, addr := b.inst.KidAddrs(index)
	s := &session.Session{Version: session.Version, ID: "s-" + name, Kid: name, Card: "practice", Index: index, Mark: b.inst.SessionMark(uint32(index)), // small
		Addr: addr, HostAddr: host, Cgroup: dir, CgroupID: id, Created: time.Now()}
	must(b.t, session.NewStore(b.inst.SessionDir()).Put(s, b.inst.GroupID()))
	return s
}

// spawn starts a process in a cgroup.
func (b *box) spawn(dir string, argv ...string) *exec.Cmd {
	b.t.Helper()
	h, err := os.Open(dir)
	must(b.t, err)
	defer h.Close() // only a handle
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(h.Fd())}
	must(b.t, cmd.Start())
	b.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // dead by then
	return cmd
}

func (b *box) empty(dir string) bool {
	some, err := cgroup.Populated(dir)
	return err == nil && !some
}

func (b *box) stop(req wire.StopRequest, each func(wire.StopEvent)) (*wire.StopReport, error) {
	var rep *wire.StopReport
	err := b.client.Each(context.Background(), http.MethodPost, "/v1/stop", req, func(raw json.RawMessage) error {
		var e wire.StopEvent
		if err := json.Unmarshal(raw, &e); err != nil {
			return err
		}
		if each != nil {
			each(e)
		}
		rep = e.Final
		return nil
	})
	return rep, err
}

func (b *box) status() wire.KillStatus {
	b.t.Helper()
	var st wire.KillStatus
	must(b.t, b.client.Call(context.Background(), http.MethodGet, "/v1/status", nil, &st))
	return st
}

func (b *box) clear(sc wire.Scope) error {
	return b.client.Call(context.Background(), http.MethodPost, "/v1/clear", sc, nil)
}

// TestStopWithHalfTheBoxBroken is S12 and S13 with the real binary: no configuration, the BPF filesystem
// unmounted, a credd that does not serve; then kill -9 at rest, and a restart under the tag.
func TestStopWithHalfTheBoxBroken(t *testing.T) {
	b := newBox(t, "tkilla")
	ada := b.knowAda()
	b.installBPF()
	kid := b.kid("k1", 1)
	maps, err := bpf.Open(b.inst.PinDir())
	must(t, err)
	defer maps.Close() // a test
	must(t, maps.PutSession(kid.Mark, bpf.SessionEntry{State: bpf.StateActive, Addr: kid.Addr}))
	credd := b.layout.V2(b.inst.DaemonCgroupRel(instance.Credd))
	b.spawn(credd, "/bin/sleep", "600")
	b.spawn(kid.Cgroup, "/bin/sh", "-c", "trap '' TERM INT HUP; sleep 600 & sleep 600 & sleep 600")
	b.start()
	if st := b.status(); !st.Layers[wire.LayerSession].Armed || !st.Layers[wire.LayerNetwork].Armed || st.Layers[wire.LayerCredential].Armed {
		t.Errorf("status %+v; the daemon said %s", st, b.stderr)
	}
	b.checkProcess()

	must(t, unix.Unmount("/sys/fs/bpf", unix.MNT_DETACH))
	rep, err := b.stop(wire.StopRequest{Scope: wire.Scope{Kid: "k1"}, By: "ada", Reason: "drill"}, nil)
	must(t, err)
	if rep.State != wire.StateObserved || !strings.Contains(rep.Layers[wire.LayerCredential].Detail, "credd killed") {
		t.Errorf("report %+v", rep)
	}
	if e, err := maps.Session(kid.Mark); err != nil || e.State != bpf.StateStopped {
		t.Errorf("session entry %+v, %v", e, err)
	}
	if !b.empty(kid.Cgroup) || !b.empty(credd) {
		t.Error("kid or credd lives")
	}
	for l, lr := range rep.Layers {
		t.Logf("%-10s fired %v observed %v %s", l, lr.Fired, lr.Observed, lr.Detail)
	}

	b.kill()
	b.spawn(kid.Cgroup, "/bin/sleep", "600") // somebody restarts the kid while nobody watches
	b.start()                                // without any BPF maps now
	b.until("the kid stopped again", func() bool { return b.empty(kid.Cgroup) })
	if err := b.clear(wire.Scope{Kid: "k1", Card: "practice"}); control.Status(err) != http.StatusLocked {
		t.Errorf("clear under the tag: %v", err)
	}
	must(t, b.clear(wire.Scope{Kid: "k2", Card: "practice"}))
	if st := b.status(); st.Layers[wire.LayerNetwork].Armed {
		t.Error("the network layer claims to be armed without maps")
	}
	must(t, b.release(ada, rep.Stop))
	must(t, b.clear(wire.Scope{Kid: "k1", Card: "practice"}))
	b.kill()
	b.start()
	if err := b.release(ada, rep.Stop); control.Status(err) != http.StatusConflict || !strings.Contains(err.Error(), "already released by ada") {
		t.Errorf("second release, after a restart: %v", err)
	}
}

// checkProcess looks at the running daemon from outside.
func (b *box) checkProcess() {
	b.t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", b.cmd.Process.Pid))
	must(b.t, err)
	for _, status := range threads {
		raw, err := os.ReadFile(status)
		must(b.t, err)
		if !bytes.Contains(raw, []byte("NoNewPrivs:\t1\n")) {
			b.t.Errorf("no_new_privs is not set: %s", status)
		}
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.cmd.Process.Pid))
	must(b.t, err)
	for _, line := range strings.Split(string(raw), "\n") {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSuffix(strings.TrimSpace(value), " kB")
		switch key {
		case "VmRSS":
			kb, err := strconv.Atoi(value)
			must(b.t, err)
			b.t.Logf("resident memory %d kB", kb)
			if kb > 25<<10 {
				b.t.Errorf("resident memory is %d kB, more than 25 MB", kb)
			}
		case "VmLck":
			if value == "0" {
				b.t.Errorf("memory is not locked; the daemon said %s", b.stderr)
			}
		}
	}
}

// TestKilledInTheMiddleOfAStop is S13: the tag is on disk while the stop is under way, and a successor
// finishes what its predecessor could not see the end of.
func TestKilledInTheMiddleOfAStop(t *testing.T) {
	b := newBox(t, "tkillb")
	b.installBPF()
	kid := b.kid("k1", 1)
	pid := b.spawn(kid.Cgroup, "/bin/sleep", "600").Process.Pid
	// Holding the kid's process in its exit keeps the stop under way (S06's tracer).
	const ptraceSeize = 0x4206
	if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(pid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0); errno != 0 {
		t.Fatal(errno)
	}
	b.start()
	tags := func() int {
		found, err := filepath.Glob(filepath.Join(b.inst.TagDir(), "*.json"))
		must(t, err)
		return len(found)
	}
	var once sync.Once
	rep, err := b.stop(wire.StopRequest{Scope: wire.Scope{All: true}, By: "ada"}, func(wire.StopEvent) {
		once.Do(func() {
			b.until("the tag on disk", func() bool { return tags() == 1 })
			b.cmd.Process.Kill() // that is the point
		})
	})
	if err == nil || rep != nil {
		t.Fatalf("the stop reported %+v, %v", rep, err)
	}
	b.kill()
	b.spawn(kid.Cgroup, "/bin/sleep", "600")
	b.start()
	if err := b.clear(wire.Scope{Kid: "new", Card: "other"}); control.Status(err) != http.StatusLocked {
		t.Errorf("clear after the restart: %v", err)
	}
	b.until("only the held process left", func() bool {
		pids, err := cgroup.Procs(kid.Cgroup)
		return err == nil && len(pids) == 1 && pids[0] == pid
	})
	maps, err := bpf.Open(b.inst.PinDir())
	must(t, err)
	defer maps.Close() // a test
	b.until("the global flag on", func() bool { on, err := maps.StoppedAll(); return on && err == nil })
	var ws unix.WaitStatus
	if _, err := unix.Wait4(pid, &ws, unix.WALL, nil); err != nil {
		t.Fatal(err)
	}
	must(t, unix.PtraceDetach(pid))
	b.until("the kid empty", func() bool { return b.empty(kid.Cgroup) })
}

// TestKilledBeforeTheDiskTookTheTag is S13 at its worst: the disk takes no tag, and killswitchd is killed as soon
// as it has fired. Its successor knows of the stop all the same.
func TestKilledBeforeTheDiskTookTheTag(t *testing.T) {
	b := newBox(t, "tkille")
	kid := b.kid("k1", 1)
	b.spawn(kid.Cgroup, "/bin/sleep", "600")
	must(t, os.Chown(b.inst.TagDir(), 0, b.inst.GroupID()))
	must(t, os.Chmod(b.inst.TagDir(), 0o550))
	b.start()
	var once sync.Once
	rep, err := b.stop(wire.StopRequest{Scope: wire.Scope{All: true}, By: "ada"}, func(wire.StopEvent) {
		once.Do(func() { b.cmd.Process.Kill() }) // that is the point
	})
	if err == nil || rep != nil {
		t.Fatalf("the stop reported %+v, %v", rep, err)
	}
	b.kill()
	if found, err := filepath.Glob(filepath.Join(b.inst.TagDir(), "*.json")); err != nil || len(found) != 0 {
		t.Fatalf("the disk took %v, %v: the test shows nothing", found, err)
	}
	b.spawn(kid.Cgroup, "/bin/sleep", "600")
	b.start()
	if err := b.clear(wire.Scope{Kid: "new", Card: "other"}); control.Status(err) != http.StatusLocked {
		t.Errorf("clear after the restart: %v", err)
	}
	b.until("the kid stopped again", func() bool { return b.empty(kid.Cgroup) })
	must(t, os.Chown(b.inst.TagDir(), b.inst.UID(instance.Killswitchd), b.inst.GroupID()))
	must(t, os.Chmod(b.inst.TagDir(), 0o750))
	b.until("the tag on disk", func() bool {
		found, err := filepath.Glob(filepath.Join(b.inst.TagDir(), "*.json"))
		return err == nil && len(found) == 1
	})
	b.until("no note any more", func() bool {
		left, err := os.ReadDir(b.inst.StopDir())
		return err == nil && len(left) == 0
	})
}

// TestStopsWithoutASocket: a signal and a file stop everything; and BPF maps that appear later are used.
func TestStopsWithoutASocket(t *testing.T) {
	b := newBox(t, "tkillc")
	kid := b.kid("k1", 1)
	b.spawn(kid.Cgroup, "/bin/sleep", "600")
	b.start()
	must(t, b.cmd.Process.Signal(unix.SIGUSR1))
	b.until("the kid dead", func() bool { return b.empty(kid.Cgroup) })
	b.until("the tag hangs", func() bool { return len(b.status().Tags) == 1 })
	if tag := b.status().Tags[0]; tag.Cause != "signal" || tag.By != "uid:0" || !tag.Scope.All {
		t.Errorf("tag %+v", tag)
	}
	b.installBPF()
	maps, err := bpf.Open(b.inst.PinDir())
	must(t, err)
	defer maps.Close() // a test
	b.until("the flag in the maps that came later", func() bool { on, err := maps.StoppedAll(); return on && err == nil })
	must(t, os.WriteFile(filepath.Join(b.inst.RunDir(), "STOP"), nil, 0o600))
	b.until("a second tag", func() bool { tags := b.status().Tags; return len(tags) == 2 && tags[1].Cause == "sentinel" })

	must(t, b.cmd.Process.Signal(unix.SIGTERM))
	if err := b.cmd.Wait(); err != nil {
		t.Errorf("SIGTERM: %v: %s", err, b.stderr)
	}
	b.cmd = nil
	log, err := os.ReadFile(b.inst.AuditFile(instance.Killswitchd))
	must(t, err)
	for _, event := range []string{"stop.received", "stop.progress", "stop.completed"} {
		if !bytes.Contains(log, []byte(event)) {
			t.Errorf("no %s in the audit log", event)
		}
	}
}

// lockedBuffer collects what the daemon writes while the test reads it.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
