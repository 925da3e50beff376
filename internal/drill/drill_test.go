package drill_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

const fakeToken = "tgo_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"

// fakeBox is a box whose kids are five sleepers in a real cgroup and an agent of goroutines that talks to the
// practice internet. stop is what a stop does; nil does nothing.
type fakeBox struct {
	t      *testing.T
	net    *practice.Internet
	layout cgroup.Layout
	inst   instance.Instance
	stop   func(b *fakeBox, kid string, layer wire.Layer)
	idle   atomic.Bool // the agent does nothing

	cut, revoked atomic.Bool  // the network, the token
	sent, used   atomic.Int64 // when the agent last ticked, and used the token; Unix nanoseconds
	mu           sync.Mutex
	sleepers     []*exec.Cmd
	released     []string
}

func (b *fakeBox) rel(kid string) string { return b.inst.KidsCgroupRel() + "/" + kid }

func (b *fakeBox) Spawn(_ context.Context, req wire.SpawnRequest) (wire.Kid, error) {
	b.cut.Store(false)
	b.revoked.Store(false)
	dir := b.layout.V2(b.rel(req.Name))
	if err := b.layout.Create(b.rel(req.Name)); err != nil {
		return wire.Kid{}, err
	}
	for range 5 {
		cmd := exec.Command("sleep", "1000")
		if err := cmd.Start(); err != nil {
			return wire.Kid{}, err
		}
		b.mu.Lock()
		b.sleepers = append(b.sleepers, cmd)
		b.mu.Unlock()
		if err := cgroup.Join(dir, cmd.Process.Pid); err != nil {
			return wire.Kid{}, err
		}
		go cmd.Wait() // killed
	}
	return wire.Kid{Name: req.Name, Cgroup: dir}, nil
}

func (b *fakeBox) Destroy(ctx context.Context, kid, _ string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.sleepers {
		s.Process.Kill() // may be dead already
	}
	b.sleepers = nil
	return b.layout.Remove(ctx, b.rel(kid))
}

func (b *fakeBox) Exec(ctx context.Context, kid string, _ wire.ExecRequest, _ func(wire.ExecFrame)) error {
	if b.idle.Load() {
		<-ctx.Done()
		return nil
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		b.talk(ctx, "ticks "+kid+" "+fakeToken+"\n", func(n int) string {
			b.sent.Store(time.Now().UnixNano())
			return fmt.Sprintf("%d 3\n", n)
		})
	})
	wg.Go(func() {
		b.talk(ctx, "bulk "+kid+"\n", func(int) string { return strings.Repeat("x", 100_000) })
	})
	c := b.net
	tr := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return c.Dial(ctx, network, netip.AddrPortFrom(c.APIAddr(), 443).String())
		},
		TLSClientConfig: &tls.Config{RootCAs: c.Roots(), MinVersion: tls.VersionTLS12},
	}
	defer tr.CloseIdleConnections()
	every(ctx, func(int) bool {
		credential := c.Secret()
		if b.revoked.Load() {
			credential = fakeToken
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+practice.NameAPI+"/v1/whoami", http.NoBody)
		if err != nil {
			b.t.Error(err)
			return false
		}
		req.Header.Set("Authorization", "Bearer "+credential)
		req.Header.Set(practice.HeaderPresenter, "agent:"+kid)
		if b.cut.Load() {
			return true
		}
		if resp, err := tr.RoundTrip(req); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK && !b.revoked.Load() {
				b.used.Store(time.Now().UnixNano())
			}
		}
		return true
	})
	return nil
}

// talk sends to the sink while the network is not cut.
func (b *fakeBox) talk(ctx context.Context, hello string, next func(int) string) {
	conn, err := b.net.Dial(ctx, "tcp", netip.AddrPortFrom(b.net.TicksAddr(), practice.PortTicks).String())
	if err != nil {
		return
	}
	defer conn.Close()
	fmt.Fprint(conn, hello)
	every(ctx, func(n int) bool {
		if b.cut.Load() {
			return true
		}
		_, err := fmt.Fprint(conn, next(n))
		return err == nil
	})
}

func every(ctx context.Context, fn func(n int) bool) {
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
			if !fn(n) {
				return
			}
		}
	}
}

func (b *fakeBox) Stop(_ context.Context, req wire.StopRequest, _ func(wire.StopEvent)) (*wire.StopReport, error) {
	if b.stop != nil {
		for _, l := range req.Layers {
			b.stop(b, req.Scope.Kid, l)
		}
	}
	return &wire.StopReport{Stop: "stop-of-" + req.Scope.Kid, State: wire.StateObserved}, nil
}

func (b *fakeBox) Release(_ context.Context, req wire.ReleaseRequest) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.released = append(b.released, req.Stop)
	return nil
}

// obedient stops as it is told.
func obedient(b *fakeBox, kid string, layer wire.Layer) {
	switch layer {
	case wire.LayerSession:
		if err := cgroup.Kill(b.layout.V2(b.rel(kid))); err != nil {
			b.t.Error(err)
		}
	case wire.LayerNetwork:
		b.cut.Store(true)
	case wire.LayerCredential:
		b.revoked.Store(true)
	}
}

// late stops as it is told once the agent has been at work for 150 ms more: on a busy machine its deeds are far apart.
func late(b *fakeBox, kid string, layer wire.Layer) {
	seen := map[wire.Layer]*atomic.Int64{wire.LayerNetwork: &b.sent, wire.LayerCredential: &b.used}[layer]
	want := time.Now().Add(150 * time.Millisecond).UnixNano()
	for end := time.Now().Add(10 * time.Second); seen.Load() < want && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	obedient(b, kid, layer)
}

