package kids

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/fdstore"
	"tagout/internal/instance"
	"tagout/internal/session"
	"tagout/internal/testroot"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/image"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/network"
	"tagout/sandboxd/runtime"
)

// initPath is the kid-init that TestMain built.
var initPath string

func TestMain(m *testing.M) {
	if probe := os.Getenv("TAGOUT_TEST_PROBE"); probe != "" {
		os.Exit(runProbe(probe))
	}
	if os.Getenv("TAGOUT_TEST_SANDBOXD") != "" {
		if os.Getenv("TAGOUT_TEST_SERVANT") != "" {
			os.Exit(runServant())
		}
		os.Exit(runDoomed())
	}
	if os.Getenv("TAGOUT_TEST_ASKED") != "" {
		os.Exit(runAsked())
	}
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	unix.Umask(0o027) // as the daemons have it
	dir, err := os.MkdirTemp("", "tagout-kids-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir) // clean-up
	initPath = filepath.Join(dir, "kid-init")
	cmd := exec.Command("go", "build", "-ldflags=-s -w", "-o", initPath, "tagout/cmd/kid-init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "building kid-init: %v\n%s", err, out)
		return 1
	}
	if err := os.Chmod(initPath, 0o755); err != nil { // every kid runs it
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// guards are all the other daemons and the BPF maps, as a fake that keeps what it was told.
type guards struct {
	mu       sync.Mutex
	calls    []string                   // in order
	policies map[string]map[string]bool // point -> kids
	tokens   map[string]bool            // kids
	entries  map[uint32]Entry
	tags     []wire.Tag
	stopped  map[uint32]bool
	asked    int              // how often somebody wanted to know all that are stopped
	fail     map[string]error // call -> what it answers
}

func newGuards() *guards {
	return &guards{
		policies: map[string]map[string]bool{"proxy": {}, "dnsfilter": {}}, tokens: map[string]bool{},
		entries: map[uint32]Entry{}, stopped: map[uint32]bool{}, fail: map[string]error{},
	}
}

func (g *guards) called(name string) error {
	g.calls = append(g.calls, name)
	return g.fail[name]
}

func (g *guards) Clear(_ context.Context, sc wire.Scope) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("clear"); err != nil {
		return err
	}
	for _, t := range g.tags {
		if t.Scope.All || t.Scope.Kid != "" && t.Scope.Kid == sc.Kid || t.Scope.Card != "" && t.Scope.Card == sc.Card {
			return fmt.Errorf("%w: placed by %s", ErrTagged, t.By)
		}
	}
	return nil
}

func (g *guards) Tags(context.Context) ([]wire.Tag, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.tags), g.fail["tags"]
}

func (g *guards) Mint(_ context.Context, r wire.MintRequest) (wire.MintReply, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("mint"); err != nil {
		return wire.MintReply{}, err
	}
	g.tokens[r.Kid] = true
	reply := wire.MintReply{Tokens: map[string]string{}}
	for _, s := range r.Secrets {
		reply.Tokens[s.Name] = "tgo_" + strings.Repeat("a", 32)
	}
	return reply, nil
}

func (g *guards) Use(_ context.Context, kid string) (*wire.CredentialUse, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.fail["use"]; err != nil || !g.tokens[kid] {
		return nil, err
	}
	return &wire.CredentialUse{Granted: []string{"vendor_api"}, Unused: []string{"vendor_api"}}, nil
}

func (g *guards) Renew(_ context.Context, kid string) (wire.MintReply, error) {
	panic("no card of these tests has JWTs in files, and they are renewed for " + kid)
}

func (g *guards) Forget(_ context.Context, kid string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("forget"); err != nil {
		return err
	}
	delete(g.tokens, kid)
	return nil
}

func (g *guards) Admit(e Entry) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("admit"); err != nil {
		return err
	}
	g.entries[e.Mark] = e
	return nil
}

func (g *guards) SetPorts(mark uint32, ports []uint16) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("ports"); err != nil {
		return err
	}
	e := g.entries[mark]
	e.Ports = ports
	g.entries[mark] = e
	return nil
}

