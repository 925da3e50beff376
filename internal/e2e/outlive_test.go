package e2e

import (
	"bytes"
	"encoding/json"
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

	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// outliving is a box with commands that outlive its sandboxd.
type outliving struct {
	*testenv.Box
	t *testing.T
}

func (b outliving) detach(args ...string) (id string) {
	b.t.Helper()
	return strings.TrimSpace(b.Must(append([]string{"exec", "-d"}, args...)...))
}

// exec is what `tagout execs` shows of a command.
func (b outliving) exec(kid, id string) (wire.Exec, error) {
	b.t.Helper()
	var execs []wire.Exec
	if err := json.Unmarshal([]byte(b.Must("execs", kid, "--json")), &execs); err != nil {
		return wire.Exec{}, err
	}
	for _, e := range execs {
		if e.ID == id {
			return e, nil
		}
	}
	return wire.Exec{}, fmt.Errorf("no command %s among %+v", id, execs)
}

// ended waits for the command's end.
func (b outliving) ended(kid, id string) (e wire.Exec) {
	b.t.Helper()
	b.Until(soon, "the end of "+id, func() (err error) {
		if e, err = b.exec(kid, id); err == nil && e.Exit == nil {
			err = errors.New("it runs")
		}
		return err
	})
	return e
}

// stored waits until the box's store keeps n commands: all that of a command lies there is told by its open pidfds.
func (b outliving) stored(n int) {
	b.t.Helper()
	b.Until(soon, fmt.Sprint("the store to keep ", n, " commands"), func() error {
		pids := b.stores()
		if len(pids) != 1 {
			return fmt.Errorf("%d stores", len(pids))
		}
		dir := fmt.Sprintf("/proc/%d/fd", pids[0])
		files, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		got := 0
		for _, f := range files {
			if to, _ := os.Readlink(filepath.Join(dir, f.Name())); strings.Contains(to, "pidfd") { // it may be gone
				got++
			}
		}
		if got != n {
			return fmt.Errorf("it keeps %d", got)
		}
		return nil
	})
}

// stores are the processes of the box's store, wherever they are.
func (b outliving) stores() (pids []int) {
	b.t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		b.t.Fatal(err)
	}
	for _, path := range lines {
		raw, _ := os.ReadFile(path) // it may be gone
		words := strings.Split(strings.TrimRight(string(raw), "\x00"), "\x00")
		if len(words) == 4 && filepath.Base(words[0]) == "kid-init" && words[1] == "store" && words[3] == b.Inst.Name() {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			if err != nil {
				b.t.Fatal(err)
			}
			pids = append(pids, pid)
		}
	}
	return pids
}

// restart kills sandboxd with -9 and waits for its successor.
func (b outliving) restart() {
	b.t.Helper()
	b.Kill9(instance.Sandboxd)
	b.WaitHealthy(instance.Sandboxd)
}

// lines is how many lines of the command's output are kept by now.
func (b outliving) lines(kid, id string) int {
	b.t.Helper()
	return strings.Count(b.Must("logs", kid, "--exec", id), "\n")
}

const untilOn = "until [ -e on ]; do sleep .05; done; "

// TestDetachedCommandsOutliveKilledSandboxd: sandboxd is killed with -9 while detached commands run. They go on, nothing
// that they write is lost or comes twice, and how they end is known. Afterwards `tagout cleanup` leaves no store.
func TestDetachedCommandsOutliveKilledSandboxd(t *testing.T) {
	t.Parallel()
	b := outliving{start(t), t}
	kid, stopped := b.Spawn(bareCard, nil).Name, b.Spawn(bareCard, nil).Name
	// No more than is kept of a command's output, and no faster than that it lasts.
	count := "i=0; until [ -e on ] || [ $i -ge 100000 ]; do n=0; while [ $n -lt 20 ]; do echo $i; i=$((i+1)); n=$((n+1)); done; sleep .01; done; " + untilOn + "echo end $i >&2; exit 7"
	const limit = 20 * time.Second
	counts := b.detach(kid, "--shell", count)
	dies := b.detach(kid, "--shell", untilOn+"kill -TERM $$")
	late := b.detach("--timeout", limit.String(), kid, "--", "sleep", "300")
	held := b.detach(stopped, "--", "sleep", "300")
	b.stored(4)
	for range 3 {
		before := b.lines(kid, counts)
		b.restart()
		for _, c := range [][2]string{{kid, counts}, {kid, dies}, {kid, late}, {stopped, held}} {
			if e, err := b.exec(c[0], c[1]); err != nil || e.Exit != nil || !e.Detached || !e.Outlives || e.Adopted.IsZero() {
				t.Errorf("after a restart: %+v, %v", e, err)
			}
		}
		b.Until(soon, "more numbers", func() error {
			if n := b.lines(kid, counts); n <= before {
				return fmt.Errorf("%d lines, %d before", n, before)
			}
			return nil
		})
	}
	if shown := b.Must("execs", kid); strings.Count(shown, "  adopted  ") != 3 {
		t.Errorf("shown as adopted:\n%s", shown)
	}
	b.Sh(kid, ": >on")
	b.wantNumbers(kid, counts)
	if e := b.ended(kid, dies); e.Exit.Result != "signaled" || e.Exit.Signal != "SIGTERM" || e.Exit.Code != 143 {
		t.Errorf("ended by a signal: %+v", e.Exit)
	}
	b.Stop(wire.StopRequest{Scope: wire.Scope{Kid: stopped}})
	if e := b.ended(stopped, held); e.Exit.Result != "stopped" {
		t.Errorf("ended by a stop: %+v", e.Exit)
	}
	e := b.ended(kid, late)
	if took := e.Ended.Sub(e.Started); e.Exit.Result != "timeout" || took < limit || took > limit+5*time.Second {
		t.Errorf("with a timeout of %s ended after %s: %+v", limit, took, e.Exit)
	}
	lasts := b.detach(kid, "--", "sleep", "300")
	b.stored(1)
	b.restart()
	if e, err := b.exec(kid, lasts); err != nil || e.Exit != nil {
		t.Errorf("before the cleanup: %+v, %v", e, err)
	}
	b.wantNoStoreAfterCleanup()
}

