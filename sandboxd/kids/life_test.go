package kids

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
)

// TestCardIsKept: as long as the kid is there, so is the text that its rules come from, and those of a policy
// change after it. Nobody else's group reads it.
func TestCardIsKept(t *testing.T) {
	b := newBox(t, "tsbcard")
	p := plan()
	p.CardText = "first"
	b.spawn("k1", p)
	kept := func() string {
		raw, err := os.ReadFile(b.inst.KidCard("k1"))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	if got := kept(); got != "first" {
		t.Errorf("kept %q", got)
	}
	info, err := os.Stat(b.inst.KidCard("k1"))
	if err != nil || info.Mode().Perm() != 0o640 || int(info.Sys().(*syscall.Stat_t).Gid) != b.inst.GroupID() {
		t.Errorf("%v, %v", info, err)
	}
	if _, err := b.ChangePolicy(t.Context(), "k1", EgressChange{CardText: "second", By: "ada", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	if got := kept(); got != "second" {
		t.Errorf("kept %q after a policy change", got)
	}
	for _, text := range []string{"first", "second"} { // for good, whatever becomes of the kid
		sum := sha256.Sum256([]byte(text))
		raw, err := os.ReadFile(filepath.Join(b.inst.CardDir(), hex.EncodeToString(sum[:])+".yaml"))
		if err != nil || string(raw) != text {
			t.Errorf("%q, %v: evidence needs the card", raw, err)
		}
	}
	if _, err := b.ChangePolicy(t.Context(), "k1", EgressChange{CardText: "bad", By: "ada", Reason: "test", Egress: policy.Spec{Allow: []policy.Rule{{}}}}); err == nil || kept() != "second" {
		t.Errorf("a policy that cannot be enforced: %v, kept %q", err, kept())
	}
}

func TestSpawnExecDestroyLeavesNothing(t *testing.T) {
	b := newBox(t, "tsblife")
	p := plan()
	input := filepath.Join(t.TempDir(), "run.sh")
	if err := os.WriteFile(input, []byte("echo from input\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p.Inputs = []files.Input{{Dir: filepath.Dir(input), From: "run.sh", To: "job/run.sh", Mode: 0o755}}
	k := b.spawn("", p)
	if !nameRE.MatchString(k.Name) || k.State != wire.KidRunning {
		t.Errorf("spawned %+v", k)
	}
	r := b.sh(k.Name, `sh job/run.sh; echo "$GREETING $API_KEY $HOME $(id -u) $(hostname)"; cat /etc/resolv.conf; echo error >&2; exit 7`)
	want := "from input\nhello tgo_" + strings.Repeat("a", 32) + " /workspace 1000 " + k.Name + "\nnameserver " + b.inst.Gateway().String()
	if !strings.HasPrefix(r.stdout.String(), want) || r.stderr.String() != "error\n" {
		t.Errorf("stdout %q, stderr %q, want %q", r.stdout.String(), r.stderr.String(), want)
	}
	if r.exit.Result != "exited" || r.exit.Code != 7 {
		t.Errorf("exit %+v, want exited 7", r.exit)
	}
	for range 2 {
		if err := b.Destroy(t.Context(), k.Name, "test", "done"); err != nil {
			t.Fatal(err)
		}
	}
	b.wantNothingLeft()
	for event, n := range map[string]int{audit.EventKidSpawned: 1, audit.EventExecStarted: 1, audit.EventKidDestroyed: 1} {
		if got := b.audit.count(event, audit.OutcomeOK); got != n {
			t.Errorf("%d records of %s, want %d", got, event, n)
		}
	}
}

// TestEveryFailingStepTakesAllBack covers both faults: the step failed, and the step took effect but was
// reported as failed.
func TestEveryFailingStepTakesAllBack(t *testing.T) {
	b := newBox(t, "tsbroll")
	broken := errors.New("broken on purpose")
	for _, s := range b.steps() {
		for _, done := range []bool{false, true} {
			b.fault = func(step string, d bool) error {
				if step == s.name && d == done {
					return broken
				}
				return nil
			}
			_, err := b.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: plan()})
			if !errors.Is(err, broken) {
				t.Errorf("step %s, after it %v: error %v, want the injected one", s.name, done, err)
			}
			b.wantNothingLeft()
		}
	}
	b.fault = nil
	b.spawn("k1", plan()) // and the name is free again
}

// TestNoGuardNoKid is invariant 1: a guard that does not acknowledge refuses the spawn.
func TestNoGuardNoKid(t *testing.T) {
	b := newBox(t, "tsbguard")
	broken := errors.New("no answer")
	for _, call := range []string{"clear", "put proxy", "put dnsfilter", "mint", "admit"} {
		b.guards.set(call, broken)
		_, err := b.Spawn(t.Context(), Request{Name: "k1", Plan: plan()})
		if err == nil {
			t.Errorf("%s fails: the kid was made all the same", call)
		}
		if call != "admit" && KindOf(err) != Unavailable {
			t.Errorf("%s fails: error %v of kind %d, want Unavailable", call, err, KindOf(err))
		}
		b.guards.set(call, nil)
		b.wantNothingLeft()
	}
	if n := b.audit.count(audit.EventKidRefused, audit.OutcomeDeny); n != 4 {
		t.Errorf("%d refusals recorded, want 4", n)
	}
}

func TestTagRefusesSpawnAndExec(t *testing.T) {
	b := newBox(t, "tsbtag")
	b.spawn("k1", plan())
	b.guards.tag(wire.Tag{Scope: wire.Scope{Card: "practice"}, By: "ada"})
	if _, err := b.Spawn(t.Context(), Request{Plan: plan()}); KindOf(err) != Tagged || !strings.Contains(err.Error(), "ada") {
		t.Errorf("spawn under a tag: %v", err)
	}
	if _, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"true"}}); KindOf(err) != Tagged {
		t.Errorf("exec under a tag: %v", err)
	}
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.State != wire.KidStopped {
		t.Errorf("the tagged kid is %s, %v, want stopped", k.State, err)
	}
	b.guards.mu.Lock()
	b.guards.tags = nil
	b.guards.mu.Unlock()
	// Invariant 6: a release restarts nothing.
	if _, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"true"}}); KindOf(err) != Tagged {
		t.Errorf("exec after the release: %v, want it refused", err)
	}
}

