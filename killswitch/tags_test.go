package killswitch

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

func sample(stop string) wire.Tag {
	return wire.Tag{Stop: stop, Scope: wire.Scope{Kid: "a1"}, Layers: wire.AllLayers(), Marks: []uint32{7}, By: "ada", Cause: CauseOrder, Placed: time.Now().UTC()}
}

func TestTagFilesSurvive(t *testing.T) {
	dir := t.TempDir()
	notes := t.TempDir()
	f := NewTagFiles(dir, notes)
	for _, id := range []string{"01A", "01B"} {
		if err := f.Note(sample(id)); err != nil {
			t.Fatal(err)
		}
		if err := f.Put(sample(id)); err != nil {
			t.Fatal(err)
		}
	}
	gone := sample("01B")
	gone.Released, gone.ReleasedBy = time.Now(), "ada"
	if err := f.Release(gone); err != nil {
		t.Fatal(err)
	}
	k := NewTagFiles(dir, notes).Load()
	if len(k.Hanging) != 1 || k.Hanging[0].Stop != "01A" || k.Hanging[0].Marks[0] != 7 || len(k.Released) != 1 || k.Released[0].ReleasedBy != "ada" || len(k.Damaged)+len(k.Noted) != 0 {
		t.Errorf("kept %+v", k)
	}
	if left, err := os.ReadDir(notes); err != nil || len(left) != 0 {
		t.Errorf("notes of tags that are on disk: %v %v", left, err)
	}
}

