package authority

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
)

// open returns the memory in dir as a restart at that time finds it.
func open(t *testing.T, dir string, at time.Time) *Used {
	t.Helper()
	u, err := OpenUsed(dir, at)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func use(t *testing.T, u *Used, o Order, at time.Time) {
	t.Helper()
	if err := u.Take(o, at); err != nil {
		t.Fatal(err)
	}
	if err := u.Keep(o.ID); err != nil {
		t.Fatal(err)
	}
}

func TestUsedOnce(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	u := open(t, dir, now)
	o := stopOrder("ada")
	use(t, u, o, now)
	for name, again := range map[string]*Used{"at once": u, "after a restart": open(t, dir, now)} {
		if no := refusalOf(t, again.Take(o, now)); no.Code != reason.OrderReplayed {
			t.Errorf("%s: %v", name, no)
		}
	}
	// A file that a crash left empty says that its order was used.
	other := stopOrder("ada")
	if err := os.WriteFile(filepath.Join(dir, other.ID), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if no := refusalOf(t, open(t, dir, now).Take(other, now)); no.Code != reason.OrderReplayed {
		t.Errorf("a torn file: %v", no)
	}
}

// TestClocksBringNothingBack: an order that was forgotten is not accepted again, wherever the wall clock goes.
func TestClocksBringNothingBack(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	u := open(t, dir, now)
	o := stopOrder("ada")
	use(t, u, o, now)
	u.Tidy(now.Add(remember)) // not yet over for so long
	if _, err := os.Stat(filepath.Join(dir, o.ID)); err != nil {
		t.Errorf("forgotten too early: %v", err)
	}
	late := o.Expires.Add(remember + time.Second)
	u.Tidy(late)
	if _, err := os.Stat(filepath.Join(dir, o.ID)); err == nil {
		t.Error("never forgotten")
	}
	for name, again := range map[string]*Used{"the same process": u, "a restart": open(t, dir, now)} {
		if no := refusalOf(t, again.Take(o, now)); no.Code != reason.OrderExpired || !strings.Contains(no.Text, "clock") {
			t.Errorf("%s, with the clock set back: %v", name, no)
		}
	}
	use(t, u, New(Order{By: "ada"}, late, Life), late)
	// A floor that cannot be read forbids for as long as what was forgotten could be good, and no longer.
	if err := os.WriteFile(filepath.Join(dir, floorFile), []byte("?"), 0o600); err != nil {
		t.Fatal(err)
	}
	u = open(t, dir, late)
	if err := u.Take(New(Order{By: "ada"}, late, Life), late); err == nil {
		t.Error("accepted without a floor")
	}
	use(t, u, New(Order{By: "ada"}, late.Add(MaxLife), Life), late.Add(MaxLife))
}

// TestADiskThatTakesNothing remembers in memory, and catches up.
func TestADiskThatTakesNothing(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "orders")
	u := open(t, dir, now)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	o := stopOrder("ada")
	if err := u.Take(o, now); err != nil {
		t.Fatal(err)
	}
	if err := u.Keep(o.ID); err == nil {
		t.Error("kept nowhere")
	}
	if no := refusalOf(t, u.Take(o, now)); no.Code != reason.OrderReplayed {
		t.Error(no)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	u.Tidy(now)
	if no := refusalOf(t, open(t, dir, now).Take(o, now)); no.Code != reason.OrderReplayed {
		t.Error(no)
	}
}

// TestAMemoryThatCannotBeRead accepts nothing.
func TestAMemoryThatCannotBeRead(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "orders")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	u, err := OpenUsed(file, now)
	if err == nil {
		t.Error("a file was read as a directory")
	}
	if no := refusalOf(t, u.Take(stopOrder("ada"), now)); no.Code != reason.OrderNotKept {
		t.Error(no)
	}
	u.Tidy(now)
}

func TestBook(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "authorities.json")
	put := func(l List) {
		t.Helper()
		raw, err := l.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path+".new", raw, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
	}
	unknown := func(b *Book, why string) {
		t.Helper()
		l, err := b.List()
		if no := refusalOf(t, err); no.Code != reason.OrderKey || !strings.Contains(no.Text, why) || len(l.People) != 0 || l.Box != "" {
			t.Errorf("%+v, %v; want %q", l, no, why)
		}
	}
	b := NewBook(path, os.Getuid())
	unknown(b, "no such file")
	put(List{Box: box, People: []Person{{Name: "ada"}}})
	if l, err := b.List(); err != nil || l.Box != box || len(l.People) != 1 {
		t.Errorf("%+v, %v", l, err)
	}
	put(List{Box: box, People: []Person{{Name: "ada"}, {Name: "bob", ValidUntil: now}}})
	if l, err := b.List(); err != nil || len(l.People) != 2 || !l.People[1].ValidUntil.Equal(now) {
		t.Errorf("after a change: %+v, %v", l, err)
	}
	unknown(NewBook(path, os.Getuid()+1), "belongs to uid")
	if err := os.Chmod(path, 0o664); err != nil {
		t.Fatal(err)
	}
	unknown(b, "belongs to uid")
	if err := os.Chmod(path, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(`{"box":`), 0o644); err != nil {
		t.Fatal(err)
	}
	unknown(b, "unexpected end")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	unknown(b, "no such file")
}
