package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/bpf"
	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestProofAtStart: as soon as a box is up each layer has been fired for real, and the lamps say so. What it took is
// gone, is nobody's kid, and nobody was alerted.
func TestProofAtStart(t *testing.T) {
	t.Parallel()
	box := start(t)
	st := box.Lamps()
	for _, l := range wire.AllLayers() {
		ls := st.Layers[l]
		if ls.State != wire.LampArmed || ls.Proof == nil || !ls.Proof.Passed || ls.Proof.Fired <= 0 || ls.Proof.Observed < ls.Proof.Fired {
			t.Errorf("%s: %+v, proof %+v", l, ls, ls.Proof)
			continue
		}
		t.Logf("%-10s fired %v, observed %v", l, ls.Proof.Fired, ls.Proof.Observed)
	}
	if text := box.Must("status"); strings.Count(text, "ARMED, proven ") != 3 || !strings.Contains(text, "0 kids, 0 tags") {
		t.Error(text)
	}
	if st.Every != wire.DefaultProofEvery || len(st.Tags) != 0 {
		t.Errorf("status %+v", st)
	}
	noProofLeft(t, box)
	if out := box.Must("list", "--all", "--json"); strings.TrimSpace(out) != "[]" {
		t.Errorf("kids: %s", out)
	}
	proof := box.WaitRecord("a proof", func(r *audit.Record) bool { return r.Event == audit.EventProofPassed })
	for _, l := range wire.AllLayers() {
		if !strings.HasPrefix(proof.Fields[string(l)], "fired ") {
			t.Errorf("record %+v", proof)
		}
	}
	dropped := box.WaitRecord("dropped packets", func(r *audit.Record) bool { return r.Event == audit.EventConnectDenied && r.Kid == proof.Kid })
	if dropped.Outcome != audit.OutcomeOK {
		t.Errorf("what a proof drops counts as an attempt: %+v", dropped)
	}
	if recs := box.Records(func(r *audit.Record) bool {
		return r.Outcome == audit.OutcomeDeny || strings.HasPrefix(r.Event, "stop.")
	}); len(recs) != 0 {
		t.Errorf("a proof is recorded as something else: %+v", recs)
	}
	metrics := metricsOf(t, box, instance.Killswitchd)
	for _, l := range wire.AllLayers() {
		if want := fmt.Sprintf("tagout_killswitch_armed{layer=%q} 1\n", l); !strings.Contains(metrics, want) {
			t.Errorf("no %s", want)
		}
		if want := fmt.Sprintf("tagout_killswitch_proof_age_seconds{layer=%q} ", l); !strings.Contains(metrics, want) {
			t.Errorf("no %s", want)
		}
	}
	if !strings.Contains(metrics, "tagout_killswitch_proof_period_seconds 600\n") || strings.Contains(metrics, "tagout_stop_begun_total{") {
		t.Error(metrics)
	}
	if alerts, n := box.Net.Webhook.Alerts(); n != 0 {
		t.Errorf("alerts: %+v", alerts)
	}
}

// TestProofsStaySmall: killswitchd keeps within its 25 MB however many proofs it makes.
func TestProofsStaySmall(t *testing.T) {
	t.Parallel()
	box := start(t)
	for range 10 {
		proves(t, box)
	}
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}
	pids, err := cgroup.Procs(layout.V2(box.Inst.DaemonCgroupRel(instance.Killswitchd)))
	if err != nil || len(pids) != 1 {
		t.Fatalf("killswitchd is %v, %v", pids, err)
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pids[0]))
	if err != nil {
		t.Fatal(err)
	}
	var kb int
	_, rest, _ := strings.Cut(string(raw), "VmRSS:")
	if _, err := fmt.Sscan(rest, &kb); err != nil {
		t.Fatal(err)
	}
	t.Logf("resident after 11 proofs: %d kB", kb)
	if kb > 25<<10 {
		t.Errorf("resident memory is %d kB, more than 25 MB", kb)
	}
}

// noProofLeft fails the test where anything of a proof's kid is left, in the kernel neither.
func noProofLeft(t *testing.T, box *testenv.Box) {
	t.Helper()
	for _, pattern := range []string{box.Inst.KidDir(wire.ProofPrefix + "*"), box.Inst.SessionDir() + "/" + wire.ProofPrefix + "*", box.Inst.NetNSDir() + "/" + wire.ProofPrefix + "*",
		"/sys/fs/cgroup/*" + box.Inst.KidsCgroupRel() + "/" + wire.ProofPrefix + "*", box.Inst.TagDir() + "/*.json", box.Inst.StopDir() + "/*"} {
		if left, _ := filepath.Glob(pattern); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	}
}

