package audit

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

func readAll(t *testing.T, path string) []Record {
	t.Helper()
	var out []Record
	bad, err := Shard{Path: path}.read(func(r *Record) { out = append(out, *r) })
	if err != nil || bad != 0 {
		t.Fatalf("reading %s: %d unreadable lines, %v", path, bad, err)
	}
	return out
}

func TestRecordsKeepTheirOrderUnderConcurrency(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	l, err := Open(path, "test", "x")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for i := range 200 {
				l.Log(Record{Event: EventLookup, Detail: fmt.Sprintf("%d/%d", g, i)})
			}
		})
	}
	wg.Wait()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	got := readAll(t, path)
	if len(got) != 1600 {
		t.Fatalf("%d records, want 1600", len(got))
	}
	for i := 1; i < len(got); i++ {
		if got[i].ID <= got[i-1].ID || got[i].Boot < got[i-1].Boot {
			t.Fatalf("record %d (%s) is not after record %d (%s)", i, got[i].ID, i-1, got[i-1].ID)
		}
	}
	if r := got[0]; r.Version != Version || r.Instance != "test" || r.Daemon != "x" || r.BootID == "" {
		t.Fatalf("the logger left its own fields empty: %+v", r)
	}
}

func TestTornLastLineIsClosedAndTold(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	if err := os.WriteFile(path, []byte(`{"v":1,"id":"A","event":"dns.lookup"}`+"\n"+`{"v":1,"id":"B","ev`), 0o600); err != nil {
		t.Fatal(err)
	}
	l, err := Open(path, "test", "x")
	if err != nil {
		t.Fatal(err)
	}
	l.Log(Record{Event: EventLookup})
	l.Close()
	var events []string
	bad, err := Shard{Path: path}.read(func(r *Record) { events = append(events, r.Event) })
	if err != nil {
		t.Fatal(err)
	}
	if bad != 1 || strings.Join(events, " ") != "dns.lookup audit.gap dns.lookup" {
		t.Fatalf("unreadable %d, events %v", bad, events)
	}
}

// faultyFile fails while full is set; half of the bytes of a failing write land all the same.
type faultyFile struct {
	mu     sync.Mutex
	full   bool
	data   bytes.Buffer
	failed chan struct{}
}

func (f *faultyFile) Write(p []byte) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.full {
		n, _ := f.data.Write(p[:len(p)/2])
		select {
		case f.failed <- struct{}{}:
		default:
		}
		return n, errors.New("no space left on device")
	}
	return f.data.Write(p)
}

func (f *faultyFile) Truncate(n int64) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.data.Truncate(int(n))
	return nil
}
func (f *faultyFile) Sync() error  { return nil }
func (f *faultyFile) Close() error { return nil }

func (f *faultyFile) setFull(full bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.full = full
}

func TestFullDiskNeverBlocksAndLosesNoCount(t *testing.T) {
	f := &faultyFile{full: true, failed: make(chan struct{}, 1)}
	l := newLogger(f, 0, "test", "x")
	l.Log(Record{Event: EventLookup, Detail: "first"})
	<-f.failed // the writer now holds a batch that the disk refuses
	const more = queueLen + 500
	begin := time.Now()
	for range more {
		l.Log(Record{Event: EventLookup})
	}
	if d := time.Since(begin); d > 5*time.Second {
		t.Fatalf("logging to a full disk took %v", d)
	}
	for l.Err() == nil {
		if time.Since(begin) > 10*time.Second {
			t.Fatal("the log does not say that the disk refuses")
		}
		<-f.failed
	}
	f.setFull(false)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := l.Sync(ctx); err != nil {
		t.Fatal(err)
	}
	if err := l.Err(); err != nil {
		t.Errorf("all is written, and the log says %v", err)
	}
	l.Close()
	var kept, lost uint64
	for line := range bytes.Lines(f.data.Bytes()) {
		var r Record
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatalf("half a record was left behind: %q", line)
		}
		if r.Event == EventGap {
			lost += r.Count
		} else {
			kept++
		}
	}
	if kept+lost != more+1 || lost == 0 {
		t.Fatalf("%d kept and %d told as lost, want %d together and some lost", kept, lost, more+1)
	}
}

func TestSyncDoesNotWaitForAHungDisk(t *testing.T) {
	f := &faultyFile{full: true, failed: make(chan struct{}, 1)}
	l := newLogger(f, 0, "test", "x")
	defer l.Close()
	l.Log(Record{Event: EventLookup})
	<-f.failed
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := l.Sync(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("got %v, want the deadline", err)
	}
}

func TestLateLogOpensWhenItCan(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "notyet")
	path := filepath.Join(dir, "k.jsonl")
	l := OpenLate(path, "test", "k")
	l.Log(Record{Event: EventStopReceived})
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	for l.Sync(ctx) != nil && ctx.Err() == nil {
	}
	l.Close()
	if got := readAll(t, path); len(got) != 1 || got[0].Event != EventStopReceived {
		t.Fatalf("got %+v", got)
	}
}

