package logtail

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// heard is what a tail told of.
type heard struct{ lines, moved, gone []string }

func (h *heard) handler() Handler {
	return Handler{
		Line:  func(line []byte, _ string, off int64) { h.lines = append(h.lines, fmt.Sprintf("%d:%s", off, line)) },
		Moved: func(_ string, size int64, replaced bool) { h.moved = append(h.moved, fmt.Sprint(size, replaced)) },
		Gone:  func(log string) { h.gone = append(h.gone, filepath.Base(log)) },
	}
}

func TestTail(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "proxy"), 0o700))
	log := filepath.Join(dir, "proxy", "proxy.jsonl")
	write := func(flag int, text string) {
		t.Helper()
		f, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|flag, 0o600)
		must(t, err)
		_, err = f.WriteString(text)
		must(t, err)
		must(t, f.Close())
	}
	var h heard
	tail := New(dir, nil, []byte("deny"), []byte("gap"))
	step := func(want heard) {
		t.Helper()
		h = heard{}
		if failed := tail.Poll(t.Context(), h.handler()); len(failed) > 0 {
			t.Fatal(failed)
		}
		if !slices.Equal(h.lines, want.lines) || !slices.Equal(h.moved, want.moved) || !slices.Equal(h.gone, want.gone) {
			t.Fatalf("heard %q, want %q", h, want)
		}
	}
	step(heard{})
	write(0, "deny 1\nallow 2\ngap 3\nden")
	step(heard{lines: []string{"0:deny 1", "15:gap 3"}})
	write(os.O_APPEND, "y 4\n")
	step(heard{lines: []string{"21:deny 4"}})
	tail = New(dir, tail.Marks, []byte("deny")) // a restart
	step(heard{})
	write(os.O_TRUNC, "deny\n")
	step(heard{moved: []string{"5 false"}})
	must(t, os.Rename(log, log+".old"))
	step(heard{gone: []string{"proxy.jsonl"}})
	step(heard{})
	write(os.O_APPEND, "deny 5\n")
	step(heard{lines: []string{"0:deny 5"}, moved: []string{"0 true"}})
	write(os.O_APPEND, strings.Repeat("x", 2*Chunk)+"\ndeny 6\n")
	if failed := tail.Poll(t.Context(), (&heard{}).handler()); len(failed) != 1 {
		t.Errorf("a line without an end is no trouble: %v", failed)
	}
	for range 2 {
		tail.Poll(t.Context(), h.handler()) // goes on behind it
	}
	if !strings.HasSuffix(strings.Join(h.lines, " "), "deny 6") {
		t.Errorf("what came behind a long line was not read: %q", h.lines)
	}
	must(t, os.RemoveAll(filepath.Join(dir, "proxy")))
	step(heard{gone: []string{"proxy.jsonl"}})
}

// TestATailFollowsIntoTheNextFile: nothing is lost or read twice, however many pieces were closed between two looks, and
// nobody is told of a gap; the same with a file that was put there by somebody else is told.
func TestATailFollowsIntoTheNextFile(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	log := filepath.Join(dir, "proxy", "proxy.jsonl")
	closed := func(n int) string {
		return filepath.Join(dir, "proxy", "shards", fmt.Sprintf("%012d-20260101T000000Z.jsonl", n))
	}
	must(t, os.MkdirAll(filepath.Dir(closed(0)), 0o700))
	add := func(text string) {
		t.Helper()
		f, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		must(t, err)
		_, err = f.WriteString(text)
		must(t, err)
		must(t, f.Close())
	}
	var h heard
	rolled := 0
	handler := h.handler()
	handler.Rolled = func(string) { rolled++ }
	tail := New(dir, nil, []byte("deny"))
	poll := func(tail *Tail, lines ...string) {
		t.Helper()
		h = heard{}
		if failed := tail.Poll(t.Context(), handler); len(failed) > 0 {
			t.Fatal(failed)
		}
		if !slices.Equal(h.lines, lines) {
			t.Fatalf("heard %q, want %q", h.lines, lines)
		}
	}
	add("deny 0\n")
	poll(tail, "0:deny 0")
	add("deny 1\n")
	must(t, os.Rename(log, closed(0)))
	poll(tail) // amid the change
	if len(h.gone) > 0 {
		t.Errorf("amid the change: %q", h)
	}
	add("deny 2\n")
	must(t, os.Rename(log, closed(2)))
	add("deny 3\n")
	marks := New(dir, tail.Marks).Marks
	poll(tail, "7:deny 1", "0:deny 2", "0:deny 3")
	if len(h.moved) > 0 || rolled != 2 {
		t.Errorf("rolled %d times, moved %q", rolled, h.moved)
	}
	poll(tail)
	poll(New(dir, marks, []byte("deny")), "7:deny 1", "0:deny 2", "0:deny 3") // after a restart

	must(t, os.Truncate(log, 2))
	must(t, os.Rename(log, closed(3)))
	add("deny 4\n")
	poll(tail, "0:deny 4")
	if !slices.Equal(h.moved, []string{"2 false"}) {
		t.Errorf("a piece that was cut before it was closed: %q", h)
	}
	must(t, os.WriteFile(log+".other", []byte("deny 5\n"), 0o600))
	must(t, os.Rename(log+".other", log))
	poll(tail, "0:deny 5")
	if !slices.Equal(h.moved, []string{"0 true"}) {
		t.Errorf("a file that is not a next piece: %q", h)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