// prove runs `tagout prove --json`.
func prove(t *testing.T, box *testenv.Box) wire.ProofReport {
	t.Helper()
	r := box.Tagout("prove", "--json")
	var rep wire.ProofReport
	if err := json.Unmarshal([]byte(r.Stdout), &rep); err != nil {
		t.Fatalf("tagout prove ended with %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	if want := map[bool]int{true: 0, false: 5}[rep.Outcome == wire.ProofPassed]; r.Code != want {
		t.Errorf("%s, and the code is %d", rep.Outcome, r.Code)
	}
	return rep
}

// proves waits until a proof passes and every lamp is armed.
func proves(t *testing.T, box *testenv.Box) {
	t.Helper()
	box.Until(time.Minute, "a proof passes", func() error {
		if rep := prove(t, box); rep.Outcome != wire.ProofPassed {
			return fmt.Errorf("%+v", rep)
		}
		return nil
	})
	if text := box.Must("status"); strings.Count(text, "ARMED, proven ") != 3 {
		t.Error(text)
	}
}

// fails waits until a proof was carried out that failed at one layer alone, at a point whose name begins so, and its lamp
// says why.
func fails(t *testing.T, box *testenv.Box, layer wire.Layer, point, why string) {
	t.Helper()
	box.Until(time.Minute, "a proof fails at "+string(layer), func() error {
		rep := prove(t, box)
		for _, l := range wire.AllLayers() {
			if lp, ok := rep.Layers[l]; !ok || lp.Passed == (l == layer) {
				return fmt.Errorf("%+v", rep)
			}
		}
		if lp := rep.Layers[layer]; !strings.HasPrefix(lp.Point, point) || !strings.Contains(lp.Detail, why) {
			return fmt.Errorf("%+v", rep)
		}
		return nil
	})
	ls := box.Lamps().Layers[layer]
	if ls.State != wire.LampDegraded || ls.Detail == "" {
		t.Errorf("the lamp: %+v", ls)
	}
	if text := box.Tagout("status").Stdout; !strings.Contains(text, "DEGRADED: ") { // its code is about the daemons' health
		t.Error(text)
	}
	t.Logf("%s: %s", layer, ls.Detail)
}

// TestProofSeesWhatIsBroken breaks each layer for real, one after the other, while a real kid lives. Its lamp tells,
// the others stay armed, the kid is not touched, and after the repair all are armed again.
func TestProofSeesWhatIsBroken(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	layout, err := cgroup.Detect()
	if err != nil {
		t.Fatal(err)
	}

	// credd hangs. A stop would kill it; a proof must not.
	box.Freeze(instance.Credd)
	fails(t, box, wire.LayerCredential, "credd", "no answer")
	box.Thaw(instance.Credd)
	proves(t, box)
	secretStillWorks(t, box, kid)

	// The programs at the kids' cgroup are gone, and nobody has noticed: the maps can be written as before.
	if err := bpf.Uninstall(t.TempDir(), layout.V2(box.Inst.KidsCgroupRel()), nil); err != nil {
		t.Fatal(err)
	}
	fails(t, box, wire.LayerNetwork, "bpf-session", "no program at the kids' cgroup has seen")
	box.Must("setup", "--config", box.Inst.BoxConfig())
	proves(t, box)

	// The programs at a daemon's own cgroup are gone: what it has queued for a session would go on leaving.
	for _, daemon := range []string{instance.Proxy, instance.DNSFilter} {
		if err := bpf.Uninstall(t.TempDir(), filepath.Join(t.TempDir(), "none"), []string{layout.V2(box.Inst.DaemonCgroupRel(daemon))}); err != nil {
			t.Fatal(err)
		}
		fails(t, box, wire.LayerNetwork, "bpf-"+daemon, "no program at the daemon's cgroup has seen")
		box.Must("setup", "--config", box.Inst.BoxConfig())
		proves(t, box)
	}

	// Somebody lets the session go on as soon as it is stopped: packets go on passing.
	stop := saboteur(t, box, func(kid string) error { return letGoOn(box, kid) })
	fails(t, box, wire.LayerNetwork, "bpf-", "") // the first or the last point, as it happens
	stop()
	proves(t, box)

	// killswitchd may not write to the kid's cgroup.
	stop = saboteur(t, box, func(kid string) error {
		return os.Chown(filepath.Join(layout.V2(box.Inst.KidsCgroupRel()), kid, "cgroup.kill"), 0, 0)
	})
	fails(t, box, wire.LayerSession, "cgroup", "permission denied")
	stop()
	proves(t, box)

	if out := box.Sh(kid.Name, "echo alive"); out.Stdout != "alive\n" {
		t.Errorf("the kid that was there all the while: %+v", out)
	}
	secretStillWorks(t, box, kid)
	noProofLeft(t, box)
	if recs := box.Records(func(r *audit.Record) bool { return strings.HasPrefix(r.Event, "stop.") }); len(recs) != 0 {
		t.Errorf("stops: %+v", recs)
	}
}

// saboteur does what do says to each proof's kid, as often as it can, until stop is called.
func saboteur(t *testing.T, box *testenv.Box, do func(kid string) error) (stop func()) {
	t.Helper()
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-done:
				return
			case <-time.After(200 * time.Microsecond):
			}
			docs, _ := filepath.Glob(box.Inst.SessionDir() + "/" + wire.ProofPrefix + "*.json") // the pattern is right
			for _, doc := range docs {
				if err := do(strings.TrimSuffix(filepath.Base(doc), ".json")); err != nil && !errors.Is(err, os.ErrNotExist) {
					t.Error(err)
				}
			}
		}
	})
	return sync.OnceFunc(func() { close(done); wg.Wait() })
}

