package killswitch

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// rig is a box in memory. Its methods fulfil every interface of a Switch; a func field that is set takes a
// method's place. Calls are noted in the order in which they came.
type rig struct {
	t       *testing.T
	mu      sync.Mutex
	calls   []string
	docs    map[string]*session.Session
	bad     map[string]error // documents that cannot be read
	alive   map[string]int   // cgroup directory -> processes; dirs that are missing do not exist
	state   map[uint32]bool  // mark -> stopped
	keptOut map[uint32]bool  // mark -> its secrets are revoked in the kernel
	flag    bool
	passed  map[uint32]Counters
	records []audit.Record
	stored  map[string]wire.Tag
	people  *book
	usedDir string

	kill      func(dir string) error
	thaw      func(v2, freezer string) error
	cut       func(mark uint32) error
	keepOut   func(mark uint32) error
	secrets   func(mark uint32) (bool, time.Duration, error)
	all       func(on bool) error
	count     func(mark uint32) (Counters, error)
	destroy   func(ctx context.Context) (int, error)
	revoke    func(ctx context.Context, r wire.RevokeRequest) (int, error)
	put       func(t wire.Tag) error
	release   func(t wire.Tag) error
	log       func(r audit.Record)
	load      func() Kept
	server    func() (int, error)
	jot       func(t wire.Tag) error
	renew     func(until time.Duration) (int, error)
	procs     []Process
	ids       map[string]uint64 // of cgroups that stand for a session
	ownerless bool              // the kernel knows of none
	reborn    bool              // what KillAndWait killed is there again when it returns
}

const kidsDir, creddDir = "/cg/kids", "/cg/credd"

func newRig(t *testing.T, kids ...string) *rig {
	g := &rig{t: t, docs: map[string]*session.Session{}, bad: map[string]error{}, alive: map[string]int{kidsDir: 0, creddDir: 1},
		state: map[uint32]bool{}, keptOut: map[uint32]bool{}, passed: map[uint32]Counters{}, stored: map[string]wire.Tag{}, ids: map[string]uint64{},
		people: &book{list: testList()}, usedDir: t.TempDir()}
	for i, kid := range kids {
		g.add(kid, "card-"+kid[:1], uint32(0x54100000+i+1)) // small
	}
	return g
}

func (g *rig) add(kid, card string, mark uint32) {
	dir := filepath.Join(kidsDir, kid)
	g.docs[kid] = &session.Session{Version: 1, ID: "s-" + kid, Kid: kid, Card: card, Mark: mark, Cgroup: dir, CgroupID: 1,
		Addr: netip.AddrFrom4([4]byte{198, 19, 0, byte(mark)}), HostAddr: netip.MustParseAddr("198.19.0.2")}
	g.alive[dir], g.ids[dir] = 3, uint64(mark)
	g.state[mark] = false
	g.passed[mark] = Counters{Packets: 10, LastPass: bootTime()}
}

// fast is a timing in which every deadline is short enough for a test to sit out.
var fast = Timing{Note: 10 * time.Second, Credential: 100 * time.Millisecond, CreddDeath: 100 * time.Millisecond, Session: 150 * time.Millisecond,
	Network: 150 * time.Millisecond, Sample: time.Millisecond, Persist: 5 * time.Second,
	Tick: 2 * time.Millisecond, Slow: 4 * time.Millisecond, KernelLease: 5 * time.Second, Renew: 10 * time.Millisecond,
	KidLease: 30 * time.Second, KidLook: 2 * time.Millisecond}

func (g *rig) sw() *Switch { return New(g.config()) }

func (g *rig) config() Config {
	return Config{
		Sessions: g, Cgroups: g, Network: g, Leases: g, Sockets: g, Credentials: g, Tags: tagStore{g}, Authorities: g.people, Used: openUsed(g.t, g.usedDir), Audit: (*recorder)(g), Metrics: noMetrics{},
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), KidsDir: kidsDir, KidsFreezer: "/fz/kids", CreddDir: creddDir,
		Sentinel: filepath.Join(g.t.TempDir(), "STOP"), UID: 1000, GID: 1000, Timing: fast,
	}
}

