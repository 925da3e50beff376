package kids

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
)

// TestExecResults: the same in a kid whose kid-init forks the commands and, after a new sandboxd has taken it over, in
// one where runc starts them.
func TestExecResults(t *testing.T) {
	b := newBox(t, "tsbexec")
	b.spawn("k1", plan())
	execResults(t, b)
	b.succeed()
	execResults(t, b)
}

func execResults(t *testing.T, b *box) {
	for name, c := range map[string]struct {
		r    wire.ExecRequest
		want wire.ExecExit
		out  string
	}{
		"exit code":      {wire.ExecRequest{Argv: []string{"sh", "-c", "exit 42"}}, wire.ExecExit{Result: "exited", Code: 42}, ""},
		"signal":         {wire.ExecRequest{Argv: []string{"sh", "-c", "kill -TERM $$"}}, wire.ExecExit{Result: "signaled", Code: 143, Signal: "SIGTERM"}, ""},
		"own kill":       {wire.ExecRequest{Argv: []string{"sh", "-c", "kill -KILL $$"}}, wire.ExecExit{Result: "signaled", Code: 137, Signal: "SIGKILL"}, ""},
		"not found":      {wire.ExecRequest{Argv: []string{"no-such-program"}}, wire.ExecExit{Result: "failed", Code: 127}, ""},
		"not executable": {wire.ExecRequest{Argv: []string{"/etc/passwd"}}, wire.ExecExit{Result: "failed", Code: 126}, ""},
		"no directory":   {wire.ExecRequest{Argv: []string{"true"}, Dir: "/nowhere"}, wire.ExecExit{Result: "failed", Code: 127}, ""},
		"directory":      {wire.ExecRequest{Argv: []string{"pwd"}, Dir: "/tmp"}, wire.ExecExit{Result: "exited"}, "/tmp\n"},
		"environment":    {wire.ExecRequest{Argv: []string{"sh", "-c", "echo $GREETING"}, Env: map[string]string{"GREETING": "ho"}}, wire.ExecExit{Result: "exited"}, "ho\n"},
		"no input":       {wire.ExecRequest{Argv: []string{"wc", "-c"}}, wire.ExecExit{Result: "exited"}, "0\n"},
		"streams":        {wire.ExecRequest{Argv: []string{"sh", "-c", "cat </dev/stdin >/dev/stdout && echo more >/dev/stderr"}, Stdin: []byte("in\n")}, wire.ExecExit{Result: "exited"}, "in\n"},
		"umask":          {wire.ExecRequest{Argv: []string{"sh", "-c", "umask"}}, wire.ExecExit{Result: "exited"}, "0022\n"},
		"unread input":   {wire.ExecRequest{Argv: []string{"true"}, Stdin: make([]byte, 1<<20)}, wire.ExecExit{Result: "exited"}, ""},
	} {
		r := b.exec("k1", c.r)
		detail := r.exit.Detail
		r.exit.Detail, r.exit.Usage = "", nil
		if r.exit != c.want || r.stdout.String() != c.out {
			t.Errorf("%s: %+v %q (%s %s), want %+v %q", name, r.exit, r.stdout.String(), r.stderr.String(), detail, c.want, c.out)
		}
		if c.want.Result == "failed" && (detail == "" || r.stderr.Len() > 0) {
			t.Errorf("%s: detail %q, stderr %q: want the reason in the detail alone", name, detail, r.stderr.String())
		}
	}
	for name, r := range map[string]wire.ExecRequest{
		"nothing": {}, "NUL": {Argv: []string{"a\x00b"}}, "relative": {Argv: []string{"true"}, Dir: "x"}, "env": {Argv: []string{"true"}, Env: map[string]string{"A B": ""}},
		"long command": {Argv: []string{"/" + strings.Repeat("a", 1<<17)}}, "long directory": {Argv: []string{"true"}, Dir: "/" + strings.Repeat("a", 1<<17)},
	} {
		if _, err := runExec(t.Context(), b.Manager, "k1", r); KindOf(err) != Invalid {
			t.Errorf("%s: %v, want it refused as invalid", name, err)
		}
	}
	if _, err := runExec(t.Context(), b.Manager, "nobody", wire.ExecRequest{Argv: []string{"true"}}); KindOf(err) != NotFound {
		t.Errorf("unknown kid: %v", err)
	}
}

