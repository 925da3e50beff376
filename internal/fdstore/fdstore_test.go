package fdstore

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "store" {
		if err := NewStore(ListenFD).Serve(); err != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	if len(os.Args) > 2 && os.Args[1] == "other" {
		fmt.Print(beAnother(os.Args[2]))
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// place is a socket's path, and notes the stores that were started.
type place struct {
	Config
	t    *testing.T
	pids []int
}

func newPlace(t *testing.T) *place {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &place{t: t}
	p.Config = Config{Socket: filepath.Join(t.TempDir(), "s"), Program: []string{self, "store"}, Place: func(pid int) error { p.pids = append(p.pids, pid); return nil }}
	return p
}

// client is one that is closed in the end, and what it put is dropped.
func (p *place) client() *Client {
	c := NewClient(p.Config)
	p.t.Cleanup(func() {
		ids, err := c.List()
		for _, id := range ids {
			err = errors.Join(err, c.Drop(id))
		}
		c.Close()
		if err != nil {
			p.t.Error(err)
		}
	})
	return c
}

func (p *place) alone() int {
	p.t.Helper()
	if len(p.pids) != 1 {
		p.t.Fatalf("%d stores were started, want 1", len(p.pids))
	}
	return p.pids[0]
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 5 s for %s", what)
		}
	}
}

func gone(pid int) bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) }

