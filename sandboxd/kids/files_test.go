package kids

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (b *box) read(kid, path string) (string, error) {
	var out bytes.Buffer
	err := b.GetFile(b.t.Context(), kid, "test", path, func(wire.File) io.Writer { return &out })
	return out.String(), err
}

// TestFilesOfAKid (K06): in and out through the kid's own mounts, in /workspace and in /tmp; what the kid sees is what
// is carried, and the other way round; every use is recorded.
func TestFilesOfAKid(t *testing.T) {
	b := newBox(t, "tsbfile")
	b.spawn("k", plan())
	for _, place := range []string{"/workspace", "/tmp"} {
		if _, err := b.PutFile(t.Context(), "k", "test", place+"/in", 0o750, strings.NewReader("in\xff")); err != nil {
			t.Fatal(err)
		}
		if r := b.sh("k", "cat "+place+"/in; stat -c ' %u %a' "+place+"/in; echo out > "+place+"/out; chmod 600 "+place+"/out"); r.stdout.String() != "in\xff 1000 750\n" {
			t.Errorf("%s: the kid sees %q %q", place, r.stdout.String(), r.stderr.String())
		}
		if got, err := b.read("k", place+"/out"); got != "out\n" || err != nil {
			t.Errorf("%s: %q %v", place, got, err)
		}
	}
	b.sh("k", "cd /workspace; ln -s /etc/passwd l; ln -s /proc/self/root r; mkfifo p; truncate -s 5G sparse; ln -s /nowhere/yet d")
	for path, code := range map[string]reason.Code{
		"/workspace/l": reason.PathRefused, "/workspace/r/etc/passwd": reason.PathRefused, "/workspace/p": reason.FileKind, "/workspace/sparse": reason.TooLarge,
		"/workspace/d": reason.PathRefused, "/workspace/../etc/passwd": reason.PathRefused, "/etc/passwd": reason.PathRefused, "/proc/1/root/etc/passwd": reason.PathRefused,
		"/workspacex": reason.PathRefused, "workspace/in": reason.PathRefused, "": reason.PathRefused,
	} {
		if got, err := b.read("k", path); got != "" || ReasonOf(err) != code {
			t.Errorf("get %q: %q %v (%v), want %v", path, got, err, ReasonOf(err), code)
		}
		if code == reason.TooLarge {
			continue // to be replaced is all right
		}
		if _, err := b.PutFile(t.Context(), "k", "test", path, 0o644, strings.NewReader("x")); ReasonOf(err) != code {
			t.Errorf("put %q: %v, want %v", path, err, code)
		}
	}
	list, more, err := b.ListFiles(t.Context(), "k", "test", "/workspace", "l", 2)
	if err != nil || !more || len(list) != 2 || list[0].Name != "out" || list[1].Kind != wire.KindOther {
		t.Errorf("list: %+v %v %v", list, more, err)
	}
	if n := b.audit.count(audit.EventFileRead, audit.OutcomeFail); n != 11 {
		t.Errorf("%d refused reads are recorded", n)
	}
	if n := b.audit.count(audit.EventFileWritten, audit.OutcomeOK); n != 2 {
		t.Errorf("%d writes are recorded", n)
	}
}

// TestFilesOfAKidThatIsDead: the workspace can be looked at, and nothing is changed in it any more.
func TestFilesOfAKidThatIsDead(t *testing.T) {
	b := newBox(t, "tsbfdead")
	k := b.spawn("k", plan())
	b.sh("k", "echo evidence > /workspace/e")
	b.guards.mu.Lock()
	b.guards.stopped[k.Mark] = true
	b.guards.mu.Unlock()
	if _, err := b.PutFile(t.Context(), "k", "test", "/workspace/x", 0o644, strings.NewReader("x")); KindOf(err) != Tagged {
		t.Errorf("put into a stopped kid: %v", err)
	}
	if err := errors.Join(cgroup.Kill(k.Cgroup), cgroup.WaitEmpty(t.Context(), k.Cgroup)); err != nil {
		t.Fatal(err)
	}
	if got, err := b.read("k", "/workspace/e"); got != "evidence\n" || err != nil {
		t.Errorf("workspace: %q %v", got, err)
	}
	if got, err := b.read("k", "/tmp/e"); got != "" || KindOf(err) != Conflict {
		t.Errorf("tmp: %q %v", got, err)
	}
}

// TestAPidThatIsSomebodyElse: a recycled pid leads nowhere.
func TestAPidThatIsSomebodyElse(t *testing.T) {
	b := newBox(t, "tsbfpid")
	b.spawn("a", plan())
	b.spawn("b", plan())
	b.sh("b", "echo b > /workspace/f")
	b.mu.Lock()
	a := b.kids["a"]
	own := a.pid
	a.pid = b.kids["b"].pid
	b.mu.Unlock()
	if got, err := b.read("a", "/workspace/f"); got != "" || err == nil {
		t.Errorf("the neighbour's file: %q %v", got, err)
	}
	b.mu.Lock()
	a.pid = 1
	b.mu.Unlock()
	if got, err := b.read("a", "/tmp/f"); got != "" || KindOf(err) != Conflict {
		t.Errorf("the host's file: %q %v", got, err)
	}
	b.mu.Lock()
	a.pid = own
	b.mu.Unlock()
}

// TestADestroyEndsCarrying: whoever reads slowly does not keep a kid.
func TestADestroyEndsCarrying(t *testing.T) {
	b := newBox(t, "tsbfdest")
	b.spawn("k", plan())
	b.sh("k", "head -c 8M /dev/zero > /workspace/f")
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		done <- b.GetFile(t.Context(), "k", "test", "/workspace/f", func(wire.File) io.Writer { return w })
	}()
	if _, err := io.ReadFull(r, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if err := b.Destroy(t.Context(), "k", "test", "over"); err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, r) // ends with the test's pipe
	if err := <-done; KindOf(err) != Conflict && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("carrying ended with %v", err)
	}
	w.Close()
	b.wantNothingLeft()
}

// TestTooManyCarries: each takes a thread, so there is an end to it.
func TestTooManyCarries(t *testing.T) {
	b := newBox(t, "tsbfmany")
	b.spawn("k", plan())
	b.sh("k", "head -c 8M /dev/zero > /workspace/f")
	r, w := io.Pipe()
	done := make(chan error, maxCarriesOfKid)
	for range maxCarriesOfKid {
		go func() {
			done <- b.GetFile(t.Context(), "k", "test", "/workspace/f", func(wire.File) io.Writer { return w })
		}()
	}
	eventually(t, "all are under way", func() bool { b.mu.Lock(); defer b.mu.Unlock(); return b.carries == maxCarriesOfKid })
	if _, err := b.read("k", "/workspace/f"); KindOf(err) != Capacity {
		t.Errorf("one too many: %v", err)
	}
	go io.Copy(io.Discard, r) // ends with the pipe
	for range maxCarriesOfKid {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	w.Close()
	if _, err := b.read("k", "/workspace/f"); err != nil {
		t.Errorf("afterwards: %v", err)
	}
}
