package filewatch

import (
	"encoding/json"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/session"
	"tagout/internal/testroot"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

func TestWants(t *testing.T) {
	t.Parallel()
	if !WantsOf([]trip.Rule{{On: trip.Denied}, {On: trip.Canary}}).Nothing() {
		t.Error("rules on other things want something watched")
	}
	got := WantsOf([]trip.Rule{
		{On: trip.Exec, Paths: []string{"/b", "/a"}}, {On: trip.Exec, Paths: []string{"/a"}},
		{On: trip.WriteOutside, Except: []string{"/dev/shm", "/x"}}, {On: trip.WriteOutside, Except: []string{"/x"}},
	})
	want := Wants{Forbidden: []string{"/a", "/b"}, Writes: true, Scratch: []string{"/workspace", "/tmp", "/x"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for file, in := range map[string]bool{"/tmp/a": true, "/workspace": true, "/tmpfile": false, "/dev/shm/a": false, "/x/y": true, "/": false} {
		if got.isScratch(file) != in {
			t.Errorf("%s is in a scratch place: %v", file, !in)
		}
	}
}

// records keeps what was logged.
type records struct {
	mu  sync.Mutex
	all []audit.Record
}

func (r *records) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, rec)
}

func (r *records) find(event string) (out []audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, rec := range r.all {
		if rec.Event == event {
			out = append(out, rec)
		}
	}
	return out
}

// ownMounts gives the test's thread mounts of its own: one tmpfs as its root and nothing else, as a kid has it. It
// returns the thread's id, by which the kernel shows them.
func ownMounts(t *testing.T) (tid int) {
	t.Helper()
	testroot.Require(t)
	runtime.LockOSThread() // never unlocked: thread and namespace end with the test
	root, err := os.MkdirTemp("", "filewatch")
	must(t, err)
	t.Cleanup(func() { // on another thread, which sees it
		gone := make(chan error)
		go func() { gone <- os.Remove(root) }()
		must(t, <-gone)
	})
	must(t, unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS))
	must(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	must(t, unix.Mount("kid", root, "tmpfs", 0, ""))
	for _, dir := range []string{"proc", "workspace", "old"} {
		must(t, os.Mkdir(filepath.Join(root, dir), 0o755))
	}
	must(t, unix.Mount("/proc", filepath.Join(root, "proc"), "", unix.MS_BIND|unix.MS_REC, ""))
	must(t, unix.PivotRoot(root, filepath.Join(root, "old")))
	must(t, unix.Chdir("/"))
	must(t, unix.Unmount("/old", unix.MNT_DETACH))
	must(t, unix.Mount("scratch", "/workspace", "tmpfs", 0, ""))
	return unix.Gettid()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// write writes a file on the calling thread, which alone has the mounts.
func write(t *testing.T, file string) {
	t.Helper()
	must(t, os.WriteFile(file, []byte("x"), 0o600))
}

// TestWritesAndFloods watches this thread as if it were a kid: a write outside the scratch places is told once, one
// inside never, and a flood that the kernel cannot hand over is a gap. Nothing that was done waited for the watch.
func TestWritesAndFloods(t *testing.T) {
	tid := ownMounts(t)
	var recs records
	cfg := Config{File: "/watched", GID: os.Getgid(), Audit: &recs, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
	s := &session.Session{ID: "01S", Kid: "k", Mark: 7, Card: "c"}
	wants := WantsOf([]trip.Rule{{On: trip.WriteOutside}})
	k, err := watchKid(s, tid, wants, cfg)
	must(t, err)
	defer k.close()
	write(t, "/workspace/a")
	write(t, "/outside")
	write(t, "/outside")
	done := make(chan struct{})
	go func() { k.run(); close(done) }()
	wait(t, "the write", func() bool { return len(recs.find(audit.EventWriteSeen)) > 0 })
	k.close()
	<-done
	got := recs.find(audit.EventWriteSeen)
	if len(got) != 1 || got[0].Fields["path"] != "/outside" || got[0].Mark != 7 || got[0].Session != "01S" || len(recs.all) != 1 {
		t.Errorf("records %+v", recs.all)
	}

	k, err = watchKid(s, tid, wants, cfg)
	must(t, err)
	defer k.close()
	for i := range 17000 { // nobody reads: the kernel keeps 16384
		write(t, "/f"+strconv.Itoa(i))
	}
	go k.run()
	wait(t, "the gap", func() bool { return len(recs.find(audit.EventGap)) > 0 })
	if r := recs.find(audit.EventGap)[0]; r.Mark != 7 || r.Fields[audit.FieldBlind] == "" {
		t.Errorf("gap %+v", r)
	}
	if n := len(recs.all); n > maxTold+4 {
		t.Errorf("%d records of a flood", n)
	}
}

// TestTheFileSaysWhoIsWatched: a kid is in it from the moment Add returns until it is removed, or its watch broke.
func TestTheFileSaysWhoIsWatched(t *testing.T) {
	tid := ownMounts(t)
	var recs records
	w := New(Config{File: "/watched", GID: os.Getgid(), Audit: &recs, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	read := func() []string {
		var got wire.Watched
		raw, err := os.ReadFile("/watched")
		must(t, err)
		must(t, json.Unmarshal(raw, &got))
		return got.Sessions
	}
	s := &session.Session{ID: "01S", Kid: "k", Mark: 7}
	must(t, w.Add(s, tid, Wants{}, false)) // nothing to watch
	w.tell()
	if got := read(); len(got) != 0 {
		t.Errorf("watched %v", got)
	}
	must(t, w.Add(s, tid, WantsOf([]trip.Rule{{On: trip.Exec, Paths: []string{"/nosuch"}}}), true))
	if got := read(); !reflect.DeepEqual(got, []string{"01S"}) {
		t.Errorf("watched %v", got)
	}
	if gaps := recs.find(audit.EventGap); len(gaps) != 1 || gaps[0].Fields[audit.FieldBlind] != "" {
		t.Errorf("a watch that began late: %+v", gaps)
	}
	w.kids["01S"].alive.Store(0) // its reader broke
	w.tell()
	if got := read(); len(got) != 0 {
		t.Errorf("watched by a reader that broke: %v", got)
	}
	w.Remove("01S")
	w.Remove("01S")
	if w.Add(s, 1<<30, WantsOf([]trip.Rule{{On: trip.WriteOutside}}), false) == nil {
		t.Error("a process that is not there is watched")
	}
}

func wait(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
		time.Sleep(time.Millisecond) // between looks at a condition
	}
}
