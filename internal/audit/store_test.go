package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// testLog is a log of its own in a directory that more than one logger writes, one after the other.
type testLog struct {
	t    *testing.T
	dir  string
	size int64 // of a shard; 0: as in production
	now  func() time.Time
}

func newTestLog(t *testing.T) *testLog {
	return &testLog{t: t, dir: filepath.Join(t.TempDir(), "x"), now: time.Now}
}

func (tl *testLog) path() string { return filepath.Join(tl.dir, "x.jsonl") }

func (tl *testLog) open() *Logger {
	tl.t.Helper()
	if err := os.MkdirAll(tl.dir, 0o700); err != nil {
		tl.t.Fatal(err)
	}
	l, err := OpenWith(tl.path(), "test", "x", Options{ShardBytes: tl.size, Now: tl.now})
	if err != nil {
		tl.t.Fatal(err)
	}
	return l
}

// crash leaves the logger as kill -9 would: what was written is written, nothing is ended.
func (tl *testLog) crash(l *Logger) {
	tl.t.Helper()
	tl.sync(l)
	s := l.f.(*store)
	s.Close()
}

func (tl *testLog) sync(l *Logger) {
	tl.t.Helper()
	ctx, cancel := context.WithTimeout(tl.t.Context(), 20*time.Second)
	defer cancel()
	if err := l.Sync(ctx); err != nil {
		tl.t.Fatalf("%v; the log says %v", err, l.Err())
	}
}

func (tl *testLog) log(l *Logger, details ...string) {
	tl.t.Helper()
	for _, d := range details {
		l.Log(Record{Event: EventLookup, Detail: d})
		tl.sync(l)
	}
}

func (tl *testLog) end(l *Logger) {
	tl.t.Helper()
	if err := l.Close(); err != nil {
		tl.t.Fatal(err)
	}
}

// lines returns the whole log by its pieces, which must follow each other unless holes are expected.
func (tl *testLog) lines() []string {
	tl.t.Helper()
	shards, err := ShardsOf(filepath.Dir(tl.dir), "x")
	if err != nil {
		tl.t.Fatal(err)
	}
	var out []string
	for _, s := range shards {
		r, err := s.Open()
		if err != nil {
			tl.t.Fatal(err)
		}
		raw, err := io.ReadAll(r)
		r.Close()
		if err != nil {
			tl.t.Fatal(err)
		}
		raw = raw[:bytes.LastIndexByte(raw, '\n')+1] // half a record that somebody cut is none
		for uint64(len(out)) < s.First {
			out = append(out, "")
		}
		if len(raw) > 0 {
			out = append(out, strings.Split(strings.TrimSuffix(string(raw), "\n"), "\n")...)
		}
	}
	return out
}

// whole checks that the tree is that of the lines, in every node, as golang.org/x/mod computes it, and that the newest
// checkpoint is of all or, where the log did not end, of some of them. Lines that are gone are known by their hashes.
func (tl *testLog) whole(ended bool) []string {
	tl.t.Helper()
	lines := tl.lines()
	raw, err := os.ReadFile(filepath.Join(tl.dir, HashFile))
	if err != nil {
		tl.t.Fatal(err)
	}
	var want []tlog.Hash
	reader := tlog.HashReaderFunc(func(at []int64) (out []tlog.Hash, err error) {
		for _, i := range at {
			out = append(out, want[i])
		}
		return out, nil
	})
	for i, line := range lines {
		h := tlog.RecordHash([]byte(line))
		if line == "" {
			h = tlog.Hash(raw[32*tlog.StoredHashIndex(0, int64(i)):])
		}
		hs, err := tlog.StoredHashesForRecordHash(int64(i), h, reader)
		if err != nil {
			tl.t.Fatal(err)
		}
		want = append(want, hs...)
	}
	if len(raw) != 32*len(want) {
		tl.t.Fatalf("the tree has %d hashes, want %d of %d lines", len(raw)/32, len(want), len(lines))
	}
	for i, h := range want {
		if !bytes.Equal(raw[32*i:32*i+32], h[:]) {
			tl.t.Fatalf("hash %d of the tree is wrong", i)
		}
	}
	c := tl.checkpoint()
	root, err := tlog.TreeHash(int64(c.Size), reader)
	if err != nil || root != tlog.Hash(c.Root) || ended && c.Size != uint64(len(lines)) {
		tl.t.Fatalf("the checkpoint is of %d records, there are %d; same root: %v, %v", c.Size, len(lines), root == tlog.Hash(c.Root), err)
	}
	return lines
}