// TestTagPlacedWhileSpawning: a stop that comes between the first question and the start wins.
func TestTagPlacedWhileSpawning(t *testing.T) {
	b := newBox(t, "tsbrace")
	b.fault = func(step string, done bool) error {
		if step == "create" && done {
			b.guards.tag(wire.Tag{Scope: wire.Scope{All: true}, By: "ada"})
		}
		return nil
	}
	if _, err := b.Spawn(t.Context(), Request{Name: "k1", Plan: plan()}); KindOf(err) != Tagged {
		t.Errorf("spawn: %v, want it refused by the tag", err)
	}
	b.wantNothingLeft()
}

func TestOneNameOneKid(t *testing.T) {
	b := newBox(t, "tsbname")
	errs := make([]error, 4)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { _, errs[i] = b.Spawn(t.Context(), Request{Name: "k1", Plan: plan()}) })
	}
	wg.Wait()
	won, lost := 0, 0
	for _, err := range errs {
		switch {
		case err == nil:
			won++
		case KindOf(err) == Conflict:
			lost++
		default:
			t.Error(err)
		}
	}
	if won != 1 || lost != 3 {
		t.Errorf("%d won and %d lost, want 1 and 3", won, lost)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "end of the test"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
}

func TestBadRequests(t *testing.T) {
	b := newBox(t, "tsbbad")
	image, env := plan(), plan()
	image.Image = "ubuntu"
	env.Env = map[string]string{"A=B": "x"}
	big := plan()
	self := probeInput(t)
	big.Workspace, big.Inputs = 64<<10, []files.Input{self}
	for name, r := range map[string]Request{
		"image": {Plan: image}, "env": {Plan: env}, "upper case": {Name: "Kid", Plan: plan()}, "path": {Name: "../x", Plan: plan()},
		"long": {Name: strings.Repeat("a", 32), Plan: plan()}, "input larger than the workspace": {Plan: big},
	} {
		if _, err := b.Spawn(t.Context(), r); KindOf(err) != Invalid {
			t.Errorf("%s: %v, want it refused as invalid", name, err)
		}
	}
	if _, err := b.Get(t.Context(), "nobody"); KindOf(err) != NotFound {
		t.Errorf("unknown kid: %v", err)
	}
	b.wantNothingLeft()
}