// TestExecWritesNothingOutsideTheBox (invariant 8): a sandboxd that is killed while a command starts leaves the
// command's environment nowhere but in the kid's own directory, which goes with the kid.
func TestExecWritesNothingOutsideTheBox(t *testing.T) {
	b := newBox(t, "tsbtmp")
	b.spawn("k1", plan())
	for _, name := range []string{"TMPDIR", "XDG_RUNTIME_DIR"} {
		t.Setenv(name, filepath.Join(t.TempDir(), "nothing-can-be-written-here"))
	}
	if r := b.sh("k1", "echo ran"); r.stdout.String() != "ran\n" {
		t.Errorf("%+v %q", r.exit, r.stderr.String())
	}
}

// TestKidHoldsUpACommand: once runc has put the kid's uid on, the kid's processes can stop it. The command is
// given up when its time is over, and nothing of it keeps the kid from ending (invariant 4).
func TestKidHoldsUpACommand(t *testing.T) {
	b := newBox(t, "tsbheld")
	p := plan()
	p.Inputs = []files.Input{probeInput(t)}
	b.spawn("k1", p)
	go b.probe("k1", "stop-all")
	init := b.Manager.kids["k1"].pid
	for try := 0; ; try++ {
		r := b.exec("k1", wire.ExecRequest{Argv: []string{"/bin/true"}, Timeout: time.Millisecond})
		if strings.Contains(r.exit.Detail, "before it had started") {
			if r.exit.Result != resultTimeout || r.exit.Code != codeTimeout {
				t.Errorf("a command that was held up: %+v", r.exit)
			}
			break
		}
		if try == 50 {
			t.Fatal("no command was ever held up: the test proves nothing")
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan struct{})
	go func() { b.Run(ctx); close(ran) }()
	defer func() { cancel(); <-ran }()
	if err := cgroup.Kill(b.layout.V2(b.Manager.cgroupRel("k1"))); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kid-init is gone", func() bool { return errors.Is(unix.Kill(init, 0), unix.ESRCH) })
	eventually(t, "nothing dead is left", func() bool { return len(children(t, "Z", "runc:[")) == 0 })
}

// children lists this process's children in the given state whose name begins so.
func children(t *testing.T, state, name string) []string {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range files {
		raw, err := os.ReadFile(f)
		open, end := bytes.IndexByte(raw, '('), bytes.LastIndexByte(raw, ')')
		if err != nil || end < 0 {
			continue // gone
		}
		if fields := strings.Fields(string(raw[end+1:])); fields[0] == state && strings.HasPrefix(string(raw[open+1:]), name) && ours(fields[1]) {
			out = append(out, f)
		}
	}
	return out
}

// ours says whether the process with the given pid is this one or a runc that it started.
func ours(pid string) bool {
	self := strconv.Itoa(os.Getpid())
	if pid == self {
		return true
	}
	raw, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	return err == nil && strings.Contains(string(raw), "\nPPid:\t"+self+"\n")
}

// TestEveryByteArrives sends binary input through and back, more than any pipe holds, with a slow receiver.
func TestEveryByteArrives(t *testing.T) {
	b := newBox(t, "tsbbytes")
	b.spawn("k1", plan())
	input := make([]byte, 3<<20)
	for i := range input {
		input[i] = byte(i * i >> 3)
	}
	hash, n := sha256.New(), 0
	err := b.Exec(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"cat"}, Stdin: input}, func(f wire.ExecFrame) error {
		if n%16 == 0 {
			time.Sleep(2 * time.Millisecond) // the receiver is slow
		}
		n++
		hash.Write(f.Stdout)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := sha256.Sum256(input)
	if !bytes.Equal(hash.Sum(nil), want[:]) {
		t.Error("the bytes that came back are not those that were sent")
	}
	// The command is gone long before its output was read.
	r := &bytes.Buffer{}
	err = b.Exec(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"sh", "-c", "(sleep 100) & head -c 60000 /dev/zero"}}, func(f wire.ExecFrame) error {
		time.Sleep(drainGrace + 100*time.Millisecond)
		r.Write(f.Stdout)
		return nil
	})
	if err != nil || r.Len() != 60000 {
		t.Errorf("%d bytes, %v, want 60000", r.Len(), err)
	}
}

