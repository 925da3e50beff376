package killswitch

import (
	"bufio"
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/session"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

// TestMain lets the test binary play the hostile kid.
func TestMain(m *testing.M) {
	if role := os.Getenv("KILLSWITCH_TEST_ROLE"); role != "" {
		playRole(role)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// yard is a real kids cgroup on this machine, with the rig for everything that is not a cgroup.
type yard struct {
	*rig
	t      *testing.T
	layout cgroup.Layout
	rel    string
}

func newYard(t *testing.T) *yard {
	t.Helper()
	testroot.Require(t)
	l, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	y := &yard{rig: newRig(t), t: t, layout: l, rel: fmt.Sprintf("/tks%d-%s/kids", os.Getpid(), strings.ReplaceAll(t.Name(), "/", "-"))}
	if err := l.Create(y.rel); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		cgroup.Kill(l.V2(y.rel)) // may be gone
		for kid := range y.docs {
			cgroup.Thaw(l.V2(y.rel+"/"+kid), l.Freezer(y.rel+"/"+kid)) // may be gone
		}
		if err := l.Remove(ctx, filepath.Dir(y.rel)); err != nil {
			t.Error(err)
		}
	})
	return y
}

// kid makes a kid's cgroups and its document.
func (y *yard) kid(name string) {
	y.t.Helper()
	rel := y.rel + "/" + name
	if err := y.layout.Create(rel); err != nil {
		y.t.Fatal(err)
	}
	dir := y.layout.V2(rel)
	id, err := cgroup.ID(dir)
	if err != nil {
		y.t.Fatal(err)
	}
	freezer := y.layout.Freezer(rel)
	if freezer != "" {
		if err := os.MkdirAll(freezer, 0o755); err != nil {
			y.t.Fatal(err)
		}
	}
	mark := uint32(len(y.docs) + 1) // small
	y.docs[name] = &session.Session{Version: 1, ID: "s", Kid: name, Card: "c", Mark: mark, Cgroup: dir, CgroupID: id, Freezer: freezer,
		Addr: netip.MustParseAddr("198.19.0.3"), HostAddr: netip.MustParseAddr("198.19.0.2")}
	y.state[mark] = false
}

// run starts the test binary in a role inside a kid and returns when it says that it is ready.
func (y *yard) run(kid, role string) *exec.Cmd {
	y.t.Helper()
	dir, err := os.Open(y.docs[kid].Cgroup)
	if err != nil {
		y.t.Fatal(err)
	}
	defer dir.Close() // only a handle
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "KILLSWITCH_TEST_ROLE="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	out, err := cmd.StdoutPipe()
	if err != nil {
		y.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		y.t.Fatal(err)
	}
	y.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // dead by then
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		y.t.Fatalf("role %s said %q, %v", role, line, err)
	}
	return cmd
}

func (y *yard) sw(session time.Duration) *Switch {
	timing := fast
	timing.Session, timing.Tick = session, 50*time.Millisecond
	s := y.rig.sw()
	s.t, s.cfg.Cgroups, s.cfg.KidsDir, s.cfg.KidsFreezer = timing, OSCgroups{}, y.layout.V2(y.rel), y.layout.Freezer(y.rel)
	s.cfg.CreddDir = y.layout.V2(y.rel + "-credd")
	return s
}

func (y *yard) procs(kid string) int {
	pids, err := cgroup.Procs(y.docs[kid].Cgroup)
	if err != nil {
		y.t.Fatal(err)
	}
	return len(pids)
}

// playRole is what runs inside a kid. Every role ignores all signals that can be ignored.
func playRole(role string) {
	ignoreAll()
	name, arg, _ := strings.Cut(role, ":")
	switch name {
	case "sleep":
		ready()
		for { // not select{}: without cgo Go's runtime calls that a deadlock and ends the process
			time.Sleep(time.Hour)
		}
	case "tree": // double forks, each child in a session of its own, and the first process then dies
		n, _ := strconv.Atoi(arg) // our own argument
		for range n {
			respawn("sleep", true)
		}
		ready()
	case "storm": // forks for ever, up to a bound of living children
		n, _ := strconv.Atoi(arg) // our own argument
		ready()
		storm(n)
	}
}

// storm forks for ever: it grows to n children and then replaces the oldest by a new one, as fast as it can. Children
// do not end by themselves, or on a busy machine they would end faster than others come.
func storm(n int) {
	var living []*exec.Cmd
	for {
		if len(living) == n {
			oldest := living[0]
			living = living[1:]
			oldest.Process.Kill()
			oldest.Wait() // killed on purpose
		}
		cmd := exec.Command("/bin/sh", "-c", "trap '' TERM INT HUP; exec sleep 1000")
		if cmd.Start() == nil {
			living = append(living, cmd)
		}
	}
}

func ready() { fmt.Println("ready") }

func ignoreAll() {
	for i := syscall.Signal(1); i < 64; i++ {
		if i != syscall.SIGCHLD {
			signal.Ignore(i)
		}
	}
}

func respawn(role string, detach bool) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "KILLSWITCH_TEST_ROLE="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: detach}
	if err := cmd.Start(); err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

