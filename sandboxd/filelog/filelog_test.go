package filelog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/session"
	"tagout/internal/testroot"
)

// log keeps records, and adds up what the metrics are told.
type log struct {
	mu           sync.Mutex
	records      []audit.Record
	all, without uint64
}

func (l *log) Log(r audit.Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, r)
}

func (l *log) Recorded(_ string, n, folded uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all += n
	l.without += folded
}

// story is what was recorded of a kid, without directories: "created /tmp/a".
func (l *log) story(kid string) (out []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		if r.Kid != kid {
			continue
		}
		line := strings.TrimPrefix(r.Event, "file.") + " " + r.Fields["path"]
		if from := r.Fields["from"]; from != "" {
			line += " from " + from
		}
		out = append(out, strings.TrimSpace(line))
	}
	return out
}

// sum is how many events of a kind the records of a kid stand for.
func (l *log) sum(kid, event string) (n uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		if r.Kid == kid && r.Event == event {
			n += max(r.Count, 1)
		}
	}
	return n
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// scratch is a tmpfs of its own.
func scratch(t testing.TB) string {
	t.Helper()
	testroot.Require(t)
	dir := t.TempDir()
	must(t, unix.Mount("tagout", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "size=64m"))
	t.Cleanup(func() { must(t, unix.Unmount(dir, unix.MNT_DETACH)) })
	return dir
}

func newWatch(t testing.TB) (*Watch, *log) {
	l := &log{}
	w := New(Config{Audit: l, Metrics: l, Log: slog.New(slog.DiscardHandler)})
	t.Cleanup(func() {
		for _, g := range w.groups {
			g.close()
		}
	})
	return w, l
}

// end ends the watch of a session and closes what it gives back.
func end(w *Watch, id string) {
	for _, r := range w.End(id) {
		r.Dir.Close()
	}
}

// read reads what is queued.
func read(w *Watch) {
	for _, g := range w.groups {
		g.mu.Lock()
		g.drain()
		g.mu.Unlock()
	}
}

func kidOf(name string) *session.Session {
	return &session.Session{ID: "s-" + name, Kid: name, Mark: 7, Card: "c"}
}