// wantNumbers compares all that a counting command has written, and its end.
func (b outliving) wantNumbers(kid, id string) {
	b.t.Helper()
	r := b.Tagout("attach", kid, id)
	n := strings.Count(r.Stdout, "\n")
	var want bytes.Buffer
	for i := range n {
		fmt.Fprintln(&want, i)
	}
	if r.Code != 7 || r.Stdout != want.String() || r.Stderr != fmt.Sprintf("end %d\n", n) {
		b.t.Errorf("code %d, %d lines that are not 0 and what follows it, %q", r.Code, n, r.Stderr)
	}
	if e := b.ended(kid, id); e.Exit.Result != "exited" || e.Exit.Code != 7 {
		b.t.Errorf("its end: %+v", e.Exit)
	}
}

// wantNoStoreAfterCleanup has the box killed as a whole and cleaned up.
func (b outliving) wantNoStoreAfterCleanup() {
	b.t.Helper()
	b.StopSupervisor(unix.SIGKILL)
	for _, daemon := range instance.Daemons() {
		b.Kill9(daemon)
	}
	if n := len(b.stores()); n != 1 {
		b.t.Errorf("%d stores before the cleanup, want 1", n)
	}
	b.Must("cleanup")
	if pids := b.stores(); len(pids) != 0 {
		b.t.Errorf("stores that are left: %v", pids)
	}
}

func (b outliving) killStore() {
	b.t.Helper()
	for _, pid := range b.stores() {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			b.t.Fatal(err)
		}
		b.Until(soon, "the store to be gone", func() error {
			if slices.Contains(b.stores(), pid) {
				return errors.New("it is there")
			}
			return nil
		})
	}
}

// TestKilledStoreEndsWhatItKept is the control: where the store is killed too, the command ends with its sandboxd, all of it,
// and that is said. Commands that are detached later outlive the next kill, and so do those whose store is killed while
// sandboxd lives.
func TestKilledStoreEndsWhatItKept(t *testing.T) {
	t.Parallel()
	b := outliving{start(t), t}
	kid := b.Spawn(bareCard, nil).Name
	lost := b.detach(kid, "--shell", "sleep 3141 & sleep 3141")
	b.stored(1)
	b.Freeze(instance.Sandboxd) // or it would give them to another store
	b.killStore()
	b.restart()
	if e := b.ended(kid, lost); e.Exit.Result != "failed" || !strings.Contains(e.Exit.Detail, "sandboxd was restarted while it ran") {
		t.Errorf("without the store: %+v", e.Exit)
	}
	if out := b.Sh(kid, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"); strings.Contains(out.Stdout, "sleep 3141") {
		t.Errorf("left of it: %q", out.Stdout)
	}
	later := b.detach(kid, "--shell", "echo one; "+untilOn+"echo two; exit 4")
	b.stored(1)
	b.restart()
	b.Sh(kid, ": >on")
	if r := b.Tagout("attach", kid, later); r.Code != 4 || r.Stdout != "one\ntwo\n" {
		t.Errorf("detached later: %+v", r)
	}
	again := b.detach(kid, "--", "sleep", "300")
	b.stored(1)
	b.killStore()
	b.stored(1)
	b.restart()
	if e, err := b.exec(kid, again); err != nil || e.Exit != nil || !e.Outlives {
		t.Errorf("with another store: %+v, %v", e, err)
	}
	b.wantNoStoreAfterCleanup()
}