func (g *guards) Withdraw(e Entry) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("withdraw"); err != nil {
		return err
	}
	delete(g.entries, e.Mark)
	return nil
}

func (g *guards) Sweep(keep func(mark uint32) bool) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("sweep"); err != nil {
		return err
	}
	maps.DeleteFunc(g.entries, func(mark uint32, _ Entry) bool { return !keep(mark) })
	return nil
}

func (g *guards) Stop(mark uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.called("stop"); err != nil {
		return err
	}
	g.stopped[mark] = true
	return nil
}

func (g *guards) Stopped(mark uint32) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls = append(g.calls, "stopped")
	return g.stopped[mark], nil
}

func (g *guards) StoppedMarks() (map[uint32]bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked++
	return maps.Clone(g.stopped), nil
}

// pointOf is one enforcement point of the fake.
type pointOf struct {
	g    *guards
	name string
}

func (p pointOf) Name() string { return p.name }

func (p pointOf) Put(_ context.Context, s *session.Session) (wire.Ack, error) {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	if err := p.g.called("put " + p.name); err != nil {
		return wire.Ack{}, err
	}
	p.g.policies[p.name][s.Kid] = true
	return wire.Ack{Kid: s.Kid, Generation: s.Generation}, nil
}

func (p pointOf) Delete(_ context.Context, kid string) error {
	p.g.mu.Lock()
	defer p.g.mu.Unlock()
	if err := p.g.called("delete " + p.name); err != nil {
		return err
	}
	delete(p.g.policies[p.name], kid)
	return nil
}

// set changes what a call answers; nil makes it work again.
func (g *guards) set(call string, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.fail[call] = err
}

func (g *guards) tag(t wire.Tag) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.tags = append(g.tags, t)
}

// left lists what the guards still know.
func (g *guards) left() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []string
	for point, kids := range g.policies {
		for kid := range kids {
			out = append(out, point+" knows "+kid)
		}
	}
	for kid := range g.tokens {
		out = append(out, "credd knows "+kid)
	}
	for mark := range g.entries {
		out = append(out, fmt.Sprintf("the kernel knows mark %#x", mark))
	}
	return out
}

type nullMetrics struct{}

func (nullMetrics) Spawned(string, time.Duration)    {}
func (nullMetrics) SpawnStage(string, time.Duration) {}
func (nullMetrics) SpawnStep(string, time.Duration)  {}
func (nullMetrics) Destroyed(string)                 {}
func (nullMetrics) OutOfMemory()                     {}
func (nullMetrics) ExecEnded(string, time.Duration)  {}
func (nullMetrics) Kids(int)                         {}

// records is an audit log in memory.
type records struct {
	mu  sync.Mutex
	all []audit.Record
	err error // what Err says
}

func (r *records) Err() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

func (r *records) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
}

// count returns how many records have the event and the outcome.
func (r *records) count(event, outcome string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, rec := range r.all {
		if rec.Event == event && rec.Outcome == outcome {
			n++
		}
	}
	return n
}

// box is an instance of its own with a manager and fakes around it.
type box struct {
	*Manager
	t      *testing.T
	inst   instance.Instance
	layout cgroup.Layout
	guards *guards
	audit  *records
}

func newBox(t *testing.T, name string) *box {
	t.Helper()
	testroot.Require(t)
	const suffix = 3 // so that two runs at once do not meet
	inst, err := instance.Claim(name[:min(len(name), 12-suffix)] + strings.ToLower(rand.Text())[:suffix])
	if err != nil {
		t.Fatal(err)
	}
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	b := &box{t: t, inst: inst, layout: layout, guards: newGuards(), audit: &records{}}
	t.Cleanup(b.sweep)
	old := unix.Umask(0o022) // as `tagout setup`, which does this in real life
	err = errors.Join(layout.Create(inst.KidsCgroupRel()), os.MkdirAll(inst.RunDir(), 0o755), os.Chmod(inst.RunDir(), 0o755))
	unix.Umask(old)
	if err != nil {
		t.Fatal(err)
	}
	b.Manager = makeManager(t, inst, layout, initPath, b.guards, b.audit)
	return b
}

