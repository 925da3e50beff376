package kids

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// touch makes a file in the kid's workspace, which its commands wait for, whoever is there to start one.
func (b *box) touch(name string) {
	b.t.Helper()
	if err := os.WriteFile(b.inWorkspace(name), nil, 0o644); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) wantFile(name string) {
	b.t.Helper()
	eventually(b.t, name+" in the workspace", func() bool {
		_, err := os.Stat(b.inWorkspace(name))
		return err == nil
	})
}

func (b *box) inWorkspace(name string) string {
	return filepath.Join(b.inst.KidDir("whole"), "workspace", name)
}

// await is a line for the shell that waits for a file.
func await(name string) string { return "until [ -e " + name + " ]; do sleep .02; done; " }

// takeOver recovers what servants left behind.
func (b *box) takeOver() {
	b.t.Helper()
	if err := b.Recover(b.t.Context()); err != nil {
		b.t.Fatal(err)
	}
}

// keepsExits says whether this kernel tells how a process ended to who did not reap it.
func keepsExits(t *testing.T) bool {
	t.Helper()
	cmd := exec.Command("sh", "-c", "exit 7")
	fd := -1
	cmd.SysProcAttr = &unix.SysProcAttr{PidFD: &fd}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	cmd.Wait() // with 7
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	return unix.IoctlPidfdInfo(fd, &info) == nil && info.Mask&unix.PIDFD_INFO_EXIT != 0 && info.Exit_code == 7<<8
}

// TestDetachedCommandsOutliveSandboxd (K02, K09): sandboxd is killed with -9 while detached commands run. They go on, not
// signalled, whatever they write, and its successor has all of it and how they ended, as it shows in their status.
func TestDetachedCommandsOutliveSandboxd(t *testing.T) {
	b := newBox(t, "tsboutlive")
	s := b.servant(false)
	across := s.exec(wire.ExecRequest{Shell: "trap 'echo PIPE >&2' PIPE; echo before; " + await("go") + "echo during; echo err >&2; : >during; " + await("on") + "echo after; exit 7"})
	ended := s.exec(wire.ExecRequest{Shell: await("go") + "echo the end; : >ended; exit 3"})
	signaled := s.exec(wire.ExecRequest{Shell: await("go") + ": >signaled; kill -TERM $$"})
	silent := s.exec(wire.ExecRequest{Shell: "exec >&- 2>&-; : >silent; " + await("on") + "exit 5"})
	b.wantFile("silent")
	s.kill()
	b.touch("go")
	for _, name := range []string{"during", "ended", "signaled"} {
		b.wantFile(name)
	}
	doc, err := b.store.Get("whole")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "two to have ended", func() bool { return shells(t, doc.Cgroup) == 2 })
	b.takeOver()
	for _, id := range []string{across, silent} {
		status, err := b.ExecStatus(t.Context(), "whole", id)
		if err != nil || status.Adopted.IsZero() || !status.Outlives || status.Exit != nil || !status.Detached || status.Actor != "test" || len(status.Argv) != 3 {
			t.Errorf("taken over: %+v, %v", status, err)
		}
	}
	b.touch("on")
	b.wantEnd(across, wire.ExecExit{Result: resultExited, Code: 7}, "before\nduring\nafter\n", "err\n")
	b.wantEnd(silent, wire.ExecExit{Result: resultExited, Code: 5}, "", "")
	if keepsExits(t) {
		b.wantEnd(ended, wire.ExecExit{Result: resultExited, Code: 3}, "the end\n", "")
		b.wantEnd(signaled, wire.ExecExit{Result: resultSignaled, Code: 143, Signal: "SIGTERM"}, "", "")
	} else { // nobody knows, and so it is said
		b.wantEnd(ended, wire.ExecExit{Result: resultUnknown, Code: -1}, "the end\n", "")
		b.wantEnd(signaled, wire.ExecExit{Result: resultUnknown, Code: -1}, "", "")
	}
	if n := b.audit.count(audit.EventExecAdopted, audit.OutcomeOK); n != 4 {
		t.Errorf("%d records of commands that were taken over, want 4", n)
	}
	if n := b.audit.count(audit.EventExecEnded, audit.OutcomeOK) + b.audit.count(audit.EventExecEnded, audit.OutcomeFail); n != 4 {
		t.Errorf("%d records of their ends, want 4", n)
	}
	b.wantStoreEmpty()
}

// shells counts the kid's shells: the sleeps that they wait in come and go.
func shells(t *testing.T, dir string) (n int) {
	t.Helper()
	for _, pid := range commands(t, dir) {
		if raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil && string(raw) == "sh\n" {
			n++
		}
	}
	return n
}

