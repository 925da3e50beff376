package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

// serve stands in for one daemon of a fresh instance.
func serve(t *testing.T, name, daemon string, mux http.Handler) {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(inst.Socket(daemon)), 0o755); err != nil {
		t.Fatal(err)
	}
	l, err := control.Listen(inst.Socket(daemon), inst.GroupID())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- control.Serve(ctx, l, mux, time.Second) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(inst.RunDir()); err != nil {
			t.Error(err)
		}
		if err := inst.Release(); err != nil {
			t.Error(err)
		}
	})
}

func tagout(args ...string) (code int, out, errOut string) {
	var o, e bytes.Buffer
	code = run(context.Background(), args, strings.NewReader(""), &o, &e)
	return code, o.String(), e.String()
}

func TestExecEndsAsTheCommandDid(t *testing.T) {
	frames := map[string][]wire.ExecFrame{
		"ok":      {{Stdout: []byte("a\xff")}, {Stderr: []byte("b")}, {Exit: &wire.ExecExit{Result: "exited"}}},
		"seven":   {{Exit: &wire.ExecExit{Result: "exited", Code: 7}}},
		"killed":  {{Exit: &wire.ExecExit{Result: "signaled", Signal: "SIGKILL"}}},
		"late":    {{Exit: &wire.ExecExit{Result: "timeout"}}},
		"stopped": {{Exit: &wire.ExecExit{Result: "stopped", Detail: "ada: odd uploads"}}},
		"bare":    {{Exit: &wire.ExecExit{Result: "stopped"}}},
		"failed":  {{Exit: &wire.ExecExit{Result: "failed", Detail: "no such file"}}},
		"unknown": {{Exit: &wire.ExecExit{Result: "failed", Code: 127, Detail: "not found"}}},
		"cut":     {{Stdout: []byte("half")}},
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/kids/{kid}/exec", func(w http.ResponseWriter, r *http.Request) {
		list, ok := frames[r.PathValue("kid")]
		if !ok {
			control.Refuse(w, http.StatusNotFound, reason.UnknownSession, "there is no kid "+r.PathValue("kid"))
			return
		}
		s := control.NewStream(w)
		for _, f := range list {
			s.Send(f)
		}
	})
	serve(t, "tcli1", instance.Sandboxd, mux)
	tests := []struct {
		kid      string
		code     int
		out, err string
	}{
		{"ok", 0, "a\xff", "b"},
		{"seven", 7, "", ""},
		{"killed", 137, "", "tagout: the command was ended by SIGKILL\n"},
		{"late", 124, "", "tagout: the command took too long and was killed with all that it started\n"},
		{"stopped", 3, "", "tagout: the kid was stopped: ada: odd uploads: see `tagout tags`\n"},
		{"bare", 3, "", "tagout: the kid was stopped: see `tagout tags`\n"},
		{"failed", 1, "", "tagout: the command could not be run: no such file\n"},
		{"unknown", 127, "", "tagout: the command could not be run: not found\n"},
		{"cut", 1, "half", "tagout: the connection to sandboxd ended before the command did: see `tagout list`\n"},
		{"ghost", 2, "", "tagout: there is no kid ghost\n"},
	}
	for _, tt := range tests {
		code, out, errOut := tagout("--instance", "tcli1", "exec", tt.kid, "--", "true")
		if code != tt.code || out != tt.out || errOut != tt.err {
			t.Errorf("%s: %d, %q, %q, want %d, %q, %q", tt.kid, code, out, errOut, tt.code, tt.out, tt.err)
		}
	}
}

// gone is a pipe whose reader went away.
type gone struct{}

func (gone) Write([]byte) (int, error) {
	return 0, &os.PathError{Op: "write", Path: "|1", Err: syscall.EPIPE}
}

// TestAnInterruptedRunLeavesNoKid: whatever ends a run, the kid that was made for it is destroyed.
func TestAnInterruptedRunLeavesNoKid(t *testing.T) {
	const bare = "apiVersion: tagout/v1\nkind: Card\nname: bare\ntask: Nothing.\nimage: host\nstop: {authority: Ada, maxTime: 1s}\n"
	file := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(bare), 0o600); err != nil {
		t.Fatal(err)
	}
	var ctx context.Context
	var interrupt context.CancelFunc
	when := ""
	destroyed := make(chan string, 1)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/kids", func(w http.ResponseWriter, _ *http.Request) {
		if when == "spawn" {
			interrupt()
		}
		control.Reply(w, wire.Kid{Name: "k"})
	})
	mux.HandleFunc("POST /v1/kids/k/exec", func(w http.ResponseWriter, r *http.Request) {
		if when == "exec" {
			interrupt()
		}
		s := control.NewStream(w)
		s.Send(wire.ExecFrame{Stdout: []byte("y\n")})
		<-r.Context().Done()
	})
	destroy := func(w http.ResponseWriter, _ *http.Request) {
		destroyed <- when
		control.Reply(w, struct{}{})
	}
	mux.HandleFunc("DELETE /v1/kids/k", destroy)
	mux.HandleFunc("POST /v1/kids/k/destroy", destroy)
	serve(t, "tcli3", instance.Sandboxd, mux)
	for _, tt := range []struct {
		when string
		out  io.Writer
		code int
		err  string
	}{
		{"spawn", io.Discard, 130, "tagout: interrupted\n"},
		{"exec", io.Discard, 130, "tagout: interrupted\n"},
		{"reader gone", gone{}, 141, ""},
	} {
		when = tt.when
		ctx, interrupt = context.WithCancel(t.Context())
		var errOut bytes.Buffer
		code := run(ctx, []string{"--instance", "tcli3", "run", file, "--", "yes"}, strings.NewReader(""), tt.out, &errOut)
		interrupt()
		if code != tt.code || errOut.String() != tt.err {
			t.Errorf("%s: %d, %q, want %d, %q", tt.when, code, &errOut, tt.code, tt.err)
		}
		select {
		case got := <-destroyed:
			if got != tt.when {
				t.Errorf("%s: destroyed at %s", tt.when, got)
			}
		default:
			t.Errorf("%s: the kid was not destroyed", tt.when)
		}
	}
}

