package supervise

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testroot"
)

// groups fulfils Cgroups with the real hierarchy.
type groups struct{ cgroup.Layout }

func (groups) Kill(dir string) error                           { return cgroup.Kill(dir) }
func (groups) WaitEmpty(ctx context.Context, dir string) error { return cgroup.WaitEmpty(ctx, dir) }

type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

// box is an instance with a directory tree, cgroups and fake daemons a, b, c.
type box struct {
	t     *testing.T
	cfg   Config
	log   *logBuffer
	order string // file in which the fakes note their clean ends
}

func newBox(t *testing.T, name string, slot int, how map[string]string) *box {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.New(name, slot)
	if err != nil {
		t.Fatal(err)
	}
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	for _, dir := range []string{filepath.Join(inst.RunDir(), "pid"), filepath.Join(inst.RunDir(), "log"), inst.StateDir()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		os.RemoveAll(inst.RunDir())
		os.RemoveAll(inst.StateDir())
	})
	b := &box{t: t, log: &logBuffer{}, order: filepath.Join(inst.RunDir(), "order")}
	if err := os.WriteFile(b.order, nil, 0o666); err != nil {
		t.Fatal(err)
	}
	os.Chmod(b.order, 0o666)
	if err := layout.Create(inst.CgroupRel()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		cgroup.Kill(layout.V2(inst.CgroupRel()))
		if err := layout.Remove(ctx, inst.CgroupRel()); err != nil {
			t.Error(err)
		}
	})
	b.cfg = Config{Inst: inst, Log: slog.New(slog.NewTextHandler(b.log, nil)), Cgroups: groups{layout}, Start: 10 * time.Second, Grace: 2 * time.Second}
	for i, d := range []string{"a", "b", "c"} {
		rel := inst.CgroupRel() + "/" + d
		if err := layout.Create(rel); err != nil {
			t.Fatal(err)
		}
		dir := filepath.Join(inst.RunDir(), "sock", d)
		uid := inst.GroupID() + 1 + i
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(dir, uid, inst.GroupID()); err != nil {
			t.Fatal(err)
		}
		bin := filepath.Join(tmp, d) // mode 0700 on the way: the daemon's user cannot reach it
		if err := os.Symlink("/proc/self/exe", filepath.Join(tmp, "self")); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
		if err := copyBinary(os.Args[0], bin); err != nil {
			t.Fatal(err)
		}
		mode := how[d]
		if mode == "" {
			mode = "good"
		}
		b.cfg.Specs = append(b.cfg.Specs, Spec{
			Name: d, Path: bin, UID: uid, GID: inst.GroupID(), Caps: []uintptr{unix.CAP_NET_RAW},
			Env:    []string{"TAGOUT_FAKE=" + mode, "TAGOUT_FAKE_DIR=" + dir, "TAGOUT_FAKE_ORDER=" + b.order, "TAGOUT_FAKE_NAME=" + d},
			Cgroup: layout.V2(rel), Socket: filepath.Join(dir, "http.sock"),
			LogFile: filepath.Join(inst.RunDir(), "log", d+".log"), PidFile: inst.PidFile(d),
		})
	}
	return b
}

// up starts Up and waits until it is ready; stop ends it.
func (b *box) up() (stop func() error) {
	b.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ready, ended := make(chan struct{}), make(chan error, 1)
	b.cfg.Ready = func() { close(ready) }
	cfg := b.cfg
	go func() { ended <- Up(ctx, cfg) }()
	select {
	case <-ready:
	case err := <-ended:
		cancel()
		b.t.Fatalf("Up ended before it was ready: %v", err)
	}
	stop = sync.OnceValue(func() error {
		cancel()
		return <-ended
	})
	b.t.Cleanup(func() { stop() })
	return stop
}

func (b *box) pid(name string) int {
	raw, err := os.ReadFile(b.cfg.Inst.PidFile(name))
	if err != nil {
		return 0
	}
	pid, _ := strconv.Atoi(strings.TrimSpace(string(raw)))
	return pid
}

func (b *box) procs(i int) int {
	b.t.Helper()
	pids, err := cgroup.Procs(b.cfg.Specs[i].Cgroup)
	if err != nil {
		b.t.Fatal(err)
	}
	return len(pids)
}

