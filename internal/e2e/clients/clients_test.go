// Package clients holds end-to-end tests of the programs that people really run in a kid: each makes an allowed
// transfer and gets a readable refusal, on a host that is inspected and on one that is not. All share one box
// and hardly more than one kid, because what is tested is the road out and not the kid.
package clients

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// card inspects registry.vendor.test and lets mirror.vendor.test pass unread; both are the same server.
const card = `apiVersion: tagout/v1
kind: Card
name: clients
task: Fetch what ordinary programs fetch.
image: host
egress:
  allow:
    - host: registry.vendor.test
      ports: [443]
      protocol: tls
      inspect: true
      methods: [GET, HEAD]
      paths: [/hello.txt, /proto, /bytes/*, /events/*, /redirect, /npm/*, /apt/*]
    - host: git.vendor.test
      ports: [443]
      protocol: tls
      inspect: true
      methods: [GET, POST]
      paths: [/git/*/info/refs, /git/*/git-upload-pack]
    - host: registry.vendor.test
      ports: [80]
      protocol: http
      methods: [GET, HEAD]
      paths: [/hello.txt, /bytes/*, /apt/*]
    - host: mirror.vendor.test
      ports: [443]
      protocol: tls
    - host: "*.wild.test"
      ports: [443]
      protocol: tls
filesystem:
  inputs:
    - {from: hostile, to: /workspace/hostile, mode: "0755"}
    - {from: practice-ca.pem, to: /workspace/practice-ca.pem, mode: "0644"}
  workspace: 128MiB
  tmp: 32MiB
limits: {pids: 512, memory: 1GiB, cpus: 2, openFiles: 4096}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// patience bounds one client. A refusal that takes so long is a hang.
const patience = 50 * time.Second

// world is a kid in the box.
type world struct {
	box   *testenv.Box
	kid   wire.Kid
	proxy string // URL of the explicit proxy
}

// attempt is one run of a client in the kid.
type attempt struct {
	name string
	line string // for /bin/sh; CA is the practice CA's file, PROXY the explicit proxy
	want string // in what it prints
	// agent is in the User-Agent of the request that reached the server; only for what is allowed.
	agent string
	// code is why it was refused, and comm how the process of the record calls itself; only for refusals.
	code reason.Code
	comm string
}

// TestClients runs everything that shares the box, and then looks at the attacker: nothing reached it. What
// floods has a kid of its own, so that the records of the others are not folded with its.
func TestClients(t *testing.T) {
	t.Parallel()
	w, flood := start(t)
	t.Run("in the kid", func(t *testing.T) {
		for name, run := range map[string]func(*testing.T, *world){
			"curl": curl, "wget": wget, "busybox": busybox, "python": python, "node": node, "go": goClient,
			"git": git, "apt": apt, "npm": npm,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				run(t, w)
			})
		}
		t.Run("names", func(t *testing.T) {
			t.Parallel()
			iodine(t, flood)
			dnsleak(t, flood)
		})
	})
	if n, bytes := w.box.Net.Attacker.Total(); n != 0 {
		t.Errorf("%d connections with %d bytes reached the attacker: %+v", n, bytes, w.box.Net.Attacker.Contacts()[:1])
	}
	if n := w.box.Net.DNS.Count(practice.NameEvil); n != 0 {
		t.Errorf("%d queries for denied names left the box", n)
	}
}

func start(t *testing.T) (w, flood *world) {
	t.Helper()
	box := testenv.Start(t)
	hostile, err := os.ReadFile(filepath.Join(box.Bin, "hostile"))
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(box.Net.CAFile())
	if err != nil {
		t.Fatal(err)
	}
	kid := func() *world {
		return &world{
			box: box, kid: box.Spawn(card, map[string][]byte{"hostile": hostile, "practice-ca.pem": ca}),
			proxy: fmt.Sprintf("http://%v:%d", box.Inst.Gateway(), instance.PortExplicit),
		}
	}
	return kid(), kid()
}

// sh runs a line in the kid and returns all it printed, and its exit code.
func (w *world) sh(t *testing.T, line string) (out string, code int) {
	t.Helper()
	mine := *w.box
	mine.T = t // a failure belongs to the client that had it
	res, err := mine.TryExec(context.Background(), w.kid.Name, wire.ExecRequest{
		Argv: []string{"/bin/sh", "-c", line}, Timeout: patience,
		Env: map[string]string{"CA": "/workspace/practice-ca.pem", "PROXY": w.proxy},
	})
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return res.Stdout + res.Stderr, res.Exit.Code
}

// try runs the attempts one after the other.
func (w *world) try(t *testing.T, attempts []attempt) {
	t.Helper()
	for _, a := range attempts {
		t.Run(a.name, func(t *testing.T) {
			began := time.Now()
			out, code := w.sh(t, a.line)
			if !strings.Contains(out, a.want) || a.want == "" {
				t.Errorf("it does not say %q but (exit %d after %v): %s", a.want, code, time.Since(began), out)
			}
			if a.code == reason.OK {
				w.wantServed(t, a, code)
				return
			}
			if code == 0 {
				t.Errorf("it believes that it succeeded: %s", out)
			}
			w.wantRecord(t, a)
		})
	}
}

func (w *world) wantServed(t *testing.T, a attempt, code int) {
	t.Helper()
	if code != 0 {
		t.Errorf("exit %d", code)
	}
	for _, s := range w.box.Net.Shelf.Served() {
		if strings.Contains(strings.ToLower(s.Agent), a.agent) {
			return
		}
	}
	t.Errorf("no request of %q reached the server", a.agent)
}

func (w *world) wantRecord(t *testing.T, a attempt) audit.Record {
	t.Helper()
	mine := *w.box
	mine.T = t
	defer func() {
		if !t.Failed() {
			return
		}
		for _, r := range w.box.Records(func(r *audit.Record) bool { return r.Kid == w.kid.Name && r.Reason == a.code }) {
			t.Logf("there is: %s %s %+v by %+v %v", r.Event, r.Outcome, r.Dst, r.Process, r.Fields)
		}
	}()
	rec := mine.WaitRecord(a.name, func(r *audit.Record) bool {
		return r.Kid == w.kid.Name && r.Outcome == audit.OutcomeDeny && r.Reason == a.code &&
			r.Process != nil && strings.HasPrefix(r.Process.Comm, a.comm)
	})
	if rec.Process.PID == 0 || rec.Dst == nil {
		t.Errorf("the record does not say who was denied what: %+v", rec)
	}
	return rec
}