func (tl *testLog) checkpoint() Checkpoint {
	tl.t.Helper()
	public, err := os.ReadFile(filepath.Join(tl.dir, PublicKeyFile))
	if err != nil {
		tl.t.Fatal(err)
	}
	key, err := note.NewVerifier(strings.TrimSpace(string(public)))
	if err != nil {
		tl.t.Fatal(err)
	}
	signed, err := os.ReadFile(filepath.Join(tl.dir, CheckpointFile))
	if err != nil {
		tl.t.Fatal(err)
	}
	c, err := OpenCheckpoint(signed, key)
	if err != nil || c.Origin != "tagout/test/x" {
		tl.t.Fatal(c, err)
	}
	return c
}

// gaps returns the gap records' causes, with counts.
func gaps(lines []string) []string {
	var out []string
	for _, line := range lines {
		if r := parse(line); r.Event == EventGap {
			out = append(out, fmt.Sprint(r.Fields[FieldCause], r.Count))
		}
	}
	return out
}

func TestTheTreeGrowsWithTheLog(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	tl.size = 2000
	for life := range 4 {
		l := tl.open()
		for i := range 13 {
			tl.log(l, fmt.Sprint(life, i))
		}
		tl.end(l)
		tl.whole(true)
	}
	lines := tl.whole(true)
	if g := gaps(lines); len(g) > 0 {
		t.Errorf("gaps %v", g)
	}
	seen := 0
	for i, line := range lines {
		r := parse(line)
		if r.Event == EventLookup {
			seen++
		} else if first, ok := headerFirst([]byte(line)); !ok || first != uint64(i) {
			t.Errorf("line %d: %s", i, line)
		}
		if i > 0 && r.ID <= parse(lines[i-1]).ID {
			t.Errorf("the ID of line %d does not grow", i)
		}
	}
	if shards, _ := ShardsOf(filepath.Dir(tl.dir), "x"); seen != 52 || len(shards) < 4 {
		t.Errorf("%d records in %d shards", seen, len(shards))
	}
	if info, err := os.Stat(filepath.Join(tl.dir, KeyFile)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the key: %v %v", info, err)
	}
}