// TestEachOperationIsRecorded with the names of the moment, whatever happens to them before anybody reads.
func TestEachOperationIsRecorded(t *testing.T) {
	dir := scratch(t)
	must(t, os.Mkdir(filepath.Join(dir, "before"), 0o700))
	w, l := newWatch(t)
	w.Add(kidOf("a"), []Place{{Dir: dir, As: "/workspace"}}, false)
	file := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.WriteFile(file("one"), []byte("x"), 0o600))
	must(t, os.Rename(file("one"), file("two")))
	must(t, os.Mkdir(file("d"), 0o700))
	must(t, os.WriteFile(file("d/in"), []byte("x"), 0o600))
	must(t, os.Rename(file("d"), file("e")))
	must(t, os.WriteFile(file("e/later"), nil, 0o600))
	read(w) // else a delete comes with the create before it
	for _, name := range []string{"e/in", "e/later", "e"} {
		must(t, os.Remove(file(name)))
	}
	must(t, os.Symlink("/etc/shadow", file("link")))
	must(t, unix.Mkfifo(file("pipe"), 0o600))
	must(t, os.WriteFile(file("before/x\n\xff"), nil, 0o600))
	read(w)
	must(t, os.Link(file("two"), file("three")))
	must(t, os.Remove(file("two")))
	end(w, "s-a")
	want := []string{
		"created /workspace/one", "changed /workspace/one", "renamed /workspace/two from /workspace/one",
		"created /workspace/d", "created /workspace/d/in", "changed /workspace/d/in", "renamed /workspace/e from /workspace/d",
		"created /workspace/e/later", "changed /workspace/e/later", "deleted /workspace/e/in", "deleted /workspace/e/later", "deleted /workspace/e",
		"created /workspace/link", "created /workspace/pipe", `created "/workspace/before/x\n\xff"`, `changed "/workspace/before/x\n\xff"`,
		"created /workspace/three", "deleted /workspace/two",
	}
	got := l.story("a")
	if !slices.Equal(got, want) {
		t.Errorf("recorded\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	l.mu.Lock()
	for _, r := range l.records {
		if r.Session != "s-a" || r.Mark != 7 || r.Actor != "sandboxd" || r.Process == nil || r.Process.PID != os.Getpid() {
			t.Errorf("whose it is: %+v", r)
		}
	}
	l.mu.Unlock()
	// The control: after the end nothing is recorded.
	must(t, os.WriteFile(file("unseen"), nil, 0o600))
	w.Add(kidOf("b"), []Place{{Dir: dir, As: "/workspace"}}, false)
	end(w, "s-b")
	if now := l.story("a"); len(now) != len(got) || len(l.story("b")) != 0 {
		t.Errorf("without a watch: %q", now[len(got):])
	}
}

// TestAFloodIsCounted exactly, or a gap says that it could not be, and another kid's files are told one by one.
func TestAFloodIsCounted(t *testing.T) {
	noisy, quiet := scratch(t), scratch(t)
	w, l := newWatch(t)
	w.Add(kidOf("noisy"), []Place{{Dir: noisy, As: "/tmp"}}, false)
	w.Add(kidOf("quiet"), []Place{{Dir: quiet, As: "/tmp"}}, false)
	const flood = 8000 // less than the kernel keeps for a reader that is late
	began := time.Now()
	for i := range flood {
		must(t, unix.Mknod(filepath.Join(noisy, fmt.Sprint(i)), unix.S_IFREG|0o600, 0))
	}
	took := time.Since(began)
	must(t, os.Mkdir(filepath.Join(quiet, "one"), 0o700))
	end(w, "s-noisy")
	end(w, "s-quiet")
	if n := l.sum("noisy", audit.EventFileCreated); n != flood || l.sum("noisy", audit.EventGap) > 0 {
		t.Errorf("%d files recorded, want %d; gaps %d", n, flood, l.sum("noisy", audit.EventGap))
	}
	if got := l.story("noisy"); len(got) > 2*lines*int(took.Seconds()+2) {
		t.Errorf("%d records of a flood of %v", len(got), took)
	}
	if got := l.story("quiet"); !slices.Equal(got, []string{"created /tmp/one"}) {
		t.Errorf("of the quiet one: %q", got)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all != flood+1 || l.without < flood-2*lines*uint64(took.Seconds()+2) {
		t.Errorf("the metrics say %d, %d without a record", l.all, l.without)
	}
}

// TestAQueueThatRunsOverIsAGap, and afterwards names are right again.
func TestAQueueThatRunsOverIsAGap(t *testing.T) {
	dir := scratch(t)
	w, l := newWatch(t)
	w.Add(kidOf("a"), []Place{{Dir: dir, As: "/tmp"}}, false)
	g := w.groups[0]
	g.mu.Lock() // nobody reads
	must(t, os.Mkdir(filepath.Join(dir, "d"), 0o700))
	for i := range 20000 {
		must(t, unix.Mknod(filepath.Join(dir, fmt.Sprint(i)), unix.S_IFREG|0o600, 0))
	}
	must(t, os.Rename(filepath.Join(dir, "d"), filepath.Join(dir, "e"))) // nobody is told
	g.mu.Unlock()
	read(w)
	must(t, os.Mkdir(filepath.Join(dir, "e", "in"), 0o700))
	end(w, "s-a")
	if n := l.sum("a", audit.EventGap); n == 0 {
		t.Error("no gap")
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.records {
		if r.Event == audit.EventGap && (r.Fields[audit.FieldLost] != "file" || r.Fields[audit.FieldBlind] != "" || r.Mark != 7) {
			t.Errorf("the gap: %+v", r)
		}
		if strings.Contains(r.Fields["path"], "d/in") {
			t.Errorf("a name from before the gap: %+v", r)
		}
	}
}

// TestPartsOfAnOverlay are named as the kid names them; what the overlay does for itself is not told.
func TestPartsOfAnOverlay(t *testing.T) {
	dir := scratch(t)
	lower, upper, work, merged := filepath.Join(dir, "lower"), filepath.Join(dir, "upper"), filepath.Join(dir, "work"), filepath.Join(dir, "merged")
	for _, d := range []string{lower, upper, work, merged} {
		must(t, os.Mkdir(d, 0o755))
	}
	must(t, os.WriteFile(filepath.Join(lower, "old"), []byte("x"), 0o644))
	must(t, os.WriteFile(filepath.Join(lower, "gone"), []byte("x"), 0o644))
	must(t, unix.Mount("tagout", merged, "overlay", 0, "lowerdir="+lower+",upperdir="+upper+",workdir="+work))
	t.Cleanup(func() { must(t, unix.Unmount(merged, 0)) })
	w, l := newWatch(t)
	w.Add(kidOf("a"), []Place{{Dir: dir, Parts: []Part{{In: "upper", As: "/usr"}}}}, false)
	must(t, os.WriteFile(filepath.Join(merged, "new"), nil, 0o644))
	must(t, os.Remove(filepath.Join(merged, "gone")))
	must(t, os.Remove(filepath.Join(merged, "new")))
	end(w, "s-a")
	got := l.story("a")
	for _, want := range []string{"created /usr/new", "deleted /usr/gone", "deleted /usr/new"} {
		if !slices.Contains(got, want) {
			t.Errorf("%s is not recorded", want)
		}
	}
	for _, line := range got {
		if !strings.Contains(line, " /usr/") || strings.Contains(line, "work") {
			t.Errorf("recorded: %s", line)
		}
	}
}

// TestManyKidsShareQueues, and each one's files are its own.
func TestManyKidsShareQueues(t *testing.T) {
	w, l := newWatch(t)
	var dirs []string
	for i := range groups + 8 {
		dirs = append(dirs, scratch(t))
		w.Add(kidOf(fmt.Sprint(i)), []Place{{Dir: dirs[i], As: "/tmp"}}, false)
	}
	if len(w.groups) != groups {
		t.Errorf("%d queues", len(w.groups))
	}
	for i, dir := range dirs {
		must(t, os.Mkdir(filepath.Join(dir, fmt.Sprint("of", i)), 0o700))
	}
	for i := range dirs {
		end(w, fmt.Sprint("s-", i))
		if got := l.story(fmt.Sprint(i)); !slices.Equal(got, []string{fmt.Sprint("created /tmp/of", i)}) {
			t.Errorf("of kid %d: %q", i, got)
		}
	}
	for _, g := range w.groups {
		if g.size() != 0 || len(g.places) != 0 {
			t.Errorf("left over: %d kids, %d places", g.size(), len(g.places))
		}
	}
}

// TestAPlaceThatCannotBeWatchedIsAGap, and so is one that was not watched for a while.
func TestAPlaceThatCannotBeWatchedIsAGap(t *testing.T) {
	testroot.Require(t)
	w, l := newWatch(t)
	w.Add(kidOf("a"), []Place{{Dir: filepath.Join(t.TempDir(), "missing"), As: "/tmp"}}, false)
	if l.sum("a", audit.EventGap) != 1 {
		t.Errorf("recorded %+v", l.records)
	}
	w.Add(kidOf("b"), []Place{{Dir: scratch(t), As: "/tmp"}}, true)
	if l.sum("b", audit.EventGap) != 1 {
		t.Errorf("recorded %+v", l.records)
	}
	end(w, "s-a")
	end(w, "s-b")
	end(w, "nobody")
}

func FuzzParse(f *testing.F) {
	whole := make([]byte, metaLen)
	binary.NativeEndian.PutUint32(whole, uint32(metaLen+infoFH+8))
	binary.NativeEndian.PutUint16(whole[offMeta:], metaLen)
	info := make([]byte, infoFH+8)
	info[0] = unix.FAN_EVENT_INFO_TYPE_DFID_NAME
	binary.NativeEndian.PutUint16(info[2:], uint16(len(info)))
	binary.NativeEndian.PutUint32(info[infoFSID:], 4)
	f.Add(append(whole, info...))
	f.Fuzz(func(t *testing.T, raw []byte) {
		for len(raw) > 0 {
			_, rest, err := parse(raw)
			if err != nil {
				if !errors.Is(err, errShort) {
					t.Error(err)
				}
				return
			}
			if len(rest) >= len(raw) {
				t.Fatal("it does not get on")
			}
			raw = rest
		}
	})
}

func BenchmarkFlood(b *testing.B) {
	dir := scratch(b)
	w, _ := newWatch(b)
	w.Add(kidOf("a"), []Place{{Dir: dir, As: "/tmp"}}, false)
	defer end(w, "s-a")
	name := filepath.Join(dir, "x")
	for b.Loop() {
		must(b, unix.Mknod(name, unix.S_IFREG|0o600, 0))
		must(b, unix.Unlink(name))
	}
}
