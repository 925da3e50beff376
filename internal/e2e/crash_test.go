package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// TestKilledDaemonsOpenNothing kills each daemon with -9 while a kid lives (invariant 1). The supervisor brings
// it back, and in between and afterwards the raw way out stays shut and the card's road opens again.
func TestKilledDaemonsOpenNothing(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	fetch := "exec 3<>/dev/tcp/files.vendor.test/80; printf 'GET /hello.txt HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nConnection: close\\r\\n\\r\\n' >&3; head -1 <&3"
	for _, daemon := range instance.Daemons() {
		box.Kill9(daemon)
		if daemon != instance.Sandboxd { // without sandboxd nobody runs the probe; it is tried below
			// While killswitchd is dead nothing starts, so the command itself may be refused.
			out, err := box.TryExec(t.Context(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%v/80", box.Net.EvilAddr())}})
			if err == nil && out.Exit.Code == 0 {
				t.Errorf("with %s dead the kid got out", daemon)
			}
		}
		box.WaitHealthy(daemon)
		box.Until(soon, "the road is open again after "+daemon, func() error {
			out := box.Exec(kid.Name, "/bin/bash", "-c", fetch)
			if !strings.HasPrefix(out.Stdout, "HTTP/1.1 200") {
				return fmt.Errorf("%q %q", out.Stdout, out.Stderr)
			}
			return nil
		})
	}
	if _, n := box.Net.Attacker.Total(); n != 0 {
		t.Errorf("%d bytes reached the attacker", n)
	}
}

// TestTagsSurviveKill9 (S13, invariant 6).
func TestTagsSurviveKill9(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil)
	rep := box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}})
	box.Kill9(instance.Killswitchd)
	box.WaitHealthy(instance.Killswitchd)
	var tags []wire.Tag
	if err := box.Client(instance.Killswitchd).Call(t.Context(), http.MethodGet, "/v1/tags", nil, &tags); err != nil {
		t.Fatal(err)
	}
	if len(tags) != 1 || tags[0].Stop != rep.Stop || tags[0].Scope.Kid != kid.Name {
		t.Fatalf("tags after the restart: %+v", tags)
	}
}

// TestCleanupAfterEverythingWasKilled (invariant 8): `tagout cleanup` alone removes a box whose supervisor,
// daemons and test were all killed with -9; testenv then checks that nothing is left.
func TestCleanupAfterEverythingWasKilled(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	box.StopSupervisor(unix.SIGKILL)
	for _, daemon := range instance.Daemons() {
		box.Kill9(daemon)
	}
	// Contained with nobody alive: the kid's processes are still there, and its network is still shut.
	raw, err := os.ReadFile(kid.Cgroup + "/cgroup.events")
	if err != nil || !strings.Contains(string(raw), "populated 1") {
		t.Fatalf("the kid is gone before cleanup: %s %v", raw, err)
	}
	box.Must("cleanup")
	if _, err := os.Stat(kid.Cgroup); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the kid's cgroup is still there: %v", err)
	}
}

// TestHalfWrittenSessionIsDenied (invariant 1): a torn document must not open anything or stop the others.
func TestHalfWrittenSessionIsDenied(t *testing.T) {
	t.Parallel()
	box := start(t)
	torn, whole := box.Spawn(card, hostile(t, box)), box.Spawn(card, hostile(t, box))
	path := box.Inst.SessionDir() + "/" + torn.Name + ".json"
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, raw[:len(raw)/2], 0o640); err != nil {
		t.Fatal(err)
	}
	for _, daemon := range []string{instance.Proxy, instance.DNSFilter} {
		box.Kill9(daemon)
		box.WaitHealthy(daemon)
	}
	look := "exec 3<>/dev/tcp/files.vendor.test/80; printf 'GET /hello.txt HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nConnection: close\\r\\n\\r\\n' >&3; head -1 <&3"
	if out := box.Exec(torn.Name, "/bin/bash", "-c", look); strings.Contains(out.Stdout, "200") {
		t.Errorf("a session whose document is torn still gets out")
	}
	box.Until(soon, "the other kid works", func() error {
		if out := box.Exec(whole.Name, "/bin/bash", "-c", look); !strings.Contains(out.Stdout, "200") {
			return fmt.Errorf("%q %q", out.Stdout, out.Stderr)
		}
		return nil
	})
}