func TestSecretsNeverReachTheFile(t *testing.T) {
	const value = "s3cr3t/Value+with=odd&bytes"
	path := filepath.Join(t.TempDir(), "x.jsonl")
	for _, known := range []bool{true, false} {
		l, err := Open(path, "test", "x")
		if err != nil {
			t.Fatal(err)
		}
		if known {
			l.AddSecret(value)
		}
		for _, form := range forms(value) {
			l.Log(Record{Event: EventRequest, Detail: "GET /?q=" + form + " x", Fields: map[string]string{"a": form}, Dst: &Dst{Name: form}})
		}
		l.Close()
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		leaked := 0
		for _, form := range forms(value) {
			inJSON, _ := json.Marshal(form)
			if bytes.Contains(raw, bytes.Trim(inJSON, `"`)) {
				leaked++
			}
		}
		if known && leaked > 0 {
			t.Errorf("%d forms of a known secret are in the log", leaked)
		}
		if !known && leaked == 0 {
			t.Error("the check cannot see a secret that was not made known: it proves nothing")
		}
		os.Remove(path)
	}
}

func TestSecretShapes(t *testing.T) {
	r := newRedactor()
	for _, tc := range []struct{ in, want string }{
		{"token tgo_abcdefghijklmnop234567abcdefghij!", "token [redacted]!"},
		{"Authorization: Bearer abcdefghijkl", "Authorization: [redacted]"},
		{"https://joe:hunter2@host/x", "https://joe:[redacted]@host/x"},
		{"password=hunter2 next", "password=[redacted] next"},
		{"api_key: 'abcd1234'", "api_key: '[redacted]'"},
		{"AKIAIOSFODNN7EXAMPLE", "[redacted]"},
		{"api.vendor.test:443", "api.vendor.test:443"},
		{"looking up evil.test: no rule names it", "looking up evil.test: no rule names it"},
	} {
		if got := r.text(tc.in); got != tc.want {
			t.Errorf("%q became %q, want %q", tc.in, got, tc.want)
		}
	}
}

func TestRedactionLeavesTheCallersDataAlone(t *testing.T) {
	r := newRedactor()
	fields := map[string]string{"k": "token=abcdefgh"}
	rec := Record{Fields: fields}
	r.record(&rec)
	if fields["k"] != "token=abcdefgh" || rec.Fields["k"] != "token="+Redacted {
		t.Fatalf("caller has %q, record has %q", fields["k"], rec.Fields["k"])
	}
}

func TestTimelineFollowsTheBootClock(t *testing.T) {
	dir := t.TempDir()
	now := time.Now()
	write := func(daemon string, records ...Record) {
		os.MkdirAll(filepath.Join(dir, daemon), 0o700)
		var b bytes.Buffer
		for _, r := range records {
			encode(&b, r)
		}
		os.WriteFile(filepath.Join(dir, daemon, daemon+".jsonl"), b.Bytes(), 0o600)
	}
	// The wall clock was set back an hour between "second" and "third".
	write("a", Record{BootID: "new", ID: "2", Boot: 2, Time: now, Detail: "second"}, Record{BootID: "old", ID: "0", Boot: 99, Time: now.Add(-48 * time.Hour), Detail: "first"})
	write("b", Record{BootID: "new", ID: "1", Boot: 3, Time: now.Add(-time.Hour), Detail: "third"}, Record{BootID: "new", ID: "9", Boot: 9, Detail: "other", Time: now})
	got, bad, err := Timeline(dir, func(r *Record) bool { return r.Detail != "other" })
	if err != nil || bad != 0 {
		t.Fatal(bad, err)
	}
	var words []string
	for _, r := range got {
		words = append(words, r.Detail)
	}
	if strings.Join(words, " ") != "first second third" {
		t.Fatalf("got %v", words)
	}
}

func BenchmarkLog(b *testing.B) {
	l, err := Open(filepath.Join(b.TempDir(), "x.jsonl"), "test", "x")
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	for b.Loop() {
		l.Log(Record{Event: EventLookup, Kid: "k", Outcome: OutcomeDeny, Dst: &Dst{Name: "api.vendor.test", Port: 443}})
	}
}

// TestErrTellsOfADiskThatHangs: a call that does not come back is no success.
func TestErrTellsOfADiskThatHangs(t *testing.T) {
	begun, letGo := make(chan struct{}), make(chan struct{})
	l := newLogger(hangingFile{begun, letGo}, 0, "i", "d")
	if err := l.Err(); err != nil {
		t.Errorf("at rest: %v", err)
	}
	l.Log(Record{Event: EventGap})
	<-begun
	deadline := time.Now().Add(time.Minute)
	for l.Err() == nil && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond) // between looks at a condition
	}
	if err := l.Err(); err == nil || !strings.Contains(err.Error(), "has not answered for") {
		t.Errorf("while the disk hangs: %v", err)
	}
	close(letGo)
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := l.Err(); err != nil {
		t.Errorf("after it came back: %v", err)
	}
}

// hangingFile takes a write and does not come back from it until it is let go.
type hangingFile struct{ begun, letGo chan struct{} }

func (f hangingFile) Write(p []byte) (int, error) { close(f.begun); <-f.letGo; return len(p), nil }
func (hangingFile) Sync() error                   { return nil }
func (hangingFile) Truncate(int64) error          { return nil }
func (hangingFile) Close() error                  { return nil }
