package kids

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
)

// detached starts a command that nobody waits for.
func (b *box) detached(kid string, r wire.ExecRequest) (id string) {
	b.t.Helper()
	r.Detach = true
	err := b.Exec(b.t.Context(), kid, "test", r, func(f wire.ExecFrame) error {
		if id != "" || f.ID == "" {
			b.t.Errorf("frame %+v after the id %q", f, id)
		}
		id = f.ID
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return id
}

// attached collects what an attach sends.
func (b *box) attached(kid, id string) (*result, int64) {
	b.t.Helper()
	out, lost := &result{}, int64(0)
	err := b.Attach(b.t.Context(), kid, id, "test", nil, func(f wire.ExecFrame) error {
		out.stdout.Write(f.Stdout)
		out.stderr.Write(f.Stderr)
		lost += f.Lost
		if f.Exit != nil {
			out.exit = *f.Exit
		}
		return nil
	})
	if err != nil {
		b.t.Fatal(err)
	}
	return out, lost
}

// TestDetachedCommand is K02: an id at once; status, attach and stop work by it.
func TestDetachedCommand(t *testing.T) {
	b := newBox(t, "tsbdetach")
	k := b.spawn("k1", plan())
	began := time.Now()
	id := b.detached("k1", wire.ExecRequest{Shell: "echo out; echo err >&2; exec sleep 300"})
	if took := time.Since(began); took > time.Second || id == "" {
		t.Errorf("the id %q came after %s", id, took)
	}
	status, err := b.ExecStatus(t.Context(), "k1", id)
	if err != nil || !status.Detached || status.Exit != nil || strings.Join(status.Argv, " ") != "/bin/sh -c echo out; echo err >&2; exec sleep 300" {
		t.Errorf("status %+v, %v", status, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	seen := make(chan string, 8)
	left := make(chan error, 1)
	go func() {
		left <- b.Attach(ctx, "k1", id, "test", nil, func(f wire.ExecFrame) error {
			if s := string(f.Stdout) + string(f.Stderr); s != "" {
				seen <- s
			}
			return nil
		})
	}()
	if got := (<-seen) + (<-seen); got != "out\nerr\n" && got != "err\nout\n" { // two pipes
		t.Errorf("attached: %q", got)
	}
	cancel() // that one goes away; the command goes on
	if err := <-left; err != nil {
		t.Error(err)
	}
	if n := len(commands(t, k.Cgroup)); n != 1 {
		t.Errorf("%d processes after the attached one has gone, want 1", n)
	}
	if err := b.EndExec(t.Context(), "k1", id, "uid:0", "enough"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the command to be gone", func() bool { return len(commands(t, k.Cgroup)) == 0 })
	r, _ := b.attached("k1", id)
	if r.stdout.String() != "out\n" || r.stderr.String() != "err\n" || r.exit.Result != resultKilled || r.exit.Code != codeKilled || r.exit.Detail != "ended by uid:0: enough" {
		t.Errorf("attached after its end: %q %q %+v", r.stdout.String(), r.stderr.String(), r.exit)
	}
	for range 2 { // the first forgets it
		if err := b.EndExec(t.Context(), "k1", id, "uid:0", ""); err != nil {
			t.Error(err)
		}
	}
	if list, err := b.Execs(t.Context(), "k1"); err != nil || len(list) != 0 {
		t.Errorf("left: %+v, %v", list, err)
	}
	if _, err := b.ExecStatus(t.Context(), "k1", id); KindOf(err) != NotFound {
		t.Errorf("a forgotten command: %v", err)
	}
}

// TestDetachedOutputIsBounded: the end of it is kept, byte for byte, and how much is not is said.
func TestDetachedOutputIsBounded(t *testing.T) {
	b := newBox(t, "tsbring")
	b.spawn("k1", plan())
	const n = 300_000 // lines of 7 to 13 bytes
	id := b.detached("k1", wire.ExecRequest{Argv: []string{"seq", "1000000", fmt.Sprint(1000000 + n)}})
	r, lost := b.attached("k1", id)
	var want bytes.Buffer
	for i := range n + 1 {
		fmt.Fprintln(&want, 1000000+i)
	}
	all := want.Bytes()
	got := r.stdout.Bytes()
	// An attach from the beginning may have seen it all; one from now on sees what is kept.
	late, lateLost := b.attached("k1", id)
	if lost+int64(len(got)) != int64(len(all)) || late.stdout.Len() > keptOutput || lateLost+int64(late.stdout.Len()) != int64(len(all)) {
		t.Errorf("%d+%d and %d+%d bytes of %d", lost, len(got), lateLost, late.stdout.Len(), len(all))
	}
	if !bytes.Equal(late.stdout.Bytes(), all[lateLost:]) || r.exit.Result != resultExited {
		t.Errorf("the end is another: %+v", r.exit)
	}
	for range keptExecs + 5 {
		b.attached("k1", b.detached("k1", wire.ExecRequest{Argv: []string{"true"}}))
	}
	if list, err := b.Execs(t.Context(), "k1"); err != nil || len(list) != keptExecs {
		t.Errorf("%d commands are kept, %v, want %d", len(list), err, keptExecs)
	}
}

// TestDetachLater: a caller leaves a command alone that it started for itself, and comes back.
func TestDetachLater(t *testing.T) {
	b := newBox(t, "tsblater")
	b.spawn("k1", plan())
	input := make(chan wire.ExecInput)
	var id, first string
	go func() {
		input <- wire.ExecInput{Stdin: []byte("one\n")}
	}()
	err := b.ExecInput(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"cat"}, Input: true}, input, func(f wire.ExecFrame) error {
		if f.ID != "" {
			id = f.ID
		}
		if first += string(f.Stdout); first == "one\n" {
			go b.DetachExec("k1", id)
		}
		return nil
	})
	if err != nil || first != "one\n" {
		t.Fatalf("%q, %v", first, err)
	}
	again := make(chan wire.ExecInput, 2)
	again <- wire.ExecInput{Stdin: []byte("two\n")}
	again <- wire.ExecInput{EOF: true}
	var rest bytes.Buffer
	var exit *wire.ExecExit
	err = b.Attach(t.Context(), "k1", id, "other", again, func(f wire.ExecFrame) error {
		rest.Write(f.Stdout)
		exit = f.Exit
		return nil
	})
	if err != nil || rest.String() != "two\n" || exit == nil || exit.Result != resultExited {
		t.Errorf("%q %+v %v", rest.String(), exit, err)
	}
}

// TestTerminal: isatty, the size and its change, the controlling terminal; one stream. Also where runc starts it.
func TestTerminal(t *testing.T) {
	b := newBox(t, "tsbtty")
	b.spawn("k1", plan())
	for _, by := range []string{"kid-init", "runc"} {
		if by == "runc" {
			b.succeed()
		}
		input := make(chan wire.ExecInput, 4)
		var out bytes.Buffer
		var exit *wire.ExecExit
		id, resized := "", false
		script := `test -t 0 && test -t 1 && test -t 2 && echo terminal; stty size; trap 'stty size; exit 7' WINCH; (: >/dev/tty) && echo controlling; while :; do sleep .05; done`
		err := b.ExecInput(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"bash", "-c", script}, TTY: &wire.TermSize{Rows: 33, Cols: 99}, Input: true, Timeout: 10 * time.Second}, input, func(f wire.ExecFrame) error {
			out.Write(f.Stdout)
			if len(f.Stderr) > 0 {
				t.Errorf("%s: stderr %q", by, f.Stderr)
			}
			if f.Exit != nil {
				exit = f.Exit
			}
			if f.ID != "" {
				id = f.ID
			}
			if !resized && strings.Contains(out.String(), "controlling") {
				resized = true
				if err := b.ResizeExec("k1", id, wire.TermSize{Rows: 44, Cols: 111}); err != nil {
					t.Error(err)
				}
			}
			return nil
		})
		want := "terminal\r\n33 99\r\ncontrolling\r\n44 111\r\n"
		if err != nil || exit == nil || out.String() != want || exit.Code != 7 || exit.Result != resultExited {
			t.Errorf("%s: %q %+v %v, want %q", by, out.String(), exit, err, want)
		}
	}
}

// TestTerminalTypes: what is typed arrives, ^C interrupts, ^D ends.
func TestTerminalTypes(t *testing.T) {
	b := newBox(t, "tsbtype")
	b.spawn("k1", plan())
	for typed, want := range map[string]string{"\x03": "signaled", "\x04": "exited"} {
		input := make(chan wire.ExecInput, 4)
		var exit *wire.ExecExit
		typedIt := false
		err := b.ExecInput(t.Context(), "k1", "test", wire.ExecRequest{Argv: []string{"cat"}, TTY: &wire.TermSize{Rows: 24, Cols: 80}, Input: true, Stdin: []byte("hello\n"), Timeout: 10 * time.Second}, input, func(f wire.ExecFrame) error {
			if bytes.Contains(f.Stdout, []byte("hello")) && !typedIt {
				typedIt = true
				input <- wire.ExecInput{Stdin: []byte(typed)}
			}
			if f.Exit != nil {
				exit = f.Exit
			}
			return nil
		})
		if err != nil || exit == nil || exit.Result != want {
			t.Errorf("%q: %+v %v, want %s", typed, exit, err, want)
		}
	}
}

// TestTimeoutIsOnTime is K03: at the time and not later, whatever the command does, all of it is gone and so are its
// ports.
func TestTimeoutIsOnTime(t *testing.T) {
	b := newBox(t, "tsbontime")
	p := plan()
	p.Inputs = []files.Input{probeInput(t)}
	k := b.spawn("k1", p)
	for name, r := range map[string]wire.ExecRequest{
		"server with workers": {Argv: []string{"/workspace/probe"}, Env: map[string]string{"TAGOUT_TEST_PROBE": "serve"}},
		"waits for a child":   {Shell: "sleep 300 & wait"},
		"ignores TERM":        {Shell: `trap "" TERM HUP INT; while :; do sleep 1; done`},
	} {
		r.Timeout = 2 * time.Second
		began := time.Now()
		got := b.exec("k1", r)
		if took := time.Since(began); took < r.Timeout || took > r.Timeout+500*time.Millisecond || got.exit.Result != resultTimeout || got.exit.Code != codeTimeout {
			t.Errorf("%s: %+v after %s, want a time-out after %s", name, got.exit, took, r.Timeout)
		}
		if name == "server with workers" && got.stdout.String() != "serving\n" {
			t.Errorf("%s: %q %q: it served nothing", name, got.stdout.String(), got.stderr.String())
		}
		eventually(t, "all of it to be gone", func() bool { return len(commands(t, k.Cgroup)) == 0 })
	}
	if r := b.probe("k1", "dial"); strings.TrimSpace(r.stdout.String()) != "ECONNREFUSED" {
		t.Errorf("its port: %q %+v", r.stdout.String(), r.exit)
	}
}

// TestGrandchildCutsTheOutput is K01: who reads is told that more may come.
func TestGrandchildCutsTheOutput(t *testing.T) {
	b := newBox(t, "tsbcut")
	b.spawn("k1", plan())
	if r := b.sh("k1", "echo before; tail -f /dev/null & exit 3"); !r.exit.Cut || r.exit.Code != 3 || r.stdout.String() != "before\n" {
		t.Errorf("a grandchild holds the output: %+v %q", r.exit, r.stdout.String())
	}
	if r := b.sh("k1", "tail -f /dev/null >/dev/null 2>&1 & exit 3"); r.exit.Cut || r.exit.Code != 3 {
		t.Errorf("a grandchild without the output: %+v", r.exit)
	}
}

// TestOrphansAreReaped is K04: ten thousand of them.
func TestOrphansAreReaped(t *testing.T) {
	b := newBox(t, "tsborphan")
	p := plan()
	p.Limits.PIDs, p.Limits.CPUs = 1000, 0
	p.Inputs = []files.Input{probeInput(t)}
	k := b.spawn("k1", p)
	if r := b.probe("k1", "orphans", "10000"); r.exit.Code != 0 || r.exit.Result != resultExited {
		t.Fatalf("%+v %q", r.exit, r.stderr.String())
	}
	eventually(t, "all to be gone", func() bool { return len(commands(t, k.Cgroup)) == 0 })
	r := b.sh("k1", "cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '")
	if strings.TrimSpace(r.stdout.String()) != "0" {
		t.Errorf("zombies: %q", r.stdout.String())
	}
}

// TestFloodOfOutput is K05: every byte of 200 MB, and of fifty times 8 MiB at once, arrives, and little of it is ever in
// memory.
func TestFloodOfOutput(t *testing.T) {
	b := newBox(t, "tsbflood")
	p := plan()
	p.Limits.PIDs, p.Limits.CPUs = 512, 0
	b.spawn("k1", p)
	if r := b.sh("k1", `printf '\377\376\000\377'`); r.stdout.String() != "\xff\xfe\x00\xff" {
		t.Errorf("bytes that are no text: %q", r.stdout.String())
	}
	most := watchHeap(t)
	const burst = 200_000_000
	h := sha256.New()
	got := 0
	err := b.Exec(t.Context(), "k1", "test", wire.ExecRequest{Shell: fmt.Sprintf(`head -c %d /dev/zero | tr '\000' '\377'`, burst)}, func(f wire.ExecFrame) error {
		got += len(f.Stdout)
		h.Write(f.Stdout)
		return nil
	})
	if want := hashOf(0xff, burst); err != nil || got != burst || !bytes.Equal(h.Sum(nil), want) {
		t.Errorf("%d bytes, %v: want %d that are as they were", got, err, burst)
	}
	const size = 8 << 20
	want := hashOf(1, size)
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			h := sha256.New()
			err := b.Exec(t.Context(), "k1", "test", wire.ExecRequest{Shell: fmt.Sprintf(`head -c %d /dev/zero | tr '\000' '\001'`, size)}, func(f wire.ExecFrame) error {
				h.Write(f.Stdout)
				return nil
			})
			if err != nil || !bytes.Equal(h.Sum(nil), want) {
				t.Errorf("one of fifty: %v, or its bytes are others", err)
			}
		})
	}
	wg.Wait()
	if n := most(); n > 64<<20 {
		t.Errorf("%d MiB of heap were in use", n>>20)
	}
}

