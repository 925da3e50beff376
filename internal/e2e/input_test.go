package e2e

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestBadInputLeavesNothing: each refusal is one clear line, and no kid, cgroup or link comes of it.
func TestBadInputLeavesNothing(t *testing.T) {
	t.Parallel()
	box := start(t)
	for name, tc := range map[string]struct {
		card   string
		status int
		want   string
	}{
		"unknown key":   {strings.Replace(bareCard, "task:", "tsk:", 1), http.StatusUnprocessableEntity, "tsk"},
		"unknown image": {strings.Replace(bareCard, "image: host", "image: nosuch", 1), http.StatusUnprocessableEntity, "image"},
		"no authority":  {strings.Replace(bareCard, `authority: "Ada Operator", `, "", 1), http.StatusUnprocessableEntity, "authority"},
		"missing input": {card, http.StatusUnprocessableEntity, "hostile"},
		"one bad rule": {bareCard + "egress: {allow: [{host: good.vendor.test, ports: [443], protocol: tls}, {host: \"*\", ports: [443], protocol: tls}]}\n",
			http.StatusUnprocessableEntity, "every host"}, // K14
		"no secret": {strings.ReplaceAll(card, "vendor_api", "nosuch_secret"), http.StatusUnprocessableEntity, "nosuch_secret"},
	} {
		inputs := map[string][]byte{}
		if name == "no secret" {
			inputs = hostile(t, box)
		}
		_, err := box.TrySpawn("refused", tc.card, inputs)
		if control.Status(err) < 400 || control.Status(err) >= 500 || !strings.Contains(err.Error(), tc.want) || strings.Contains(err.Error(), "\n\n") {
			t.Errorf("%s: status %d, %v", name, control.Status(err), err)
		}
	}
	var kids []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil || len(kids) != 0 {
		t.Errorf("kids after refusals: %v %v", kids, err)
	}
	if left, _ := filepath.Glob(filepath.Join(box.Inst.SessionDir(), "*.json")); len(left) != 0 {
		t.Errorf("session documents after refusals: %v", left)
	}
}

// TestOneNameOneKid (K11): of many spawns with one name, one wins and the others are told.
func TestOneNameOneKid(t *testing.T) {
	t.Parallel()
	box := start(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	won, conflicts := 0, 0
	for range 6 {
		wg.Go(func() {
			_, err := box.TrySpawn("only", bareCard, nil)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won++
			case control.Status(err) == http.StatusConflict && strings.Contains(err.Error(), "only"):
				conflicts++
			default:
				t.Errorf("neither won nor conflict: %v", err)
			}
		})
	}
	wg.Wait()
	if won != 1 || conflicts != 5 {
		t.Errorf("%d won, %d conflicts", won, conflicts)
	}
}

// TestTwoInstancesDoNotMeet: a stop of everything in one box leaves the other alone.
func TestTwoInstancesDoNotMeet(t *testing.T) {
	t.Parallel()
	a, b := start(t), testenv.Start(t)
	a.Spawn(bareCard, nil)
	other := b.Spawn(bareCard, nil)
	if rep := a.Stop(wire.StopRequest{Scope: wire.Scope{All: true}}); rep.State != wire.StateObserved {
		t.Fatalf("report %+v", rep)
	}
	if out := b.Sh(other.Name, "echo alive"); out.Stdout != "alive\n" {
		t.Errorf("the other instance's kid: %+v", out)
	}
}

// TestSomebodyElseCannotCommand: another user of the machine reaches no daemon.
func TestSomebodyElseCannotCommand(t *testing.T) {
	t.Parallel()
	box := start(t)
	for _, daemon := range instance.Daemons() {
		cmd := exec.Command(filepath.Join(box.Bin, "tagout"), "--instance", box.Inst.Name(), "list")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		if raw, err := cmd.CombinedOutput(); err == nil || !bytes.Contains(raw, []byte("tagout")) {
			t.Errorf("as nobody: %v %s", err, raw)
		}
		info, err := os.Stat(box.Inst.Socket(daemon))
		if err != nil || info.Mode().Perm()&0o007 != 0 {
			t.Errorf("socket of %s: %v %v", daemon, info.Mode(), err)
		}
	}
}

// TestRunReturnsTheCommandsCode is the one-liner that people will use most.
func TestRunReturnsTheCommandsCode(t *testing.T) {
	t.Parallel()
	box := start(t)
	file := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(bareCard), 0o600); err != nil {
		t.Fatal(err)
	}
	r := box.Tagout("run", file, "--", "/bin/sh", "-c", "echo out; echo err >&2; exit 7")
	if r.Code != 7 || r.Stdout != "out\n" || !strings.Contains(r.Stderr, "err\n") {
		t.Errorf("got %+v", r)
	}
	var kids []wire.Kid
	if err := json.Unmarshal([]byte(box.Must("list", "--json")), &kids); err != nil || len(kids) != 0 {
		t.Errorf("after run: %v %v", kids, err)
	}
}