// eventually waits for cond, which becomes true without anybody's help.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func TestUpRunsEachAsItsOwnUser(t *testing.T) {
	b := newBox(t, "tsup1", 9, nil)
	stop := b.up()
	for i, s := range b.cfg.Specs {
		raw, err := os.ReadFile(filepath.Join(filepath.Dir(s.Socket), "status"))
		if err != nil {
			t.Fatal(err)
		}
		status := string(raw)
		for _, want := range []string{
			fmt.Sprintf("Uid:\t%d\t%d\t%d\t%d\n", s.UID, s.UID, s.UID, s.UID),
			fmt.Sprintf("Gid:\t%d\t%d\t%d\t%d\n", s.GID, s.GID, s.GID, s.GID),
			"Groups:\t \n",
			fmt.Sprintf("CapEff:\t%016x\n", 1<<unix.CAP_NET_RAW),
		} {
			if !strings.Contains(status, want) {
				t.Errorf("%s: status has no %q:\n%s", s.Name, want, status)
			}
		}
		if n := b.procs(i); n != 1 {
			t.Errorf("%s: %d processes in its cgroup, want 1", s.Name, n)
		}
		if _, err := os.Stat("/proc/" + strconv.Itoa(b.pid(s.Name))); err != nil {
			t.Errorf("%s: its pid file names no process: %v", s.Name, err)
		}
	}
	if err := stop(); err != nil {
		t.Errorf("Up = %v, want nil after its context ended", err)
	}
	order, _ := os.ReadFile(b.order)
	if got := strings.Join(strings.Fields(string(order)), " "); got != "c b a" {
		t.Errorf("they ended in the order %q, want the reverse of the start", got)
	}
	for i, s := range b.cfg.Specs {
		if b.procs(i) != 0 || b.pid(s.Name) != 0 {
			t.Errorf("%s: something is left of it", s.Name)
		}
	}
}

func TestDeadDaemonIsStartedAgain(t *testing.T) {
	b := newBox(t, "tsup2", 9, map[string]string{"b": "helper"})
	b.up()
	for range 3 {
		old := b.pid("b")
		helperAndDaemon := b.procs(1)
		if helperAndDaemon != 2 {
			t.Fatalf("%d processes in b's cgroup, want the daemon and its helper", helperAndDaemon)
		}
		begun := time.Now()
		if err := unix.Kill(old, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		eventually(t, "b runs again, with a helper of its own", func() bool { return b.pid("b") != old && b.procs(1) == 2 })
		t.Logf("back after %s", time.Since(begun))
	}
	if !strings.Contains(b.log.String(), "daemon died") {
		t.Errorf("nothing in the log:\n%s", b.log.String())
	}
}

func TestStubbornDaemonIsKilled(t *testing.T) {
	b := newBox(t, "tsup3", 9, map[string]string{"c": "stubborn"})
	b.cfg.Grace = 100 * time.Millisecond
	if err := b.up()(); err != nil {
		t.Error(err)
	}
	if n := b.procs(2); n != 0 {
		t.Errorf("%d processes left of a daemon that ignores SIGTERM", n)
	}
}

func TestUpTakesOver(t *testing.T) {
	b := newBox(t, "tsup4", 9, map[string]string{"a": "stubborn"})
	// What a supervisor that was killed leaves: a daemon in its cgroup, with its socket and pid file.
	k := &keeper{cfg: withDefaults(b.cfg), spec: b.cfg.Specs[0]}
	k.spec.Path = os.Args[0]
	k.spec.UID = 0
	stale, err := k.start(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := k.waitHealthy(context.Background(), stale); err != nil {
		t.Fatal(err)
	}
	os.Chown(k.spec.Socket, b.cfg.Specs[0].UID, -1)
	os.Remove(filepath.Join(filepath.Dir(k.spec.Socket), "status"))
	b.up()
	select {
	case <-stale.exited:
	default:
		t.Error("the stale daemon still runs")
	}
	if n := b.procs(0); n != 1 {
		t.Errorf("%d processes in a's cgroup, want the new daemon alone", n)
	}
}

func TestUpTwice(t *testing.T) {
	b := newBox(t, "tsup5", 9, nil)
	b.up()
	second := b.cfg
	second.Ready = nil
	err := Up(context.Background(), second)
	if err == nil || !strings.Contains(err.Error(), "already up") {
		t.Errorf("a second Up = %v, want a refusal", err)
	}
	if b.pid("a") == 0 || b.procs(0) != 1 {
		t.Error("the second Up disturbed the first")
	}
}

func TestUpSaysWhy(t *testing.T) {
	tests := []struct{ name, how, want string }{
		{"port in use", "port", "starting b: starting: binding 198.19.0.1:53: address already in use (log: "},
		{"crash", "crash", "starting b: panic: something broke (log: "},
		{"never healthy", "sick", "starting b: it is not healthy after 500ms: "},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := newBox(t, "tsup6", 9, map[string]string{"b": tt.how})
			if tt.how == "sick" {
				b.cfg.Start = 500 * time.Millisecond
				b.cfg.Specs = b.cfg.Specs[1:]
			}
			err := Up(context.Background(), b.cfg)
			if err == nil || !strings.HasPrefix(err.Error(), tt.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("Up = %v, want %s…", err, tt.want)
			}
			for i := range b.cfg.Specs {
				if n := b.procs(i); n != 0 {
					t.Errorf("%d processes left of %s", n, b.cfg.Specs[i].Name)
				}
			}
		})
	}
}