// letGoOn makes a stopped session active again, as nothing of Tagout ever does.
func letGoOn(box *testenv.Box, kid string) error {
	raw, err := os.ReadFile(filepath.Join(box.Inst.SessionDir(), kid+".json"))
	if err != nil {
		return err
	}
	var doc struct{ Mark uint32 }
	if err := json.Unmarshal(raw, &doc); err != nil {
		return nil // half written
	}
	maps, err := bpf.Open(box.Inst.PinDir())
	if err != nil {
		return err
	}
	defer maps.Close() // a test
	e, err := maps.Session(doc.Mark)
	if err != nil || e.State == bpf.StateActive {
		return nil // not there yet, or nothing to do
	}
	e.State = bpf.StateActive
	if err := maps.DeleteSession(doc.Mark); err != nil {
		return err
	}
	return maps.PutSession(doc.Mark, e)
}

// secretStillWorks fails the test unless credd still knows the kid's token.
func secretStillWorks(t *testing.T, box *testenv.Box, kid wire.Kid) {
	t.Helper()
	before := box.Net.API.Uses.Tally("agent:proof").Accepted
	done := running(t, box, kid.Name, "/workspace/hostile", "agent", "-parts", "token", "-tag", "proof")
	box.Until(soon, "the real kid's token is accepted", func() error {
		if n := box.Net.API.Uses.Tally("agent:proof").Accepted; n <= before {
			return fmt.Errorf("%d uses", n)
		}
		return nil
	})
	box.Sh(kid.Name, "kill -9 -1")
	wait(t, "the agent", done)
}

// TestProofAndRealStops: a stop in the middle of a proof is as whole as ever and counts no kid but its own; and a
// killswitchd or sandboxd that is killed in the middle of a proof leaves nothing of it.
func TestProofAndRealStops(t *testing.T) {
	t.Parallel()
	box := start(t)
	for _, daemon := range []string{instance.Killswitchd, instance.Sandboxd} {
		done := proofUnderWay(t, box)
		box.Kill9(daemon)
		<-done
		box.WaitHealthy(daemon)
		proves(t, box)
		noProofLeft(t, box)
		var tags []wire.Tag
		if err := box.Client(instance.Killswitchd).Call(t.Context(), http.MethodGet, "/v1/tags", nil, &tags); err != nil || len(tags) != 0 {
			t.Errorf("tags after %s was killed: %+v %v", daemon, tags, err)
		}
	}
	kid := box.Spawn(bareCard, nil)
	done := proofUnderWay(t, box)
	rep := box.Stop(wire.StopRequest{Scope: wire.Scope{All: true}})
	<-done
	if rep.State != wire.StateObserved || len(rep.Kids) != 1 || rep.Kids[0] != kid.Name {
		t.Errorf("the stop: %+v", rep)
	}
	box.Until(soon, "the lamps show the stop", func() error {
		text := box.Must("status")
		if n := strings.Count(text, "STOPPED: tag "+rep.Stop+" on the whole box by "+rep.Tag.By); n != 3 {
			return errors.New(text)
		}
		return nil
	})
	if got := prove(t, box); got.Outcome != wire.ProofMissed || !strings.Contains(got.Detail, rep.Stop) {
		t.Errorf("a proof under a tag on everything: %+v", got)
	}
}

// proofUnderWay returns in the middle of a proof; the channel is closed when `tagout prove` has ended.
func proofUnderWay(t *testing.T, box *testenv.Box) <-chan struct{} {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); box.Tagout("prove") }()
	box.Until(soon, "a proof is under way", func() error {
		if docs, _ := filepath.Glob(box.Inst.SessionDir() + "/" + wire.ProofPrefix + "*.json"); len(docs) == 0 {
			return os.ErrNotExist
		}
		return nil
	})
	return done
}