// wantEnd waits for the command's end and compares it and all its output.
func (b *box) wantEnd(id string, want wire.ExecExit, stdout, stderr string) {
	b.t.Helper()
	r, lost := b.attached("whole", id)
	got := r.exit
	got.Detail, got.Usage = "", nil
	if got != want || r.stdout.String() != stdout || r.stderr.String() != stderr || lost != 0 {
		b.t.Errorf("%+v %q %q, %d bytes lost; want %+v %q %q", r.exit, r.stdout.String(), r.stderr.String(), lost, want, stdout, stderr)
	}
}

func (b *box) wantStoreEmpty() {
	b.t.Helper()
	eventually(b.t, "the store to be empty", func() bool {
		ids, err := b.cfg.Kept.List()
		return err == nil && len(ids) == 0
	})
}

// TestNoByteIsLostByAKill: sandboxd is killed again and again in the middle of a command's output. In the end what is kept
// of each stream is its end, byte for byte, and with what is said not to be kept it is as much as was written.
func TestNoByteIsLostByAKill(t *testing.T) {
	b := newBox(t, "tsbnobyte")
	s := b.servant(false)
	const lines = 300_000
	id := s.exec(wire.ExecRequest{Shell: fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo out $i; echo err $i >&2; i=$((i+1)); done", lines)})
	log := filepath.Join(b.execsDir("whole"), id, outputName)
	const rounds = 6
	for range rounds {
		from := sizeOf(t, log)
		eventually(t, "more output to be taken", func() bool { return sizeOf(t, log) > from+20_000 })
		s.kill()
		s = b.servant(true)
	}
	s.kill()
	var out, err bytes.Buffer
	for i := range lines {
		fmt.Fprintln(&out, "out", i)
		fmt.Fprintln(&err, "err", i)
	}
	total := int64(out.Len() + err.Len())
	if n := sizeOf(t, log); n >= total {
		t.Fatalf("all %d bytes were there before the last kill: the test proves nothing", n)
	}
	b.takeOver()
	r, lost := b.attached("whole", id)
	if r.exit.Result != resultExited || lost+int64(r.stdout.Len()+r.stderr.Len()) != total {
		t.Errorf("%+v, %d bytes lost, %d and %d kept of %d", r.exit, lost, r.stdout.Len(), r.stderr.Len(), total)
	}
	if !bytes.HasSuffix(out.Bytes(), r.stdout.Bytes()) || !bytes.HasSuffix(err.Bytes(), r.stderr.Bytes()) || r.stdout.Len() == 0 || r.stderr.Len() == 0 {
		t.Errorf("what is kept is not the end of what was written: %d and %d bytes", r.stdout.Len(), r.stderr.Len())
	}
}

func sizeOf(t *testing.T, path string) int64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// TestAFullPipeWaits: a command that writes more than a pipe holds while nobody is there waits, and loses nothing.
func TestAFullPipeWaits(t *testing.T) {
	b := newBox(t, "tsbfull")
	s := b.servant(false)
	id := s.exec(wire.ExecRequest{Shell: await("go") + ": >going; seq 100000 200000; : >written"})
	s.kill()
	b.touch("go")
	b.wantFile("going")
	eventually(t, "it to wait in the kernel", func() bool { return waitsToWrite(t, b, "seq") })
	if _, err := os.Stat(b.inWorkspace("written")); err == nil {
		t.Fatal("it wrote more than a pipe holds: the test proves nothing")
	}
	b.takeOver()
	var want bytes.Buffer
	for i := 100000; i <= 200000; i++ {
		fmt.Fprintln(&want, i)
	}
	b.wantEnd(id, wire.ExecExit{Result: resultExited}, want.String(), "")
}

// waitsToWrite says whether a command of the kid with that name is in write(2) and sleeps.
func waitsToWrite(t *testing.T, b *box, name string) bool {
	t.Helper()
	doc, err := b.store.Get("whole")
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range commands(t, doc.Cgroup) {
		comm, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // it may be gone
		call, _ := os.ReadFile(fmt.Sprintf("/proc/%d/syscall", pid))
		if string(comm) == name+"\n" && strings.HasPrefix(string(call), fmt.Sprint(unix.SYS_WRITE, " 0x1 ")) {
			return true
		}
	}
	return false
}

// TestTimeoutsOutliveSandboxd (K03): the time counts from the request, whoever keeps it.
func TestTimeoutsOutliveSandboxd(t *testing.T) {
	b := newBox(t, "tsbkeeptime")
	s := b.servant(false)
	began := time.Now()
	const short, long = 300 * time.Millisecond, 3 * time.Second
	over := s.exec(wire.ExecRequest{Shell: "sleep 300 & wait", Timeout: short})
	later := s.exec(wire.ExecRequest{Shell: "sleep 301 & wait", Timeout: long})
	s.kill()
	eventually(t, "the short time to be over", func() bool { return time.Since(began) > short })
	b.takeOver()
	b.wantEnd(over, wire.ExecExit{Result: resultTimeout, Code: codeTimeout}, "", "")
	if took := time.Since(began); took > long {
		t.Errorf("what was overdue ended after %s", took)
	}
	b.wantEnd(later, wire.ExecExit{Result: resultTimeout, Code: codeTimeout}, "", "")
	if took := time.Since(began); took < long || took > long+time.Second {
		t.Errorf("a time-out of %s after %s", long, took)
	}
	doc, err := b.store.Get("whole")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "their children to be gone", func() bool { return len(commands(t, doc.Cgroup)) == 0 })
}

// TestSecondRestart: a successor is killed too, before and after it has started commands of its own, which runc does.
func TestSecondRestart(t *testing.T) {
	b := newBox(t, "tsbsecond")
	s := b.servant(false)
	first := s.exec(wire.ExecRequest{Shell: "echo one; " + await("go") + "echo two; : >two; " + await("on") + "echo three; exit 4"})
	s.kill()
	s = b.servant(true)
	second := s.exec(wire.ExecRequest{Shell: "echo uno; " + await("go") + "echo due; " + await("on") + "echo tre >&2; exit 6"})
	s.kill()
	b.touch("go")
	b.wantFile("two")
	s = b.servant(true)
	s.kill()
	b.takeOver()
	b.touch("on")
	b.wantEnd(first, wire.ExecExit{Result: resultExited, Code: 4}, "one\ntwo\nthree\n", "")
	b.wantEnd(second, wire.ExecExit{Result: resultExited, Code: 6}, "uno\ndue\n", "tre\n")
	s.kill()
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	b.takeOver() // what has ended stays, with its output
	b.wantEnd(first, wire.ExecExit{Result: resultExited, Code: 4}, "one\ntwo\nthree\n", "")
	b.wantEnd(second, wire.ExecExit{Result: resultExited, Code: 6}, "uno\ndue\n", "tre\n")
}

// TestInputOutlivesSandboxd: what has its input open keeps it open, pipe or terminal, for whoever attaches next; what has
// not, has not.
func TestInputOutlivesSandboxd(t *testing.T) {
	b := newBox(t, "tsbkeepinput")
	s := b.servant(false)
	pipe := s.exec(wire.ExecRequest{Argv: []string{"cat"}, Input: true, Stdin: []byte("one\n")})
	tty := s.exec(wire.ExecRequest{Argv: []string{"bash", "-c", "echo up; read x; echo got $x; (: >/dev/tty) && exit 9"}, Input: true, TTY: &wire.TermSize{Rows: 24, Cols: 80}})
	none := s.exec(wire.ExecRequest{Shell: "cat; " + await("on"), Stdin: []byte("all\n")})
	s.kill()
	b.takeOver()
	b.touch("on")
	b.wantEnd(none, wire.ExecExit{Result: resultExited}, "all\n", "")
	for id, tc := range map[string]struct {
		input []wire.ExecInput
		out   string
		code  int
	}{
		pipe: {[]wire.ExecInput{{Stdin: []byte("two\n")}, {EOF: true}}, "one\ntwo\n", 0},
		tty:  {[]wire.ExecInput{{Stdin: []byte("this\n")}}, "up\r\nthis\r\ngot this\r\n", 9},
	} {
		input := make(chan wire.ExecInput, len(tc.input))
		for _, in := range tc.input {
			input <- in
		}
		var out bytes.Buffer
		var exit *wire.ExecExit
		err := b.Attach(t.Context(), "whole", id, "test", input, func(f wire.ExecFrame) error {
			out.Write(f.Stdout)
			exit = f.Exit
			return nil
		})
		if err != nil || exit == nil || exit.Code != tc.code || out.String() != tc.out {
			t.Errorf("%q, %+v, %v; want %q and %d", out.String(), exit, err, tc.out, tc.code)
		}
	}
}

// TestAdoptedCommandsObey: ending, stopping and destroying reach them as any other.
func TestAdoptedCommandsObey(t *testing.T) {
	b := newBox(t, "tsbobey")
	s := b.servant(false)
	one := s.exec(wire.ExecRequest{Shell: "sleep 300 & sleep 301"})
	two := s.exec(wire.ExecRequest{Argv: []string{"sleep", "302"}})
	s.kill()
	b.takeOver()
	doc, err := b.store.Get("whole")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.EndExec(t.Context(), "whole", one, "uid:0", "enough"); err != nil {
		t.Fatal(err)
	}
	b.wantEnd(one, wire.ExecExit{Result: resultKilled, Code: codeKilled, Signal: "SIGKILL"}, "", "")
	eventually(t, "the other alone to be left", func() bool { return len(commands(t, doc.Cgroup)) == 1 })
	if err := cgroup.Kill(doc.Cgroup); err != nil { // as killswitchd does
		t.Fatal(err)
	}
	b.guards.tag(wire.Tag{Scope: wire.Scope{Kid: "whole"}, By: "ada"})
	b.wantEnd(two, wire.ExecExit{Result: resultStopped, Code: codeKilled, Signal: "SIGKILL"}, "", "")
	b.guards.mu.Lock()
	b.guards.tags = nil
	b.guards.mu.Unlock()
	if err := b.Destroy(t.Context(), "whole", "test", "end of the test"); err != nil {
		t.Fatal(err)
	}
	b.wantStoreEmpty()
	b.wantNothingLeft()
}

// TestDestroyOfAKidWithAdoptedCommands: nothing is left of them, in the store neither.
func TestDestroyOfAKidWithAdoptedCommands(t *testing.T) {
	b := newBox(t, "tsbadoptend")
	s := b.servant(false)
	s.exec(wire.ExecRequest{Argv: []string{"sleep", "300"}})
	s.kill()
	b.takeOver()
	if err := b.Destroy(t.Context(), "whole", "test", "end of the test"); err != nil {
		t.Fatal(err)
	}
	b.wantStoreEmpty()
	b.wantNothingLeft()
}

// TestOnlyWhatIsKeptOutlives is the control: without the store, or with what it kept lost, or with a record that names
// another cgroup, a detached command does not go on. It is ended with all that it started, and that is said.
func TestOnlyWhatIsKeptOutlives(t *testing.T) {
	for name, harm := range map[string]func(b *box, id string) error{
		"no store": func(b *box, _ string) error { b.cfg.Kept = nil; return nil },
		"a store that died": func(b *box, _ string) error {
			_, err := cgroup.KillAndWait(b.t.Context(), b.layout.V2(b.inst.StoreCgroupRel()))
			return err
		},
		"another cgroup": func(b *box, id string) error { return b.rewriteGroup(id, "exec-of-another") },
		"no such set":    func(b *box, id string) error { return b.cfg.Kept.Drop(id) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "tsbnotkept")
			s := b.servant(false)
			id := s.exec(wire.ExecRequest{Shell: "sleep 300 & sleep 301"})
			s.kill()
			doc, err := b.store.Get("whole")
			if err != nil {
				t.Fatal(err)
			}
			if n := len(commands(t, doc.Cgroup)); n != 3 {
				t.Fatalf("%d processes before, want 3", n)
			}
			if err := harm(b, id); err != nil {
				t.Fatal(err)
			}
			b.takeOver()
			eventually(t, "all of it to be gone", func() bool { return len(commands(t, doc.Cgroup)) == 0 })
			status, err := b.ExecStatus(t.Context(), "whole", id)
			if err != nil || status.Exit == nil || status.Exit.Detail != restarted || !status.Adopted.IsZero() {
				t.Errorf("%+v, %v", status, err)
			}
			if n := b.audit.count(audit.EventExecEnded, audit.OutcomeFail); n != 1 {
				t.Errorf("%d records of its end, want 1", n)
			}
		})
	}
}