// TestWhatHappensToTheLiveFile: each leaves a log whose tree is whole and a gap record that says what happened; what can
// be saved is.
func TestWhatHappensToTheLiveFile(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		harm func(tl *testLog) error
		dead bool   // while nobody writes
		gaps string // what is told
		gone string // sequence numbers that are in no file
	}{
		"kill -9":              {harm: func(*testLog) error { return nil }, dead: true, gaps: "crash0"},
		"a torn record":        {harm: func(tl *testLog) error { return tear(tl, `{"v":1,"id`) }, dead: true, gaps: "crash1"},
		"removed":              {harm: func(tl *testLog) error { return os.Remove(tl.path()) }, gaps: "removed0"},
		"removed while dead":   {harm: func(tl *testLog) error { return os.Remove(tl.path()) }, dead: true, gaps: "lost3", gone: "0 1 2"},
		"replaced":             {harm: func(tl *testLog) error { return replaceFile(tl, "{}\n") }, gaps: "removed0"},
		"cut":                  {harm: func(tl *testLog) error { return os.Truncate(tl.path(), 300) }, gaps: "cut2", gone: "1 2"},
		"cut to nothing":       {harm: func(tl *testLog) error { return os.Truncate(tl.path(), 0) }, gaps: "cut3", gone: "0 1 2"},
		"cut while dead":       {harm: func(tl *testLog) error { return os.Truncate(tl.path(), 300) }, dead: true, gaps: "lost2", gone: "1 2"},
		"somebody else writes": {harm: func(tl *testLog) error { return tear(tl, "{}\n") }, gaps: "foreign0", gone: "-"},
		"the tree is removed":  {harm: func(tl *testLog) error { return os.Remove(filepath.Join(tl.dir, HashFile)) }, dead: true, gaps: "crash0"},
		"the key is garbage":   {harm: func(tl *testLog) error { return os.WriteFile(filepath.Join(tl.dir, KeyFile), []byte("x"), 0o600) }, dead: true, gaps: "key0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tl := newTestLog(t)
			l := tl.open()
			tl.log(l, "0", "1", "2")
			if c.dead {
				tl.crash(l)
			}
			if err := c.harm(tl); err != nil {
				t.Fatal(err)
			}
			if c.dead {
				l = tl.open()
			}
			tl.log(l, "after")
			tl.end(l)
			if c.gone == "-" { // there is one line more than in the tree, in the piece that was closed
				lines := tl.lines()
				if g := strings.Join(gaps(lines), " "); g != c.gaps {
					t.Errorf("gaps %q, want %q", g, c.gaps)
				}
				return
			}
			lines := tl.whole(true)
			var gone []string
			for i, line := range lines {
				if line == "" {
					gone = append(gone, fmt.Sprint(i))
				}
			}
			if g := strings.Join(gaps(lines), " "); !strings.HasPrefix(g, c.gaps) || strings.Join(gone, " ") != c.gone {
				t.Errorf("gaps %q, want %q; gone %q, want %q\n%s", g, c.gaps, gone, c.gone, strings.Join(lines, "\n"))
			}
			if last := parse(lines[len(lines)-1]); last.Detail != "after" && parse(lines[len(lines)-2]).Detail != "after" {
				t.Errorf("the last record is %+v", last)
			}
			l = tl.open() // and it is over with that
			tl.end(l)
			if again := tl.whole(true); len(again) != len(lines) {
				t.Errorf("after another start: %q", again[len(lines):])
			}
		})
	}
}

