package kids

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
	"tagout/sandboxd/runtime"
)

// badRunc stands before runc on PATH. For each verb it can be told to be bad at it, by a file of the verb's name:
//
//	hang        does nothing and never ends, nor does its child
//	hang-after  does it, and then the same
//	fail        does nothing and says so
//	fail-after  does it and says that it failed
//	lie         does nothing and says that it did
//	garbage     the same, and what it writes down means nothing
//	other       does it, and writes down another process's pid
const badRunc = `#!/bin/sh
dir=$(dirname "$0") verb= pidfile=
for a; do
	case "$prev" in --pid-file) pidfile=$a ;; esac
	prev=$a
	case "$a" in create|start|state|delete|exec|kill) [ -n "$verb" ] || verb=$a ;; esac
done
how=
[ ! -f "$dir/$verb" ] || read how <"$dir/$verb"
case "$how" in
hang) "$dir/nap" 1000 & wait ;;
hang-after) REAL "$@"; "$dir/nap" 1000 & wait ;;
fail) echo 'broken on purpose' >&2; exit 1 ;;
fail-after) REAL "$@"; exit 1 ;;
lie) exit 0 ;;
garbage) [ -z "$pidfile" ] || echo '{"half' >"$pidfile"; exit 0 ;;
other) REAL "$@" || exit; [ -z "$pidfile" ] || echo $PPID >"$pidfile"; exit 0 ;;
*) exec REAL "$@" ;;
esac
`

// faultyRunc puts badRunc before runc, for the box too.
type faultyRunc struct {
	*box
	dir string
}

func newFaultyRunc(t *testing.T) *faultyRunc {
	t.Helper()
	dir := t.TempDir()
	path, err := exec.LookPath("runc")
	if err != nil {
		t.Fatal(err)
	}
	nap, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(nap, filepath.Join(dir, "nap")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "runc"), []byte(strings.ReplaceAll(badRunc, "REAL", path)), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	f := &faultyRunc{box: newBox(t, "tsbrunc"), dir: dir}
	f.beImpatient()
	return f
}

// beImpatient gives runc less time than a real box does.
func (f *faultyRunc) beImpatient() { f.cfg.Runtime.(*runtime.Runc).Patience = 1500 * time.Millisecond }

// be makes runc bad at the verb; an empty how makes it good again.
func (f *faultyRunc) be(verb, how string) {
	f.t.Helper()
	file := filepath.Join(f.dir, verb)
	err := os.Remove(file)
	if how != "" {
		err = os.WriteFile(file, []byte(how+"\n"), 0o600)
	}
	if err != nil && !os.IsNotExist(err) {
		f.t.Fatal(err)
	}
}

// wantNoCall wants nothing of a call of runc's to run on.
func (f *faultyRunc) wantNoCall() {
	f.t.Helper()
	eventually(f.t, "all that runc started to be gone", func() bool { return len(f.calls()) == 0 })
}

func (f *faultyRunc) calls() []string {
	var out []string
	dirs, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is right
	for _, file := range dirs {
		raw, _ := os.ReadFile(file) // it has ended
		if text := strings.ReplaceAll(string(raw), "\x00", " "); strings.Contains(text, f.dir+"/") {
			out = append(out, text)
		}
	}
	return out
}

// settled wants nothing to be left once Run has gone on with what could not be done at once.
func (f *faultyRunc) settled() {
	f.t.Helper()
	ctx, cancel := context.WithCancel(f.t.Context())
	done := make(chan struct{})
	go func() { f.Run(ctx); close(done) }()
	eventually(f.t, "the teardown", func() bool { return len(f.List(ctx)) == 0 })
	cancel()
	<-done
	f.wantNoCall()
	f.wantNothingLeft()
}