func hashOf(b byte, n int64) []byte {
	h := sha256.New()
	io.Copy(h, io.LimitReader(endless(b), n)) // a hash takes all
	return h.Sum(nil)
}

type endless byte

func (e endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(e)
	}
	return len(p), nil
}

// watchHeap looks at the heap until the returned function is called, which says how much of it was in use at most.
func watchHeap(t *testing.T) (most func() uint64) {
	stop, done := make(chan struct{}), make(chan uint64, 1)
	go func() {
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		peak := uint64(0)
		for {
			var m goruntime.MemStats
			goruntime.ReadMemStats(&m)
			peak = max(peak, m.HeapInuse)
			select {
			case <-stop:
				done <- peak
				return
			case <-tick.C:
			}
		}
	}()
	return func() uint64 { close(stop); return <-done }
}

// TestFloodOfCommands is K18: five hundred at once, and a hundred that hang until they are called off. What is too much
// is refused, and afterwards nothing is left: no goroutine, no descriptor, no process, no cgroup, no record.
func TestFloodOfCommands(t *testing.T) {
	b := newBox(t, "tsbexecs")
	p := plan()
	p.Limits.PIDs, p.Limits.CPUs = 2000, 0
	k := b.spawn("k1", p)
	b.sh("k1", "true")
	eventually(t, "the next command's child to be parked, whose descriptors count", func() bool {
		groups, err := b.cfg.Runtime.Groups(k.Cgroup)
		return err == nil && len(groups) == 1 && len(tasks(t, groups[0])) == 1
	})
	files, routines := len(openFiles(t)), goruntime.NumGoroutine()
	var wg sync.WaitGroup
	var mu sync.Mutex
	ran, refused := 0, 0
	for range 500 {
		wg.Go(func() {
			r, err := runExec(t.Context(), b.Manager, "k1", wire.ExecRequest{Argv: []string{"true"}})
			mu.Lock()
			defer mu.Unlock()
			switch {
			case KindOf(err) == Capacity:
				refused++
			case err != nil || r.exit.Result != resultExited || r.exit.Code != 0:
				t.Errorf("%+v, %v", r, err)
			default:
				ran++
			}
		})
	}
	wg.Wait()
	if ran+refused != 500 || ran < maxExecs {
		t.Errorf("%d ran and %d were refused", ran, refused)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for range 100 {
		wg.Go(func() {
			if r, err := runExec(ctx, b.Manager, "k1", wire.ExecRequest{Argv: []string{"sleep", "300"}}); err != nil || r.exit.Result != resultFailed {
				t.Errorf("%+v, %v", r, err)
			}
		})
	}
	eventually(t, "a hundred to hang", func() bool { return len(commands(t, k.Cgroup)) == 100 })
	cancel()
	wg.Wait()
	if n := len(commands(t, k.Cgroup)); n != 0 {
		t.Errorf("%d processes are left", n)
	}
	b.sh("k1", "true") // tidies
	eventually(t, "nothing to be left", func() bool {
		b.cfg.Runtime.Reap()
		groups, err := b.cfg.Runtime.Groups(k.Cgroup)
		records, _ := os.ReadDir(b.execsDir("k1"))
		return err == nil && len(groups) <= 1 && len(records) == 0 && len(openFiles(t)) <= files && goruntime.NumGoroutine() <= routines
	})
}

func openFiles(t *testing.T) []os.DirEntry {
	t.Helper()
	out, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestKilledSandboxdsCommandsGetAnEnd: a successor ends what its predecessor ran, says so in a record, and leaves alone
// what a command that had ended by itself left running.
func TestKilledSandboxdsCommandsGetAnEnd(t *testing.T) {
	b := newBox(t, "tsbended")
	doom(t, b)
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	doc, err := b.store.Get("whole")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the predecessor's command to be gone", func() bool { return len(commands(t, doc.Cgroup)) == 0 })
	if n := b.audit.count(audit.EventExecEnded, audit.OutcomeFail); n != 1 {
		t.Errorf("%d records of its end, want 1", n)
	}
	if list, err := b.Execs(t.Context(), "whole"); err != nil || len(list) != 0 {
		t.Errorf("it is still shown: %+v, %v", list, err)
	}
	if left, _ := filepath.Glob(b.execsDir("whole") + "/*"); len(left) != 0 {
		t.Errorf("left of it: %v", left)
	}
	b.sh("whole", "sleep 300 >/dev/null 2>&1 &")
	eventually(t, "it to run", func() bool { return len(commands(t, doc.Cgroup)) == 1 })
	b.succeed()
	if n := len(commands(t, doc.Cgroup)); n != 1 {
		t.Errorf("%d processes are left, want the one in the background", n)
	}
}

// TestUsage: what the whole tree used, not the leader alone.
func TestUsage(t *testing.T) {
	b := newBox(t, "tsbusage")
	b.spawn("k1", plan())
	r := b.sh("k1", `(i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done) & wait; head -c 20000000 /dev/zero | tail -c 20000000 >/dev/null`)
	if u := r.exit.Usage; u == nil || u.User < 20*time.Millisecond || u.MaxRSS < 10<<20 || u.MaxRSS > 256<<20 {
		t.Errorf("%+v", u)
	}
}