func tear(tl *testLog, text string) error {
	f, err := os.OpenFile(tl.path(), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

func replaceFile(tl *testLog, text string) error {
	return errors.Join(os.WriteFile(tl.path()+".evil", []byte(text), 0o600), os.Rename(tl.path()+".evil", tl.path()))
}

// TestAClockThatJumps: a record says so, IDs go on growing, and days are closed as they come.
func TestAClockThatJumps(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	var mu sync.Mutex
	var skew time.Duration
	set := func(d time.Duration) { mu.Lock(); skew = d; mu.Unlock() }
	base := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	began := time.Now()
	tl.now = func() time.Time { mu.Lock(); defer mu.Unlock(); return base.Add(time.Since(began) + skew) }
	l := tl.open()
	tl.log(l, "a")
	set(time.Hour)
	tl.log(l, "b")
	set(-time.Hour)
	tl.log(l, "c")
	set(48 * time.Hour)
	tl.log(l, "d")
	tl.end(l)
	lines := tl.whole(true)
	if g := strings.Join(gaps(lines), " "); g != "clock0 clock0 clock0" {
		t.Errorf("gaps %q", g)
	}
	for i := 1; i < len(lines); i++ {
		if a, b := parse(lines[i-1]), parse(lines[i]); b.ID <= a.ID || b.Boot < a.Boot && b.Event != EventLookup && a.Event != EventShardBegan {
			t.Errorf("%s does not follow %s", lines[i], lines[i-1])
		}
	}
	shards, err := ShardsOf(filepath.Dir(tl.dir), "x")
	if err != nil || len(shards) != 2 {
		t.Errorf("%+v %v: want one closed day and a live one", shards, err)
	}
}

// TestManyWaitForOneSync: each returns once its record is on disk, and they share the fsyncs.
func TestManyWaitForOneSync(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	l := tl.open()
	var wg sync.WaitGroup
	const writers, each = 64, 20
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if err := l.LogDurable(t.Context(), Record{Event: EventLookup, Detail: fmt.Sprint(w, " ", i)}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	st := l.Stats()
	tl.end(l)
	if n := len(tl.whole(true)); n != writers*each || st.Records != writers*each || st.Syncs > writers*each/4 {
		t.Errorf("%d records, %+v", n, st)
	}
	if err := l.LogDurable(t.Context(), Record{}); err == nil {
		t.Error("a closed log took a record")
	}
}

// TestTwoWritersAreRefused: the second would give its records numbers that are taken.
func TestTwoWritersAreRefused(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	l := tl.open()
	if second, err := Open(tl.path(), "test", "x"); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("%v %v", second, err)
	}
	tl.end(l)
	second, err := Open(tl.path(), "test", "x")
	if err != nil {
		t.Fatal(err)
	}
	tl.end(second)
}

// hungSync is a file whose syncs do not come back until they are let go.
type hungSync struct {
	hangingFile
	mu    sync.Mutex
	lines int
}

func (f *hungSync) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lines += bytes.Count(p, []byte{'\n'})
	return len(p), nil
}

func (f *hungSync) Sync() error { <-f.letGo; return nil }

// TestASlowSyncHoldsNothingUp: while the disk syncs for one, others' records are taken and written.
func TestASlowSyncHoldsNothingUp(t *testing.T) {
	t.Parallel()
	f := &hungSync{hangingFile: hangingFile{letGo: make(chan struct{})}}
	l := newLogger(f, 0, "i", "d")
	acked := make(chan error, 1)
	go func() { acked <- l.LogDurable(t.Context(), Record{Event: EventLookup}) }()
	const more = 4 * queueLen
	deadline := time.Now().Add(30 * time.Second)
	for i := range more {
		l.Log(Record{Event: EventLookup})
		for i%1000 == 0 && len(l.queue) > queueLen/2 && time.Now().Before(deadline) {
			time.Sleep(time.Millisecond) // between looks at a condition
		}
	}
	written := func() int { f.mu.Lock(); defer f.mu.Unlock(); return f.lines }
	for written() < more+1 && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // as above
	}
	if n := written(); n != more+1 || l.Stats().Lost > 0 {
		t.Errorf("%d records written, %d lost, want %d", n, l.Stats().Lost, more+1)
	}
	select {
	case err := <-acked:
		t.Errorf("acknowledged before the disk was: %v", err)
	default:
	}
	close(f.letGo)
	if err := errors.Join(<-acked, l.Close()); err != nil {
		t.Error(err)
	}
}

func parse(line string) (r Record) {
	if json.Unmarshal([]byte(line), &r) != nil {
		return Record{}
	}
	return r
}

// The last records of a log that is idle are signed too, without another record or a sync that somebody waits for.
func TestAnIdleLogSignsItsLastRecords(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	l := tl.open()
	defer l.Close()
	l.Log(Record{Event: EventLookup})
	tl.sync(l) // this may be signed at once
	l.Log(Record{Event: EventLookup, Detail: "the last"})
	want := uint64(0)
	for end := time.Now().Add(2*checkpointEvery + 5*time.Second); ; time.Sleep(50 * time.Millisecond) {
		raw, err := os.ReadFile(tl.path())
		if err != nil {
			t.Fatal(err)
		}
		want = uint64(strings.Count(string(raw), "\n"))
		signed, err := os.ReadFile(filepath.Join(tl.dir, CheckpointFile))
		if c, parseErr := ParseCheckpoint(string(signed)); err == nil && parseErr == nil && c.Size == want && strings.Contains(string(raw), "the last") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("no checkpoint covers all %d records: %s", want, signed)
		}
	}
}