// TestHostileTrees is S02, S05 and a short S07.
func TestHostileTrees(t *testing.T) {
	for _, c := range []struct {
		name, role string
		least      int
		initDies   bool
	}{
		{"one that ignores signals", "sleep", 1, false},
		{"double forks whose init is dead", "tree:30", 30, true},
		{"fork storm", "storm:200", 100, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			y := newYard(t)
			y.kid("k1")
			y.kid("k2")
			cmd := y.run("k1", c.role)
			y.run("k2", "sleep")
			if c.initDies {
				if err := cmd.Wait(); err != nil {
					t.Fatal(err)
				}
			}
			waitFor(t, "the tree grown", func() bool { return y.procs("k1") >= c.least })
			rep := order(t, y.sw(10*time.Second), wire.Scope{Kid: "k1"}, wire.LayerSession)
			lr := rep.Layers[wire.LayerSession]
			if rep.State != wire.StateObserved || y.procs("k1") != 0 {
				t.Fatalf("%d processes left, report %+v", y.procs("k1"), rep)
			}
			if y.procs("k2") != 1 {
				t.Error("the neighbour died too")
			}
			t.Logf("fired %v, observed %v", lr.Fired, lr.Observed)
		})
	}
}

func TestFrozenKid(t *testing.T) {
	y := newYard(t)
	y.kid("k1")
	cmd := y.run("k1", "sleep")
	d := y.docs["k1"]
	if d.Freezer != "" {
		if err := cgroup.Join(d.Freezer, cmd.Process.Pid); err != nil {
			t.Fatal(err)
		}
	}
	if err := cgroup.Freeze(d.Cgroup, d.Freezer); err != nil {
		t.Fatal(err)
	}
	if d.Freezer != "" {
		waitFor(t, "the freezer done", func() bool {
			raw, err := os.ReadFile(filepath.Join(d.Freezer, "freezer.state"))
			return err == nil && string(raw) == "FROZEN\n"
		})
	}
	if d.Freezer != "" {
		s := y.sw(100 * time.Millisecond)
		s.cfg.Cgroups = noThaw{}
		if rep := order(t, s, wire.Scope{Kid: "k1"}, wire.LayerSession); rep.State == wire.StateObserved {
			t.Error("a frozen kid died without a thaw: the test shows nothing")
		}
		s.endLife()
	}
	if rep := order(t, y.sw(5*time.Second), wire.Scope{Kid: "k1"}, wire.LayerSession); rep.State != wire.StateObserved {
		t.Errorf("%+v", rep)
	}
}

// noThaw is this machine's cgroups with the thaw left out.
type noThaw struct{ OSCgroups }

func (noThaw) Thaw(string, string) error { return nil }

func TestStopOfEverythingKillsEveryKid(t *testing.T) {
	y := newYard(t)
	for _, kid := range []string{"k1", "k2", "k3"} {
		y.kid(kid)
		y.run(kid, "tree:5")
	}
	rep := order(t, y.sw(5*time.Second), wire.Scope{All: true})
	if rep.State != wire.StateObserved || len(rep.Kids) != 3 {
		t.Errorf("%+v", rep)
	}
	for kid := range y.docs {
		if n := y.procs(kid); n != 0 {
			t.Errorf("%s: %d left", kid, n)
		}
	}
}

// TestHeldByATracer is S06: a tracer outside the kid holds a killed process in its exit. The other layers
// are done, the report names the process, and the stop completes by itself when the tracer lets go.
func TestHeldByATracer(t *testing.T) {
	y := newYard(t)
	y.kid("k1")
	pid := y.run("k1", "sleep").Process.Pid
	hold, letGo := make(chan error, 1), make(chan struct{})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		runtime.LockOSThread() // a tracer is a thread, not a process
		defer runtime.UnlockOSThread()
		tids, err := seize(pid)
		hold <- err
		<-letGo
		for _, tid := range tids {
			release(tid)
		}
	}()
	if err := <-hold; err != nil {
		t.Fatal(err)
	}
	s := y.sw(300 * time.Millisecond)
	rep := order(t, s, wire.Scope{Kid: "k1"})
	lr := rep.Layers[wire.LayerSession]
	if rep.State != wire.StateContained || !strings.Contains(lr.Detail, fmt.Sprint(pid)) || !strings.Contains(lr.Detail, "in state t") {
		t.Errorf("report %+v", rep)
	}
	for _, l := range []wire.Layer{wire.LayerNetwork, wire.LayerCredential} {
		if rep.Layers[l].State != wire.StateObserved {
			t.Errorf("%s: %+v", l, rep.Layers[l])
		}
	}
	running(t, s)
	close(letGo)
	<-gone
	waitFor(t, "the last process gone", func() bool { some, err := cgroup.Populated(y.docs["k1"].Cgroup); return !some && err == nil })
	waitFor(t, "the late end on record", func() bool {
		for _, r := range y.recorded("stop.completed") {
			if strings.Contains(r.Detail, "the last process is gone") {
				return true
			}
		}
		return false
	})
}

// seize makes the calling thread hold every thread of a process when it exits (ptrace(2)).
func seize(pid int) (tids []int, err error) {
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	for _, task := range tasks {
		tid, err := strconv.Atoi(task.Name())
		if err != nil {
			return tids, err
		}
		const ptraceSeize = 0x4206
		if _, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(tid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0); errno != 0 {
			return tids, fmt.Errorf("seizing thread %d: %w", tid, errno)
		}
		tids = append(tids, tid)
	}
	return tids, nil
}

// release lets a thread go that stands in its exit.
func release(tid int) {
	var ws unix.WaitStatus
	if _, err := unix.Wait4(tid, &ws, unix.WALL, nil); err == nil && ws.Stopped() {
		unix.PtraceDetach(tid) // gone already
	}
}