// TestDestroyWaitsForAHungGuard: what cannot be taken back keeps its name and stays denied until it can.
func TestDestroyWaitsForAHungGuard(t *testing.T) {
	b := newBox(t, "tsbhung")
	b.spawn("k1", plan())
	b.guards.set("delete proxy", context.DeadlineExceeded)
	if err := b.Destroy(t.Context(), "k1", "test", "end of the test"); err == nil {
		t.Error("destroy with a hung proxy: no error")
	}
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.State != wire.KidDestroying {
		t.Errorf("kid is %s, %v, want destroying", k.State, err)
	}
	if _, err := os.Stat(filepath.Join(b.inst.SessionDir(), "k1.json")); err != nil {
		t.Errorf("the session document went before its policy: %v", err)
	}
	if _, err := b.Spawn(t.Context(), Request{Name: "k1", Plan: plan()}); KindOf(err) != Conflict {
		t.Errorf("its name: %v, want it taken", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { b.Run(ctx); close(done) }()
	b.guards.set("delete proxy", nil)
	eventually(t, "the teardown to be finished", func() bool { return len(b.List(t.Context())) == 0 })
	cancel()
	<-done
	b.wantNothingLeft()
}

// TestDestroyWithDeadDaemons: a daemon that is not running holds nothing, so it cannot block a destroy.
func TestDestroyWithDeadDaemons(t *testing.T) {
	b := newBox(t, "tsbdead")
	b.spawn("k1", plan())
	for _, call := range []string{"delete proxy", "delete dnsfilter", "forget"} {
		b.guards.set(call, ErrDown)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "end of the test"); err != nil {
		t.Fatal(err)
	}
	b.guards.mu.Lock()
	calls := slices.Clone(b.guards.calls)
	b.guards.policies, b.guards.tokens = nil, nil // the dead remember nothing
	b.guards.mu.Unlock()
	asked := 0
	for _, c := range calls {
		if c == "delete proxy" {
			asked++
		}
	}
	if asked != 2 {
		t.Errorf("the dead proxy was asked %d times, want again after the document was gone", asked)
	}
	b.wantNothingLeft()
}

func TestDestroyEndsASpawn(t *testing.T) {
	b := newBox(t, "tsbcancel")
	reached, spawned := make(chan struct{}), make(chan error, 1)
	b.fault = func(step string, done bool) error {
		if step == "files" && done {
			close(reached)
			m := b.Manager
			eventually(t, "the destroy", func() bool {
				m.mu.Lock()
				defer m.mu.Unlock()
				return m.kids["k1"].state.Is(wire.KidDestroying)
			})
		}
		return nil
	}
	go func() {
		_, err := b.Spawn(context.WithoutCancel(t.Context()), Request{Name: "k1", Plan: plan()})
		spawned <- err
	}()
	<-reached
	if err := b.Destroy(t.Context(), "k1", "test", "end of the test"); err != nil {
		t.Fatal(err)
	}
	if err := <-spawned; KindOf(err) != Conflict || !strings.Contains(err.Error(), "it was destroyed") {
		t.Errorf("the spawn whose kid was destroyed: %v", err)
	}
	b.wantNothingLeft()
}

// TestASpawnThatIsCutSaysWhy: a stop or a caller that goes away shows as a step that fails, or not at all. The
// answer names the cause, and there is no kid.
func TestASpawnThatIsCutSaysWhy(t *testing.T) {
	for name, tc := range map[string]struct {
		step string
		kind Kind
		want string
	}{
		"stopped":              {"create", Tagged, "was stopped before it was up"},
		"caller gone":          {"create", Conflict, "went away"},
		"caller gone, at last": {"start", Conflict, "went away"},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "tsbcut")
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			b.fault = func(step string, done bool) error {
				if step != tc.step || !done {
					return nil
				}
				if tc.kind == Tagged {
					b.guards.tag(wire.Tag{Stop: "01X", Scope: wire.Scope{Kid: "k1"}})
					return errors.New("runc was killed")
				}
				cancel()
				return nil
			}
			_, err := b.Spawn(ctx, Request{Name: "k1", Plan: plan()})
			if KindOf(err) != tc.kind || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v", err)
			}
			b.wantNothingLeft()
		})
	}
}