// TestAKidFindsNothingOfTheStore: a detached command has pipes and nothing else, and no way to the socket.
func TestAKidFindsNothingOfTheStore(t *testing.T) {
	b := newBox(t, "tsbnoway")
	s := b.servant(false)
	id := s.exec(wire.ExecRequest{Shell: await("go") + "readlink /proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 | sed 's/[0-9].*//'; grep -c store /proc/net/unix /proc/self/mountinfo; ls " + b.inst.RunDir()})
	s.kill()
	b.takeOver()
	b.touch("go") // one that had ended at once would never have been kept
	r, _ := b.attached("whole", id)
	want := "pipe:[\npipe:[\npipe:[\n/proc/net/unix:0\n/proc/self/mountinfo:0\n"
	if r.stdout.String() != want || !strings.Contains(r.stderr.String(), "No such file") {
		t.Errorf("%q %q", r.stdout.String(), r.stderr.String())
	}
	var st unix.Stat_t
	if err := unix.Stat(b.inst.StoreSocket(), &st); err == nil && st.Mode&0o777 != 0o600 {
		t.Errorf("the store's socket has the mode %o", st.Mode&0o777)
	}
}

// rewriteGroup changes the name of the command's cgroup in its record.
func (b *box) rewriteGroup(id, group string) error {
	path := filepath.Join(b.execsDir("whole"), id, execRecordName)
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var rec execRecord
	if err := json.Unmarshal(raw, &rec); err != nil {
		return err
	}
	rec.Group = group
	if raw, err = json.Marshal(&rec); err != nil {
		return err
	}
	return os.WriteFile(path, raw, 0o600)
}