func (g *rig) note(call string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls = append(g.calls, call)
}

// hook reads a func field that a test may change while the switch runs.
func hook[F any](g *rig, f *F) F {
	g.mu.Lock()
	defer g.mu.Unlock()
	return *f
}

func (g *rig) count1(call string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for _, c := range g.calls {
		if c == call {
			n++
		}
	}
	return n
}

func (g *rig) Get(kid string) (*session.Session, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.bad[kid]; err != nil {
		return nil, err
	}
	if d := g.docs[kid]; d != nil {
		return d, nil
	}
	return nil, fs.ErrNotExist
}

func (g *rig) Load() ([]*session.Session, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []*session.Session
	for kid, d := range g.docs {
		if g.bad[kid] == nil {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b *session.Session) int { return int(a.Mark) - int(b.Mark) })
	return out, nil
}

func (g *rig) Kill(dir string) error {
	g.note("kill " + dir)
	if f := hook(g, &g.kill); f != nil {
		return f(dir)
	}
	return g.reallyKill(dir)
}

// reallyKill empties dir and what is below it.
func (g *rig) reallyKill(dir string) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.alive[dir]; !ok {
		return fs.ErrNotExist
	}
	for d := range g.alive {
		if d == dir || filepath.Dir(d) == dir {
			g.alive[d] = 0
		}
	}
	return nil
}

func (g *rig) KillAndWait(ctx context.Context, dir string) (int, error) {
	g.mu.Lock()
	n, reborn := g.alive[dir], g.reborn
	g.mu.Unlock()
	if err := g.Kill(dir); err != nil {
		return n, err
	}
	err := g.WaitEmpty(ctx, dir)
	if reborn {
		g.mu.Lock()
		g.alive[dir] = n
		g.mu.Unlock()
	}
	return n, err
}

func (g *rig) CanKill(string) error { return nil }

func (g *rig) Thaw(v2, freezer string) error {
	if f := hook(g, &g.thaw); f != nil {
		return f(v2, freezer)
	}
	return nil
}

func (g *rig) Populated(dir string) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for d, k := range g.alive {
		if d == dir || filepath.Dir(d) == dir {
			n += k
		}
	}
	return n > 0, nil
}

func (g *rig) WaitEmpty(ctx context.Context, dir string) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if some, _ := g.Populated(dir); !some { // never fails
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (g *rig) Survivors(dir string) ([]Process, error) {
	if some, _ := g.Populated(dir); !some { // never fails
		return nil, nil
	}
	return hook(g, &g.procs), nil
}

func (g *rig) Children(dir string) ([]string, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []string
	for d := range g.alive {
		if filepath.Dir(d) == dir {
			out = append(out, filepath.Base(d))
		}
	}
	return out, nil
}

func (g *rig) StopSession(mark uint32) error {
	g.note("cut")
	if f := hook(g, &g.cut); f != nil {
		return f(mark)
	}
	return g.reallyCut(mark)
}

func (g *rig) reallyCut(mark uint32) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.state[mark]; ok {
		g.state[mark] = true
	}
	return nil
}