// TestRuncFailsAtASpawn (K09): whatever runc does instead of making a container, there is no kid, all of it is
// taken back, what hangs is killed with its children, and the next spawn works.
func TestRuncFailsAtASpawn(t *testing.T) {
	f := newFaultyRunc(t)
	f.be("start", "hang") // nobody asks it to
	for _, how := range []string{"hang", "hang-after", "fail", "fail-after", "lie", "garbage", "other"} {
		f.be("create", how)
		began := time.Now()
		k, err := f.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: plan()})
		if err == nil {
			t.Errorf("%s: spawned %+v", how, k)
		} else {
			t.Logf("%s: %v: %v", how, time.Since(began).Round(time.Millisecond), err)
		}
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("%s took %v", how, took)
		}
		f.be("create", "")
		f.settled()
		f.spawn("k1", plan())
		if err := f.Destroy(t.Context(), "k1", "test", "done"); err != nil {
			t.Fatal(err)
		}
		f.wantNothingLeft()
	}
	if n := f.audit.count(audit.EventKidRefused, audit.OutcomeFail); n != 7 {
		t.Errorf("%d refusals are recorded", n)
	}
}

// TestRuncFailsAtADestroy (K09): a destroy needs no runc.
func TestRuncFailsAtADestroy(t *testing.T) {
	f := newFaultyRunc(t)
	for _, how := range []string{"hang", "hang-after", "fail", "fail-after", "lie"} {
		f.be("delete", "")
		f.spawn("k1", plan())
		f.be("delete", how)
		if err := f.Destroy(t.Context(), "k1", "test", "done"); err != nil {
			t.Errorf("%s: %v", how, err)
		}
		f.settled()
	}
}

// TestRuncFailsAtASuccession (K09): a running kid is adopted whether or not runc works just then.
func TestRuncFailsAtASuccession(t *testing.T) {
	f := newFaultyRunc(t)
	k := f.spawn("k1", plan())
	for _, how := range []string{"hang", "fail", "lie", "garbage"} {
		for _, verb := range []string{"state", "delete", "kill"} {
			f.be(verb, how)
		}
		f.succeed()
		if got := fmt.Sprint(f.states()); got != "map[k1:running]" {
			t.Fatalf("%s: %s", how, got)
		}
		if r := f.sh("k1", "echo well"); r.stdout.String() != "well\n" {
			t.Errorf("%s: %q %q", how, r.stdout.String(), r.stderr.String())
		}
	}
	if err := os.WriteFile(filepath.Join(f.inst.RuncRoot(), "k1", "state.json"), []byte(`{"init_process_pid": 1}`), 0o600); err != nil {
		t.Fatal(err)
	}
	f.beImpatient()
	f.succeed() // what runc noted means nothing now
	if kids := f.List(t.Context()); len(kids) != 0 {
		t.Errorf("adopted by another's note: %+v", kids)
	}
	if _, err := f.store.Get(k.Name); err == nil {
		t.Error("its session is there")
	}
	f.settled()
}

// TestRuncFailsAtACommand (K09): the command of a kid that needs runc for it does not start, and the kid goes on.
func TestRuncFailsAtACommand(t *testing.T) {
	f := newFaultyRunc(t)
	f.spawn("k1", writablePlan())
	eventually(t, "a child to wait for a command", func() bool { return f.cfg.Runtime.Parked("k1") != 0 })
	waiting, err := f.cfg.Runtime.Groups(f.layout.V2(f.cgroupRel("k1")))
	if err != nil {
		t.Fatal(err)
	}
	for _, how := range []string{"hang", "hang-after", "fail", "fail-after", "lie", "garbage"} {
		f.be("exec", how)
		r, err := runExec(t.Context(), f.Manager, "k1", wire.ExecRequest{Argv: []string{"sleep", "1000"}})
		if err == nil && r.exit.Result != "failed" {
			t.Errorf("%s: %+v", how, r.exit)
		}
		f.be("exec", "")
		if r := f.sh("k1", "echo well"); r.stdout.String() != "well\n" {
			t.Errorf("after %s: %q %q", how, r.stdout.String(), r.stderr.String())
		}
		f.wantNoCall()
		eventually(t, how+": the command to be gone", func() bool {
			f.cfg.Runtime.Reap()
			groups, err := f.cfg.Runtime.Groups(f.layout.V2(f.cgroupRel("k1")))
			return err == nil && len(groups) == len(waiting)
		})
	}
	if err := f.Destroy(t.Context(), "k1", "test", "done"); err != nil {
		t.Fatal(err)
	}
	f.settled()
}