func newFake(t *testing.T, name string) (*fakeBox, drill.Config) {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	b := &fakeBox{t: t, inst: inst, layout: layout}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err := errors.Join(b.net.Close(), layout.Remove(ctx, inst.CgroupRel()), os.RemoveAll(inst.RunDir()), inst.Release())
		if err != nil {
			t.Error(err)
		}
	})
	socket := filepath.Join(t.TempDir(), "credd.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	credd := &http.Server{ReadHeaderTimeout: time.Second, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		json.NewEncoder(w).Encode(wire.Introspection{Active: r.FormValue("token") == fakeToken && !b.revoked.Load()}) // test
	})}
	go credd.Serve(l) // ends with Close
	t.Cleanup(func() { credd.Close() })
	b.net, err = practice.Start(t.Context(), practice.Options{Instance: inst, CreddSocket: socket})
	if err != nil {
		t.Fatal(err)
	}
	card, err := os.ReadFile("../../deploy/cards/drill.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return b, drill.Config{
		Inst: inst, Internet: b.net, Card: card, CardFile: "drill.yaml", Box: b, Processes: 5, ReadyWithin: 10 * time.Second,
	}
}

func TestStopsThatWorkPass(t *testing.T) {
	b, cfg := newFake(t, "tdrpass")
	b.stop = obedient
	var out bytes.Buffer
	cfg.Out, cfg.Path = &out, filepath.Join(t.TempDir(), "drill.json")
	rep, err := drill.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if !rep.Passed || len(rep.Results) != 4 || len(rep.Results[3].Layers) != 3 {
		t.Errorf("want four passing cases, the last of three layers:\n%s", out.String())
	}
	for _, r := range rep.Results {
		alone := len(r.Layers) == 1
		if alone && r.Layers[0].Layer != wire.LayerSession && r.After.Processes != 5 {
			t.Errorf("%s: %d processes afterwards, want all 5", r.Case, r.After.Processes)
		}
		if alone && r.Layers[0].Layer != wire.LayerCredential && r.After.ReplayAge > 300*time.Millisecond {
			t.Errorf("%s: last replay %v ago, want the token still accepted", r.Case, r.After.ReplayAge)
		}
	}
	if len(b.released) != 4 {
		t.Errorf("released %v, want the drill's four tags", b.released)
	}
	raw, err := os.ReadFile(cfg.Path)
	if err != nil {
		t.Fatal(err)
	}
	var back struct {
		Passed    bool
		Summaries []drill.Summary
	}
	if err := json.Unmarshal(raw, &back); err != nil || !back.Passed || len(back.Summaries) != 6 {
		t.Errorf("JSON report: %v, %+v", err, back)
	}
	t.Log("\n" + out.String())
}

// TestStopsThatDoNothingFail is the same drill with the protection off.
func TestStopsThatDoNothingFail(t *testing.T) {
	_, cfg := newFake(t, "tdrfail")
	cfg.Cases = drill.Cases()[3:]
	rep, err := drill.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Passed {
		t.Error("a stop that does nothing passed")
	}
	for _, l := range rep.Results[0].Layers {
		if l.Verdict != drill.Fail || l.Stopped {
			t.Errorf("%s: %+v, want FAIL and not stopped", l.Layer, l)
		}
	}
}

func TestLateStopsFail(t *testing.T) {
	b, cfg := newFake(t, "tdrlate")
	b.stop = func(b *fakeBox, kid string, l wire.Layer) { go late(b, kid, l) }
	cfg.Cases = drill.Cases()[1:3]
	rep, err := drill.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rep.Results {
		if l := r.Layers[0]; l.Verdict != drill.Fail || !l.Stopped || l.Observed < 100*time.Millisecond {
			t.Errorf("%s: %+v, want FAIL after about 150 ms", r.Case, l)
		}
	}
}

func TestAnIdleAgentProvesNothing(t *testing.T) {
	b, cfg := newFake(t, "tdrvoid")
	b.stop = obedient
	b.idle.Store(true)
	cfg.Cases, cfg.ReadyWithin = drill.Cases()[3:], 100*time.Millisecond
	rep, err := drill.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if rep.Passed || rep.Results[0].Layers[0].Verdict != drill.Void || !strings.Contains(rep.Results[0].Void, "ticks") {
		t.Errorf("%+v, want VOID and what was missing", rep.Results[0])
	}
}

// TestADrillThatCannotFailIsVoid: where a layer falls that nobody ordered, the observers prove nothing.
func TestADrillThatCannotFailIsVoid(t *testing.T) {
	b, cfg := newFake(t, "tdrctl")
	cfg.Cases, cfg.Controls = []drill.Case{drill.Together()}, true
	for _, all := range []bool{false, true} {
		b.stop = obedient
		if all {
			b.stop = func(b *fakeBox, kid string, _ wire.Layer) {
				for _, l := range wire.AllLayers() {
					obedient(b, kid, l)
				}
			}
		}
		cfg.Prefix = fmt.Sprintf("ctl%t", all)
		rep, err := drill.Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		want := drill.Pass
		if all {
			want = drill.Void
		}
		if len(rep.Results) != 4 || rep.Verdict != want {
			t.Errorf("all layers fall together: %t: %s %s, want %s", all, rep.Verdict, rep.Why, want)
		}
	}
}