func TestMissingBinaryStartsNothing(t *testing.T) {
	b := newBox(t, "tsup7", 9, nil)
	os.Remove(b.cfg.Specs[2].Path)
	err := Up(context.Background(), b.cfg)
	if err == nil || !strings.Contains(err.Error(), b.cfg.Specs[2].Path+" is missing: build it with") {
		t.Errorf("Up = %v", err)
	}
	if b.pid("a") != 0 {
		t.Error("the first daemon was started")
	}
}

func TestUpWithoutSetup(t *testing.T) {
	testroot.Require(t)
	inst, err := instance.New("tsup8", 9)
	if err != nil {
		t.Fatal(err)
	}
	err = Up(context.Background(), Config{Inst: inst, Specs: []Spec{}, Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "run `tagout setup --instance tsup8` first") {
		t.Errorf("Up = %v", err)
	}
}

// TestFavouredDaemons: every thread of a daemon has its priority, and a neighbour without one has none.
func TestFavouredDaemons(t *testing.T) {
	b := newBox(t, "tsupn", 9, nil)
	b.cfg.Specs[0].Nice = -20
	b.up()
	own, err := unix.Getpriority(unix.PRIO_PROCESS, 0) // 20 less it, see below
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]struct{ thread, group int }{"a": {-20, -20}, "b": {20 - own, 0}} {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", b.pid(name)))
		if err != nil || len(tasks) < 2 {
			t.Fatalf("threads %v, %v", tasks, err)
		}
		for _, task := range tasks {
			tid, err := strconv.Atoi(filepath.Base(task))
			if err != nil {
				t.Fatal(err)
			}
			// The system call returns 20 less the nice value (getpriority(2), C library/kernel differences).
			if got, err := unix.Getpriority(unix.PRIO_PROCESS, tid); err != nil || 20-got != want.thread {
				t.Errorf("thread %d of %s: nice %d, %v, want %d", tid, name, 20-got, err, want.thread)
			}
		}
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/autogroup", b.pid(name)))
		if err == nil && !strings.HasSuffix(strings.TrimSpace(string(raw)), fmt.Sprintf("nice %d", want.group)) {
			t.Errorf("autogroup of %s: %s", name, raw)
		}
	}
}

// TestAStopDoesNotQueueBehindKids: the two daemons that a stop waits for come before everything else.
func TestAStopDoesNotQueueBehindKids(t *testing.T) {
	inst, err := instance.New("tsupo", 9)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range DefaultSpecs(inst, "/bin", groups{}) {
		if first := s.Name == instance.Killswitchd || s.Name == instance.Credd; first != (s.Nice < 0) {
			t.Errorf("%s has nice %d", s.Name, s.Nice)
		}
	}
}
