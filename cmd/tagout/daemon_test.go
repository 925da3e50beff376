package main

import (
	"bytes"
	"context"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
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

func TestRecordLine(t *testing.T) {
	r := audit.Record{
		Time: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Daemon: "sandboxd", Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny,
		Reason: reason.QUIC, Dst: &audit.Dst{Name: "evil.test", Port: 443, Proto: "udp"}, Process: &audit.Process{PID: 7, Comm: "curl"}, Count: 3, Fields: map[string]string{"hook": "connect4", "a": "b"},
	}
	const want = "03:04:05.006 sandboxd    connect.denied     deny quic -> evil.test:443/udp by curl[7] x3 a=b hook=connect4"
	if got := recordLine(r); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