// TestNothingRunsUnrecorded (invariant 7): while the audit log takes no records, nothing new runs, and what runs
// can be destroyed.
func TestNothingRunsUnrecorded(t *testing.T) {
	b := newBox(t, "tsbfull")
	b.spawn("k1", plan())
	b.audit.mu.Lock()
	b.audit.err = syscall.ENOSPC
	b.audit.mu.Unlock()
	_, err := b.Spawn(t.Context(), Request{Name: "k2", Plan: plan()})
	if KindOf(err) != Capacity || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("spawn: %v", err)
	}
	if _, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"true"}}); KindOf(err) != Capacity {
		t.Errorf("exec: %v", err)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "end of the test"); err != nil {
		t.Error(err)
	}
	b.wantNothingLeft()
}

func TestMarksAreNeverUsedAgain(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sub", "sequence")
	seen := map[uint32]bool{}
	for range 3 { // each round is a process that was killed
		s, err := openSequence(path)
		if err != nil {
			t.Fatal(err)
		}
		for range sequenceBlock + 3 {
			n, err := s.take()
			if err != nil {
				t.Fatal(err)
			}
			if seen[n] || n == 0 {
				t.Fatalf("number %d was given out twice", n)
			}
			seen[n] = true
		}
	}
	for _, torn := range []string{"12garbage", "", "1", "12", "0\n", "\x00\x00\n"} {
		if err := os.WriteFile(path, []byte(torn), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openSequence(path); err == nil {
			t.Errorf("a half-written counter %q: no error", torn)
		}
	}
}

// TestGuardsLearnOfAKidWhileItIsMade: the two lanes wait for each other here, so that a spawn which took them in turn would
// never end; and nothing starts before both are done.
func TestGuardsLearnOfAKidWhileItIsMade(t *testing.T) {
	b := newBox(t, "tsblanes")
	var mu sync.Mutex
	done := map[string]bool{}
	is := func(step string) bool {
		mu.Lock()
		defer mu.Unlock()
		return done[step]
	}
	b.fault = func(step string, after bool) error {
		switch {
		case after:
			mu.Lock()
			done[step] = true
			mu.Unlock()
		case step == "policy":
			eventually(t, "the container beside the guards", func() bool { return is("create") })
		case step == "create":
			eventually(t, "the kernel's entry beside the container", func() bool { return is("kernel") })
		case step == "watch" || step == "clear" || step == "start":
			for _, first := range []string{"kernel", "policy", "tokens", "files", "create"} {
				if !is(first) {
					t.Errorf("%s began before %s was done", step, first)
				}
			}
		}
		return nil
	}
	b.spawn("k1", plan())
	b.fault = nil
}