// TestNotes: a note counts as a tag until the tag is on disk or released, and what a killed process left of a
// note counts as nothing, because nothing had fired.
func TestNotes(t *testing.T) {
	dir, notes := t.TempDir(), t.TempDir()
	f := NewTagFiles(dir, notes)
	if err := f.Note(sample("01A")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(notes, ".note-01B"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if k := f.Load(); len(k.Noted) != 1 || k.Noted[0].Stop != "01A" || len(k.Hanging)+len(k.Damaged) != 0 {
		t.Errorf("kept %+v", k)
	}
	torn := filepath.Join(dir, ".new-01A.json") // a process that was killed while it wrote leaves this
	if err := os.WriteFile(torn, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if k := f.Load(); len(k.Noted) != 1 || len(k.Damaged) != 0 {
		t.Errorf("a torn file whose note is whole: %+v", k)
	}
	if err := os.WriteFile(filepath.Join(notes, "01C.json"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if k := f.Load(); len(k.Damaged) != 1 || !k.Damaged[0].Scope.All {
		t.Errorf("a note that cannot be read: %+v", k)
	}
	if err := f.Release(sample("01A")); err != nil {
		t.Fatal(err)
	}
	if k := f.Load(); len(k.Noted) != 0 || len(k.Released) != 1 {
		t.Errorf("after the release: %+v", k)
	}
	if k := NewTagFiles(dir, "/nonexistent/notes").Load(); len(k.Damaged) != 0 {
		t.Errorf("no directory of notes: %+v", k)
	}
	if err := NewTagFiles(dir, "/nonexistent/notes").Note(sample("01D")); err == nil {
		t.Error("a note that could not be written was called written")
	}
}

func TestUnreadableTagsAreTagsOnEverything(t *testing.T) {
	whole := `{"stop":"01A","scope":{"kid":"a1"},"layers":["session"],"by":"ada"}`
	for name, c := range map[string]struct {
		file, text string
		hanging    int
	}{
		"torn":              {"01A.json", whole[:20], 0},
		"empty":             {"01A.json", "", 0},
		"another's name":    {"01B.json", whole, 0},
		"no scope":          {"01A.json", `{"stop":"01A","layers":["session"]}`, 0},
		"no layer":          {"01A.json", `{"stop":"01A","scope":{"all":true}}`, 0},
		"a crash's rest":    {".new-01A.json", whole[:20], 0},
		"a crash, complete": {".new-01A.json", whole, 1},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			f := NewTagFiles(dir, t.TempDir())
			if err := os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o600); err != nil {
				t.Fatal(err)
			}
			hanging, damaged := f.Load().Hanging, f.Load().Damaged
			if len(hanging) != c.hanging || len(damaged) != 1-c.hanging {
				t.Fatalf("hanging %+v, damaged %+v", hanging, damaged)
			}
			if c.hanging == 1 {
				return
			}
			if d := damaged[0]; !d.Scope.All || len(d.Layers) != 3 || !strings.Contains(d.Reason, filepath.Join(dir, c.file)) {
				t.Errorf("damaged %+v", d)
			}
			g := newRig(t, "a1")
			g.load = f.Load
			s := g.sw()
			if _, ok := s.Clear(wire.Scope{Kid: "new", Card: "any"}); ok {
				t.Error("a spawn is cleared under a tag that cannot be read")
			}
			var no *Refusal
			if _, err := s.Release(authority.Signed{Order: authority.Order{Stop: damaged[0].Stop, By: "ada"}}); !errors.As(err, &no) || !strings.Contains(no.Detail, "remove it") {
				t.Errorf("release of it: %v", err)
			}
		})
	}
	if k := (TagFiles{dir: "/nonexistent/tags"}).Load(); len(k.Damaged) != 1 {
		t.Errorf("a directory that cannot be read: %+v", k)
	}
}

// TestTagFilesOnAFullDisk fills a real, tiny tmpfs: nothing torn may be left, and Put works again after that.
func TestTagFilesOnAFullDisk(t *testing.T) {
	testroot.Require(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=16k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	f := NewTagFiles(dir, t.TempDir())
	ballast := filepath.Join(dir, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 64<<10), 0o600); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("filling the disk: %v", err)
	}
	if err := f.Put(sample("01A")); !errors.Is(err, unix.ENOSPC) {
		t.Fatalf("Put on a full disk: %v", err)
	}
	if k := f.Load(); len(k.Hanging)+len(k.Damaged) != 0 {
		t.Errorf("left behind: %+v", k)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	if err := f.Put(sample("01A")); err != nil {
		t.Fatal(err)
	}
	if k := f.Load(); len(k.Hanging) != 1 {
		t.Errorf("kept %+v", k)
	}
}

func TestClear(t *testing.T) {
	g := newRig(t, "a1", "b1")
	s := g.sw()
	order(t, s, wire.Scope{Card: "card-a"})
	for sc, want := range map[wire.Scope]bool{
		{Kid: "new", Card: "card-a"}: false,
		{Kid: "new", Card: "card-b"}: true,
		{Card: "card-a"}:             false,
		{Kid: "b1"}:                  true,
		{All: true}:                  true,
	} {
		if _, ok := s.Clear(sc); ok != want {
			t.Errorf("%+v: clear %v, want %v", sc, ok, want)
		}
	}
	order(t, s, wire.Scope{All: true})
	if _, ok := s.Clear(wire.Scope{Kid: "new", Card: "card-b"}); ok {
		t.Error("clear under a tag on everything")
	}
}

// TestRelease is S16.
func TestRelease(t *testing.T) {
	g := newRig(t, "a1", "b1")
	s := g.sw()
	running(t, s)
	one := order(t, s, wire.Scope{All: true}, wire.LayerNetwork).Stop
	two := order(t, s, wire.Scope{All: true}, wire.LayerNetwork).Stop
	refused := func(stop, by string, status int, text string) {
		t.Helper()
		_, err := signRelease(t, s, stop, by)
		var no *Refusal
		if !errors.As(err, &no) || no.Status != status || !strings.Contains(no.Detail, text) {
			t.Errorf("release by %s: %v, want %d with %q", by, err, status, text)
		}
	}
	refused("01JD0000000000000000000001", "ada", http.StatusNotFound, "no tag")
	if _, err := signRelease(t, s, one, "ada"); err != nil {
		t.Fatal(err)
	}
	if !g.flag {
		t.Error("the global flag came off while another tag on everything hangs")
	}
	if _, err := signRelease(t, s, two, "ada"); err != nil {
		t.Fatal(err)
	}
	refused(two, "ada", http.StatusConflict, "already released by ada")
	waitFor(t, "the flag off", func() bool { on, err := g.AllStopped(); return !on && err == nil })
	for kid, d := range g.docs {
		if on, err := g.Stopped(d.Mark); !on || err != nil {
			t.Errorf("the release re-activated the session of %s", kid)
		}
	}
	if tag, ok := s.Clear(wire.Scope{Kid: "new"}); !ok {
		t.Errorf("still hangs: %+v", tag)
	}
	waitFor(t, "two refusals and two releases on record", func() bool {
		no := g.recorded(audit.EventReleaseRefused)
		return len(no) == 2 && no[0].Outcome == audit.OutcomeDeny && no[0].Reason == reason.Tagged && len(g.recorded(audit.EventTagReleased)) == 2
	})
}

// TestReleaseFailsClosed: what cannot be pinned or noted keeps the tag, and the flag.
func TestReleaseFailsClosed(t *testing.T) {
	g := newRig(t, "a1")
	s := g.sw()
	stop := order(t, s, wire.Scope{All: true}, wire.LayerNetwork).Stop
	running(t, s)
	g.mu.Lock()
	g.state[99] = false // a session that no document tells of
	g.cut = func(m uint32) error {
		if m == 99 {
			return errors.New("map is gone")
		}
		return g.reallyCut(m)
	}
	g.mu.Unlock()
	if _, err := signRelease(t, s, stop, "ada"); err == nil || !g.flag {
		t.Errorf("released with a session that could not be pinned: %v, flag %v", err, g.flag)
	}
	g.mu.Lock()
	g.cut = nil
	g.release = func(wire.Tag) error { return errors.New("no space left on device") }
	g.mu.Unlock()
	if _, err := signRelease(t, s, stop, "ada"); err == nil {
		t.Error("released without the disk knowing")
	}
	waitFor(t, "the flag on again", func() bool { on, err := g.AllStopped(); return on && err == nil })
	if _, ok := s.Clear(wire.Scope{Kid: "x"}); ok {
		t.Error("the tag is gone")
	}
	g.mu.Lock()
	g.release = nil
	g.mu.Unlock()
	if _, err := signRelease(t, s, stop, "ada"); err != nil {
		t.Error(err)
	}
	if on, err := g.Stopped(99); !on || err != nil {
		t.Error("a session without a document came back")
	}
}