// TestStatusPassesWarningsOn: a daemon may serve and still have something to say, such as that the disk is full.
func TestStatusPassesWarningsOn(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		control.Reply(w, wire.Health{Status: "ok", Warning: "writing the audit log: no space left on device"})
	})
	serve(t, "tcli6", instance.Killswitchd, mux)
	code, out, _ := tagout("--instance", "tcli6", "status")
	if want := "killswitchd  healthy, but writing the audit log: no space left on device\n"; code != 4 || !strings.HasPrefix(out, want) {
		t.Errorf("%d, %q", code, out)
	}
}

// TestStatusDoesNotWaitForWhoHangs: a daemon that answers nothing is asked once, within a limit, and what only
// it knows is not made up.
func TestStatusDoesNotWaitForWhoHangs(t *testing.T) {
	var asked atomic.Int32
	serve(t, "tcli7", instance.Sandboxd, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		<-r.Context().Done()
	}))
	code, out, _ := tagout("--instance", "tcli7", "status")
	if n := asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	if code != 4 || !strings.Contains(out, "sandboxd     NOT HEALTHY: ") || !strings.HasSuffix(out, "kids are not known, tags are not known\n") {
		t.Errorf("%d, %q", code, out)
	}
}

// TestASilentKillswitchdIsNamed: an order that nobody takes up does not hang without a word.
func TestASilentKillswitchdIsNamed(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/stop", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	serve(t, "tcli4", instance.Killswitchd, mux)
	var out, errOut bytes.Buffer
	a := &app{instance: "tcli4", out: &out, err: &errOut, silence: 50 * time.Millisecond}
	cmd := a.stopCommand()
	cmd.SetArgs([]string{"--all", "--by", "ada", "--reason", "x"})
	code := a.report(cmd.ExecuteContext(t.Context()))
	if code != 4 || !strings.Contains(errOut.String(), "tagout: killswitchd has said nothing for 50ms") || strings.Count(errOut.String(), "tagout: ") != 1 {
		t.Errorf("%d, %q", code, &errOut)
	}
}

// TestATagThatIsNotSafeIsNamed: a stop whose tag could not be kept is not complete, and says why.
func TestATagThatIsNotSafeIsNamed(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, _ *http.Request) {
		s := control.NewStream(w)
		s.Send(wire.StopEvent{Stop: "01X", Point: "tag", State: wire.StatePartial, Detail: "no space left on device"})
		s.Send(wire.StopEvent{Stop: "01X", Final: &wire.StopReport{Stop: "01X", State: wire.StatePartial}})
	})
	serve(t, "tcli5", instance.Killswitchd, mux)
	code, _, errOut := tagout("--instance", "tcli5", "stop", "--all", "--by", "ada", "--reason", "x")
	if code != 5 || !strings.Contains(errOut, "no space left on device") {
		t.Errorf("%d, %q", code, errOut)
	}
}

func TestStopIsCompleteOnlyWhenObserved(t *testing.T) {
	report := func(s wire.State) *wire.StopReport {
		return &wire.StopReport{Stop: "01X", State: s, Kids: []string{"a"}, Layers: map[wire.Layer]wire.LayerReport{wire.LayerSession: {State: s, Detail: "pid 7 in state D"}}}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/stop", func(w http.ResponseWriter, r *http.Request) {
		var req wire.StopRequest
		if !control.Read(w, r, &req) {
			return
		}
		if req.By != "ada" || req.Reason != "odd uploads" {
			t.Errorf("request %+v", req)
		}
		s := control.NewStream(w)
		s.Send(wire.StopEvent{Stop: "01X", Kid: req.Scope.Kid, Layer: wire.LayerSession, Point: "cgroup", State: wire.StateFired})
		if req.Scope.Kid != "cut" {
			s.Send(wire.StopEvent{Stop: "01X", Final: report(wire.State(req.Scope.Kid))})
		}
	})
	mux.HandleFunc("POST /v1/release", func(w http.ResponseWriter, _ *http.Request) {
		control.Refuse(w, http.StatusForbidden, reason.Tagged, "tag 01X was placed by ada: only ada can release it")
	})
	serve(t, "tcli2", instance.Killswitchd, mux)
	for kid, want := range map[string]int{"observed": 0, "contained-not-dead": 5, "partial": 5, "fired": 5, "failed": 5, "cut": 5} {
		code, out, errOut := tagout("--instance", "tcli2", "stop", "--kid", kid, "--by", "ada", "--reason", "odd uploads")
		if code != want || strings.Count(errOut, "\n") > 1 || !strings.Contains(out, "cgroup") {
			t.Errorf("%s: %d, want %d\n%s%s", kid, code, want, out, errOut)
		}
		if kid == "contained-not-dead" && !strings.Contains(errOut, "session contained-not-dead (pid 7 in state D)") {
			t.Errorf("the error does not say what is open: %s", errOut)
		}
	}
	code, _, errOut := tagout("--instance", "tcli2", "release", "01X", "--by", "eve", "--reason", "x")
	if code != 3 || errOut != "tagout: tag 01X was placed by ada: only ada can release it\n" {
		t.Errorf("release: %d, %q", code, errOut)
	}
}