func TestGrandchildDoesNotHoldTheExec(t *testing.T) {
	b := newBox(t, "tsbgrand")
	b.spawn("k1", plan())
	began := time.Now()
	r := b.sh("k1", "sleep 300 & echo done")
	if took := time.Since(began); took > 3*time.Second || r.stdout.String() != "done\n" || r.exit.Result != "exited" {
		t.Errorf("after %s: %q %+v", took, r.stdout.String(), r.exit)
	}
	if r := b.sh("k1", "grep -lz sleep /proc/[0-9]*/cmdline 2>/dev/null | wc -l"); strings.TrimSpace(r.stdout.String()) == "0" {
		t.Error("the background process is gone: it should go on")
	}
}

func TestTimeoutKillsTheWholeTree(t *testing.T) {
	b := newBox(t, "tsbtime")
	kid := b.spawn("k1", plan())
	// Double-forked into a session of its own, ignoring what can be ignored.
	script := `trap "" TERM HUP INT; setsid sh -c 'trap "" TERM; (sleep 1234 &) ; sleep 1234' & sleep 1234`
	began := time.Now()
	r := b.exec("k1", wire.ExecRequest{Argv: []string{"sh", "-c", script}, Timeout: 300 * time.Millisecond})
	if took := time.Since(began); took > 3*time.Second || r.exit.Result != "timeout" || r.exit.Code != 124 {
		t.Errorf("after %s: %+v, want timeout 124", took, r.exit)
	}
	eventually(t, "all of the tree to be gone", func() bool { return len(commands(t, kid.Cgroup)) == 0 })
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.State != wire.KidRunning {
		t.Errorf("the kid is %s, %v, want running", k.State, err)
	}
}

func TestAStopEndsTheExec(t *testing.T) {
	b := newBox(t, "tsbstop")
	k := b.spawn("k1", plan())
	began, started := time.Now(), false
	var exit *wire.ExecExit
	err := b.Exec(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"sh", "-c", "echo up; sleep 300"}}, func(f wire.ExecFrame) error {
		if len(f.Stdout) > 0 && !started {
			started = true
			if err := cgroup.Kill(k.Cgroup); err != nil { // as killswitchd does, the tag after
				return err
			}
			b.guards.tag(wire.Tag{Scope: wire.Scope{Kid: "k1"}, By: "ada"})
		}
		if f.Exit != nil {
			exit = f.Exit
		}
		return nil
	})
	if err != nil || exit == nil || exit.Result != "stopped" {
		t.Fatalf("exit %+v, %v, want stopped", exit, err)
	}
	if took := time.Since(began); took > 3*time.Second {
		t.Errorf("the exec ended %s after the stop", took)
	}
	eventually(t, "the kid to be shown as stopped", func() bool {
		k, err := b.Get(t.Context(), "k1")
		return err == nil && k.State == wire.KidStopped
	})
}

func TestClientThatGoesAwayEndsTheCommand(t *testing.T) {
	b := newBox(t, "tsbgone")
	k := b.spawn("k1", plan())
	gone := errors.New("the client is gone")
	if err := b.Exec(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"sh", "-c", "echo up; exec sleep 300"}}, func(wire.ExecFrame) error { return gone }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := runExec(ctx, b.Manager, "k1", wire.ExecRequest{Argv: []string{"sleep", "300"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "only kid-init to be left", func() bool { return len(commands(t, k.Cgroup)) == 0 })
}

// commands returns the processes of a kid that are not kid-init, nor a child of it that waits for a command.
func commands(t *testing.T, dir string) []int {
	t.Helper()
	return slices.DeleteFunc(tasks(t, dir), func(pid int) bool {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		return err != nil || string(raw) == "kid-init\n" // or it is gone
	})
}

// tasks returns the processes in the cgroup and below it.
func tasks(t *testing.T, dir string) []int {
	t.Helper()
	var out []int
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.Name() != "cgroup.procs" {
			return nil // a cgroup may go while we look
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			return nil // as above
		}
		for _, f := range strings.Fields(string(raw)) {
			pid, err := strconv.Atoi(f)
			if err != nil {
				return err
			}
			out = append(out, pid)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}