func (g *rig) RevokeSecrets(mark uint32) error {
	g.note("secrets")
	if f := hook(g, &g.keepOut); f != nil {
		return f(mark)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.keptOut[mark] = true
	return nil
}

func (g *rig) Secrets(mark uint32) (bool, time.Duration, error) {
	if f := hook(g, &g.secrets); f != nil {
		return f(mark)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.keptOut[mark], 0, nil
}

func (g *rig) StopAll(on bool) error {
	g.note(map[bool]string{true: "flag on", false: "flag off"}[on])
	if f := hook(g, &g.all); f != nil {
		return f(on)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.flag = on
	return nil
}

func (g *rig) Stopped(mark uint32) (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	on, ok := g.state[mark]
	if !ok {
		return false, fs.ErrNotExist
	}
	return on, nil
}

func (g *rig) AllStopped() (bool, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.flag, nil
}

func (g *rig) Sessions() ([]uint32, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []uint32
	for m := range g.state {
		out = append(out, m)
	}
	return out, nil
}

func (g *rig) Counters(mark uint32) (Counters, error) {
	if f := hook(g, &g.count); f != nil {
		return f(mark)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.passed[mark], nil
}

func (g *rig) Armed() error { return nil }

// ID gives each cgroup that exists its kid's number.
func (g *rig) ID(dir string) (uint64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if _, ok := g.alive[dir]; !ok {
		return 0, fs.ErrNotExist
	}
	return g.ids[dir], nil
}

func (g *rig) Owner(id uint64) (uint32, netip.Addr, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if mark := uint32(id); id != 0 && !g.ownerless { // as add gave them
		return mark, netip.AddrFrom4([4]byte{198, 19, 0, byte(mark)}), nil
	}
	return 0, netip.Addr{}, fs.ErrNotExist
}

func (g *rig) Destroy(ctx context.Context, _ []uint32, _ []netip.Addr) (int, error) {
	g.note("destroy")
	if f := hook(g, &g.destroy); f != nil {
		return f(ctx)
	}
	return 2, nil
}

func (g *rig) Revoke(ctx context.Context, r wire.RevokeRequest) (int, error) {
	g.note("revoke")
	if f := hook(g, &g.revoke); f != nil {
		return f(ctx, r)
	}
	if r.All == (len(r.Marks) > 0) { // as credd itself has it
		return 0, errors.New("name marks, or all, and not both")
	}
	return len(r.Marks), nil
}

func (g *rig) Server(context.Context) (int, error) {
	if f := hook(g, &g.server); f != nil {
		return f()
	}
	return 0, nil
}

func (g *rig) Reachable(context.Context) error { return nil }

// tagStore is the rig's Tags; its Load has another signature than the rig's.
type tagStore struct{ g *rig }

func (s tagStore) Load() Kept {
	if f := hook(s.g, &s.g.load); f != nil {
		return f()
	}
	return Kept{}
}

func (s tagStore) Note(t wire.Tag) error {
	s.g.note("note")
	if f := hook(s.g, &s.g.jot); f != nil {
		return f(t)
	}
	return nil
}

func (s tagStore) Put(t wire.Tag) error {
	s.g.note("put")
	if f := hook(s.g, &s.g.put); f != nil {
		return f(t)
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	s.g.stored[t.Stop] = t
	return nil
}

func (s tagStore) Release(t wire.Tag) error {
	if f := hook(s.g, &s.g.release); f != nil {
		return f(t)
	}
	s.g.mu.Lock()
	defer s.g.mu.Unlock()
	delete(s.g.stored, t.Stop)
	return nil
}

type recorder rig

func (r *recorder) Log(rec audit.Record) {
	if r.log != nil {
		r.log(rec)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, rec)
}

func (g *rig) recorded(event string) []audit.Record {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(g.records), func(r audit.Record) bool { return r.Event != event })
}

type noMetrics struct{}

func (noMetrics) StopBegan(string)                    {}
func (noMetrics) LayerFired(string, time.Duration)    {}
func (noMetrics) LayerObserved(string, time.Duration) {}
func (noMetrics) StopEnded(string)                    {}
func (noMetrics) Enforced(string)                     {}
func (noMetrics) TagsHanging(int)                     {}
func (noMetrics) RecordsLost(uint64)                  {}
func (noMetrics) Tripped(string)                      {}
func (noMetrics) LeasesRenewed(int, bool)             {}
func (noMetrics) KidLease(_, _ time.Duration)         {}
func (noMetrics) KidLeaseExpired(int)                 {}

func waitFor(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute) // generous: a loaded machine is not what is tested
	for !cond() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not seen in a minute: %s", what)
		}
	}
}

// order stops a scope and waits for the report.
func order(t *testing.T, s *Switch, sc wire.Scope, layers ...wire.Layer) wire.StopReport {
	t.Helper()
	h, err := s.Stop(Order{StopRequest: wire.StopRequest{Scope: sc, Layers: layers, By: "ada", Reason: "test"}, Received: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	return report(t, h)
}

func report(t *testing.T, h *Handle) wire.StopReport {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	rep, err := h.Report(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

// running runs the enforcement loop until the test ends.
func running(t *testing.T, s *Switch) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