// TestSandboxdKilledInTheMiddle (invariant 8): sandboxd is killed with -9 while kids are made, used and destroyed, at
// whatever they are at. Its successor adopts what runs, and when all are destroyed nothing is left of any, in the
// kernel's maps neither.
func TestSandboxdKilledInTheMiddle(t *testing.T) {
	t.Parallel()
	box := start(t)
	steady := box.Spawn(bareCard, nil)
	for round := range 6 {
		var wg sync.WaitGroup
		for i := range 3 {
			wg.Go(func() {
				name := fmt.Sprintf("k%d-%d", round, i)
				if _, err := box.TrySpawn(name, bareCard, nil); err != nil {
					return // it was cut; that is the point
				}
				box.TryExec(t.Context(), name, wire.ExecRequest{Argv: []string{"sleep", "60"}})
			})
		}
		// The rounds differ in how far the spawns have come.
		box.Until(soon, "the spawns are under way", func() error {
			if dirs, _ := filepath.Glob(box.Inst.KidDir(fmt.Sprintf("k%d-*", round))); len(dirs) < 1+round/2 {
				return fmt.Errorf("%d have begun", len(dirs))
			}
			return nil
		})
		box.Kill9(instance.Sandboxd)
		wg.Wait()
		box.WaitHealthy(instance.Sandboxd)
		if out := box.Sh(steady.Name, "echo alive"); out.Stdout != "alive\n" {
			t.Fatalf("round %d: the kid that was there all the while: %+v", round, out)
		}
		var kids []wire.Kid
		if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil {
			t.Fatal(err)
		}
		for _, k := range kids {
			if k.Name != steady.Name {
				box.Destroy(k.Name)
			}
		}
	}
	box.Destroy(steady.Name)
	for _, dir := range []string{filepath.Dir(box.Inst.KidDir("x")), box.Inst.SessionDir(), box.Inst.NetNSDir(), box.Inst.RuncRoot()} {
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v %v", dir, left, err)
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*" + box.Inst.KidsCgroupRel() + "/*/cgroup.procs", "/sys/fs/cgroup" + box.Inst.KidsCgroupRel() + "/*/cgroup.procs", "/sys/class/net/" + box.Inst.LinkPrefix() + "*"} {
		if left, _ := filepath.Glob(pattern); len(left) != 0 {
			t.Errorf("left: %v", left)
		}
	}
	maps, err := bpf.Open(box.Inst.PinDir())
	if err != nil {
		t.Fatal(err)
	}
	defer maps.Close()
	if left, err := maps.Sessions(); err != nil || len(left) != 0 {
		t.Errorf("sessions in the kernel: %v %v", left, err)
	}
}

// TestRunThatIsCutLeavesNoKid: what ends `tagout run` from outside, a signal or a reader that goes away, ends its kid.
func TestRunThatIsCutLeavesNoKid(t *testing.T) {
	t.Parallel()
	box := start(t)
	file := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(bareCard), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		cut  func(*exec.Cmd, io.Closer)
		code int
	}{
		"interrupt":   {func(c *exec.Cmd, _ io.Closer) { c.Process.Signal(unix.SIGINT) }, 130},
		"hang-up":     {func(c *exec.Cmd, _ io.Closer) { c.Process.Signal(unix.SIGHUP) }, 130},
		"reader gone": {func(_ *exec.Cmd, out io.Closer) { out.Close() }, 141},
	} {
		cmd := exec.Command(filepath.Join(box.Bin, "tagout"), "--instance", box.Inst.Name(), "run", file, "--", "/bin/sh", "-c", "while :; do echo y; done")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		tc.cut(cmd, out)
		if name != "reader gone" {
			io.Copy(io.Discard, out)
		}
		cmd.Wait()
		if code := cmd.ProcessState.ExitCode(); code != tc.code {
			t.Errorf("%s: code %d (%v), want %d", name, code, cmd.ProcessState, tc.code)
		}
		var kids []wire.Kid
		if err := json.Unmarshal([]byte(box.Must("list", "--json")), &kids); err != nil || len(kids) != 0 {
			t.Errorf("%s: left: %+v %v", name, kids, err)
		}
	}
}
