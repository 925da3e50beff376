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

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