// TestKeptPipesStayWhole: what was written to a pipe while nobody but the store had its other end is there, for whoever
// takes it; the writer is not signalled. Dropped, the pipe is broken.
func TestKeptPipesStayWhole(t *testing.T) {
	p := newPlace(t)
	first := NewClient(p.Config)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := first.Put("a", []int{int(r.Fd())}); err != nil {
		t.Fatal(err)
	}
	r.Close()
	first.Close() // and with it all that this process had of the reading end
	if _, err := w.WriteString("while nobody was there"); err != nil {
		t.Fatal(err)
	}
	second := p.client()
	if ids, err := second.List(); err != nil || !slices.Equal(ids, []string{"a"}) {
		t.Errorf("kept: %q, %v", ids, err)
	}
	files, err := second.Get("a")
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	again := os.NewFile(uintptr(files[0]), "again")
	buf := make([]byte, 100)
	if n, err := again.Read(buf); err != nil || string(buf[:n]) != "while nobody was there" {
		t.Errorf("%q, %v", buf[:n], err)
	}
	if err := second.Drop("a"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("for the reader that is left"); err != nil {
		t.Error(err)
	}
	again.Close()
	if _, err := w.WriteString("x"); !errors.Is(err, unix.EPIPE) {
		t.Errorf("after it was dropped: %v, want EPIPE", err)
	}
	if _, err := second.Get("a"); !errors.Is(err, ErrNotKept) {
		t.Errorf("dropped: %v", err)
	}
	pid := p.alone()
	second.Close()
	until(t, "a store that keeps nothing to end", func() bool { return gone(pid) })
}

// TestALostStoreIsReplaced: where the store was killed, what it kept is gone, which is said, and the next set starts
// another. Looking alone starts none.
func TestALostStoreIsReplaced(t *testing.T) {
	p := newPlace(t)
	c := p.client()
	if ids, err := c.List(); err != nil || ids != nil || len(p.pids) != 0 {
		t.Errorf("looking: %q, %v, started %v", ids, err, p.pids)
	}
	if err := c.Put("a", []int{0, 1}); err != nil {
		t.Fatal(err)
	}
	unix.Kill(p.alone(), unix.SIGKILL)
	until(t, "the store to be gone", func() bool { return gone(p.pids[0]) })
	if _, err := c.Get("a"); !errors.Is(err, ErrNotKept) {
		t.Errorf("kept by a store that is dead: %v", err)
	}
	if err := c.Put("b", []int{0, 1, 2}); err != nil || len(p.pids) != 2 {
		t.Fatalf("%v, started %v", err, p.pids)
	}
	if files, err := c.Get("b"); err != nil || len(files) != 3 {
		t.Errorf("%v, %v", files, err)
	} else {
		closeAll(files)
	}
}

// TestAStoreThatHangsIsLeft: whoever asks has a deadline.
func TestAStoreThatHangsIsLeft(t *testing.T) {
	p := newPlace(t)
	c := p.client()
	if err := c.Put("a", []int{0}); err != nil {
		t.Fatal(err)
	}
	unix.Kill(p.alone(), unix.SIGSTOP)
	defer func() {
		unix.Kill(p.alone(), unix.SIGCONT)
		c.hung = time.Time{}
	}()
	began := time.Now()
	if err := c.Put("b", []int{0}); err == nil || time.Since(began) > answerTime+time.Second {
		t.Errorf("%v after %v", err, time.Since(began))
	}
	began = time.Now()
	if _, err := c.Get("a"); err == nil || errors.Is(err, ErrNotKept) || time.Since(began) > answerTime {
		t.Errorf("the next one: %v after %v", err, time.Since(began))
	}
}

// TestBounds: a set is of a few descriptors, and there are so many sets; a store without room for more descriptors says
// so and goes on.
func TestBounds(t *testing.T) {
	p := newPlace(t)
	c := p.client()
	for id, files := range map[string][]int{"": {0}, "none": {}, "many": {0, 0, 0, 0, 0}, "a b": {0}, strings.Repeat("x", maxID+1): {0}} {
		if err := c.Put(id, files); err == nil {
			t.Errorf("%q with %d descriptors was taken", id, len(files))
		}
	}
	if err := c.Put("first", []int{0}); err != nil {
		t.Fatal(err)
	}
	few := unix.Rlimit{Cur: 32, Max: 32}
	if err := unix.Prlimit(p.alone(), unix.RLIMIT_NOFILE, &few, nil); err != nil {
		t.Fatal(err)
	}
	n, err := 0, error(nil)
	for ; err == nil && n < 64; n++ {
		err = c.Put(fmt.Sprint(n), []int{0, 1, 2})
	}
	if !errors.Is(err, unix.EMFILE) || n < 5 {
		t.Errorf("after %d sets: %v, want EMFILE", n, err)
	}
	if err := c.Drop("0"); err != nil {
		t.Fatalf("dropping one of a full store: %v", err)
	}
	// The new one is there before the old one goes, so even this takes room.
	if err := c.Put("first", []int{0}); err != nil {
		t.Errorf("another in the place of one that is kept, with room again: %v", err)
	}
}

// TestGarbageEndsTheConnectionOnly: what is no request is refused, and the store goes on for others.
func TestGarbageEndsTheConnectionOnly(t *testing.T) {
	p := newPlace(t)
	c := p.client()
	if err := c.Put("a", []int{0}); err != nil {
		t.Fatal(err)
	}
	for _, msg := range []string{"", "x", "pa", "p", "g", "l" + strings.Repeat("y", 10_000), "\x00"} {
		other := NewClient(p.Config)
		if err := other.dial(); err != nil {
			t.Fatal(err)
		}
		if err := send(other.conn, []byte(msg), nil, 0); err != nil {
			t.Fatal(err)
		}
		buf := make([]byte, maxAnswer)
		if n, files, err := receive(other.conn, buf, 0); err == nil && n > 0 && buf[0] == 0 || len(files) > 0 {
			t.Errorf("%.10q was answered with %.20q and %d descriptors", msg, buf[:n], len(files))
		}
		other.Close()
	}
	if ids, err := c.List(); err != nil || !slices.Equal(ids, []string{"a"}) {
		t.Errorf("kept: %q, %v", ids, err)
	}
}

// TestOthersAreNotServed: the socket is the user's own, and so says the kernel of who comes past its mode.
func TestOthersAreNotServed(t *testing.T) {
	testroot.Require(t)
	p := newPlace(t)
	c := p.client()
	if err := c.Put("a", []int{0}); err != nil {
		t.Fatal(err)
	}
	var st unix.Stat_t
	if err := unix.Stat(p.Socket, &st); err != nil || st.Mode&0o777 != 0o600 {
		t.Errorf("mode %o, %v", st.Mode&0o777, err)
	}
	for _, open := range []bool{false, true} {
		if open { // as if the directory and the mode were wrong
			for dir := p.Socket; dir != "/tmp" && dir != "/"; dir = filepath.Dir(dir) {
				if err := os.Chmod(dir, 0o777); err != nil {
					t.Fatal(err)
				}
			}
		}
		out, err := exec.Command(p.Program[0], "other", p.Socket).CombinedOutput()
		if got := string(out); err != nil || open && got != "nothing" || !open && got != "permission denied" {
			t.Errorf("open %v: another user got %q, %v", open, got, err)
		}
	}
}

// beAnother asks for a set as another user, and says what came of it.
func beAnother(socket string) string {
	if err := unix.Setuid(65534); err != nil {
		return err.Error()
	}
	c := NewClient(Config{Socket: socket})
	if err := c.dial(); errors.Is(err, unix.EACCES) {
		return "permission denied"
	} else if err != nil {
		return err.Error()
	}
	if answer, files, err := c.exchange(opGet, "a", nil); err == nil {
		return fmt.Sprintf("%x with %d descriptors", answer, len(files))
	}
	return "nothing"
}