// makeManager is all that a real sandboxd makes, with fakes for the other daemons.
func makeManager(t testing.TB, inst instance.Instance, layout cgroup.Layout, init string, g *guards, rec Recorder) *Manager {
	m, err := tryManager(inst, layout, init, g, rec)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func tryManager(inst instance.Instance, layout cgroup.Layout, init string, g *guards, rec Recorder) (*Manager, error) {
	ca := filepath.Join(inst.CADir(), "ca.pem")
	err := errors.Join(os.MkdirAll(inst.CADir(), 0o755),
		os.WriteFile(ca, []byte("-----BEGIN CERTIFICATE-----\ninspection\n-----END CERTIFICATE-----\n"), 0o600))
	if err != nil {
		return nil, err
	}
	host, err := image.NewHost(image.Config{Dir: filepath.Join(inst.RunDir(), "image"), Gateway: inst.Gateway(), Trust: image.Trust(ca)})
	if err != nil {
		return nil, err
	}
	runc, err := runtime.NewRunc(inst.RuncRoot())
	if err != nil {
		return nil, err
	}
	images, err := store.Open(inst.ImageDir(), filepath.Dir(inst.KidDir("x")))
	if err != nil {
		return nil, err
	}
	stored, unmapped := image.NewStored(context.Background(), host, images, inst.ImageDir())
	if unmapped != nil {
		return nil, unmapped
	}
	if err := layout.Create(inst.StoreCgroupRel()); err != nil {
		return nil, err
	}
	kept := fdstore.NewClient(fdstore.Config{
		Socket: inst.StoreSocket(), Program: []string{init, "store"},
		Place: func(pid int) error { return cgroup.Join(layout.V2(inst.StoreCgroupRel()), pid) },
	})
	return New(Config{
		Kept: kept,
		Inst: inst, Init: init, Runtime: runc, Images: map[string]Image{image.HostName: host},
		Writable: func(_, userns string, uid int, size int64) (Image, error) {
			return host.WritableFor(userns, uid, size), nil
		},
		Stored: func(name, userns string) (Image, error) { return stored.Get(name, userns) }, Cgroups: layout, Kernel: g, Stopper: g,
		Points: []PolicyPoint{pointOf{g, "proxy"}, pointOf{g, "dnsfilter"}}, Credentials: g, Audit: rec, Metrics: nullMetrics{},
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
}

// succeed puts another manager into the place of the box's, as a sandboxd that starts does.
func (b *box) succeed() {
	b.t.Helper()
	watch := b.cfg.SocketWatch
	b.Manager = makeManager(b.t, b.inst, b.layout, initPath, b.guards, b.audit)
	b.cfg.SocketWatch = watch
	if err := b.Recover(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// sweep removes whatever the test left, so that a failing test does not fail others.
func (b *box) sweep() {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if b.Manager != nil {
		b.guards.mu.Lock()
		clear(b.guards.fail)
		b.guards.mu.Unlock()
		for _, k := range b.List(ctx) {
			if err := b.Destroy(ctx, k.Name, "test", "end of the test"); err != nil {
				b.t.Error(err)
			}
		}
	}
	cgroup.Kill(b.layout.V2(b.inst.KidsCgroupRel())) // nothing should be there any more
	cgroup.Kill(b.layout.V2(b.inst.StoreCgroupRel()))
	if err := b.layout.Remove(ctx, b.inst.CgroupRel()); err != nil {
		b.t.Error(err)
	}
	for _, point := range b.mounts() {
		unix.Unmount(point, unix.MNT_DETACH) // as above
	}
	links, _ := network.Links(b.inst.LinkPrefix()) // as above
	for _, l := range links {
		network.Disconnect(l) // as above
	}
	if err := errors.Join(os.RemoveAll(b.inst.RunDir()), os.RemoveAll(b.inst.StateDir()), b.inst.Release()); err != nil {
		b.t.Error(err)
	}
}

func plan() Plan {
	return Plan{
		Card: "practice", CardHash: "00", Image: image.HostName, Ports: []uint16{443},
		Workspace: 32 << 20, Tmp: 4 << 20, Secrets: []session.Secret{{Name: "api_key", Env: "API_KEY"}},
		Env:    map[string]string{"GREETING": "hello"},
		Limits: runtime.Limits{PIDs: 64, Memory: 256 << 20, CPUs: 1, OpenFiles: 256},
		Stop:   session.Stop{Authority: "ada", MaxTime: time.Second},
	}
}

func (b *box) spawn(name string, p Plan) wire.Kid {
	b.t.Helper()
	k, err := b.Spawn(b.t.Context(), Request{Name: name, Purpose: "test", Actor: "test", Plan: p})
	if err != nil {
		b.t.Fatal(err)
	}
	return k
}

// result is what an exec sent.
type result struct {
	stdout, stderr bytes.Buffer
	exit           wire.ExecExit
}

func (b *box) exec(kid string, r wire.ExecRequest) *result {
	b.t.Helper()
	out, err := runExec(b.t.Context(), b.Manager, kid, r)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

func runExec(ctx context.Context, m *Manager, kid string, r wire.ExecRequest) (*result, error) {
	out, exits := &result{}, 0
	err := m.Exec(ctx, kid, "test", r, func(f wire.ExecFrame) error {
		out.stdout.Write(f.Stdout)
		out.stderr.Write(f.Stderr)
		if f.Exit != nil {
			out.exit = *f.Exit
			exits++
		}
		return nil
	})
	if err == nil && exits != 1 {
		return nil, fmt.Errorf("%d exit frames, want 1", exits)
	}
	return out, err
}

func (b *box) sh(kid, script string) *result {
	b.t.Helper()
	return b.exec(kid, wire.ExecRequest{Argv: []string{"/bin/sh", "-c", script}})
}

// leftovers lists every trace of kids on this machine and at the guards.
func (b *box) leftovers() []string {
	b.t.Helper()
	out := b.guards.left()
	links, err := network.Links(b.inst.LinkPrefix())
	if err != nil {
		b.t.Fatal(err)
	}
	for _, l := range links {
		out = append(out, "link "+l)
	}
	dirs := []string{filepath.Dir(b.inst.KidDir("x")), b.inst.NetNSDir(), b.inst.SessionDir(), b.inst.RuncRoot(), b.layout.V2(b.inst.KidsCgroupRel())}
	for _, c := range []string{"memory", "pids", "cpu", "cpuset", "devices", "freezer", "systemd"} {
		dirs = append(dirs, filepath.Join("/sys/fs/cgroup", c, b.inst.KidsCgroupRel()))
	}
	for _, dir := range dirs {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			b.t.Fatal(err)
		}
		for _, e := range entries {
			if strings.HasPrefix(dir, "/sys/fs/cgroup") && !e.IsDir() {
				continue
			}
			out = append(out, filepath.Join(dir, e.Name()))
		}
	}
	for _, m := range b.mounts() {
		out = append(out, "mount "+m)
	}
	return out
}

// mounts returns the mount points below the instance's directory.
func (b *box) mounts() []string {
	raw, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		b.t.Fatal(err)
	}
	var out []string
	for line := range strings.Lines(string(raw)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], b.inst.RunDir()+"/") {
			out = append(out, fields[4])
		}
	}
	return out
}

func (b *box) wantNothingLeft() {
	b.t.Helper()
	for _, l := range b.leftovers() {
		b.t.Errorf("left behind: %s", l)
	}
	if b.t.Failed() {
		b.t.FailNow()
	}
}

// eventually waits until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; {
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited 10 s for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// probeInput puts this test binary into the workspace as /workspace/probe.
func probeInput(t testing.TB) files.Input {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return files.Input{Dir: filepath.Dir(self), From: filepath.Base(self), To: "probe", Mode: 0o755}
}

// steps returns all steps of a spawn.
func (b *box) steps() (all []step) {
	for _, part := range b.course() {
		for _, lane := range part {
			all = append(all, lane...)
		}
	}
	return all
}
