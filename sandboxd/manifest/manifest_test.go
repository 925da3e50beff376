package manifest

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

var roomy = Limits{Time: time.Minute, Entries: 1000, Depth: 20, Bytes: 1 << 20}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func list(t *testing.T, dir string, lim Limits, parts ...Part) *Manifest {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	return Make(t.Context(), []Root{{Dir: f, As: "/workspace", Parts: parts}}, lim)
}

func text(m *Manifest) string { return strings.Join(m.Entries, "\n") }

func sum(b string) string { s := sha256.Sum256([]byte(b)); return hex.EncodeToString(s[:]) }

// TestAllIsListed and nothing is followed or waited for.
func TestAllIsListed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.WriteFile(in("a"), []byte("one"), 0o640))
	must(t, os.Mkdir(in("d"), 0o755))
	must(t, os.WriteFile(in("d/x\n\xff"), nil, 0o600))
	must(t, os.Symlink("/etc/passwd", in("link")))
	must(t, os.Symlink("/etc", in("dirlink")))
	must(t, unix.Mkfifo(in("pipe"), 0o600))
	must(t, os.Truncate(in("a"), 3))
	sparse, err := os.Create(in("sparse"))
	must(t, err)
	must(t, sparse.Truncate(1<<42))
	must(t, sparse.Close())
	must(t, os.Chmod(in("a"), 0o640|os.ModeSetuid))
	m := list(t, dir, roomy)
	want := []string{
		"urw-r----- 3 " + sum("one") + " /workspace/a",
		`-rw------- 0 ` + sum("") + ` "/workspace/d/x\n\xff"`,
		"prw------- 0 - /workspace/pipe",
		fmt.Sprintf("-rw-r--r-- %d - /workspace/sparse", int64(1)<<42),
	}
	for _, line := range want {
		if !slices.Contains(m.Entries, line) {
			t.Errorf("%s is not in\n%s", line, text(m))
		}
	}
	if len(m.Entries) != 7 || m.Left() != "bytes 1" || strings.Contains(text(m), sum("")+" /workspace/link") {
		t.Errorf("left out %q of\n%s", m.Left(), text(m))
	}
	if again := list(t, dir, roomy); text(again) != text(m) {
		t.Error("the same files have another manifest")
	}
	must(t, os.WriteFile(in("a"), []byte("two"), 0o640))
	if other := list(t, dir, roomy); text(other) == text(m) {
		t.Error("another content has the same manifest")
	}
}

// TestBoundsOfTheWork hold, and what was left out is said.
func TestBoundsOfTheWork(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	deep := dir
	for range 30 {
		deep = filepath.Join(deep, "d")
		must(t, os.Mkdir(deep, 0o700))
	}
	if m := list(t, dir, roomy); m.Left() != "depth 1" || len(m.Entries) != 21 {
		t.Errorf("a deep tree: left out %q, %d entries", m.Left(), len(m.Entries))
	}
	long := t.TempDir()
	at, err := unix.Open(long, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	for range 19 { // 19 times 220 is more than the kernel takes as one path
		name := strings.Repeat("d", 220)
		must(t, unix.Mkdirat(at, name, 0o700))
		below, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		must(t, unix.Close(at))
		at = below
	}
	must(t, unix.Close(at))
	m := list(t, long, roomy)
	if m.Left() != "depth 1" || len(m.Entries) != 19 {
		t.Errorf("long names: left out %q, %d entries", m.Left(), len(m.Entries))
	}
	for _, e := range m.Entries {
		if len(e) > maxName+100 {
			t.Errorf("an entry of %d bytes", len(e))
		}
	}
	wide := t.TempDir()
	for i := range 1500 {
		must(t, os.WriteFile(filepath.Join(wide, fmt.Sprint(i)), nil, 0o600))
	}
	if m := list(t, wide, roomy); m.Left() != "entries 1" || len(m.Entries) != roomy.Entries {
		t.Errorf("a wide one: left out %q, %d entries", m.Left(), len(m.Entries))
	}
	big := t.TempDir()
	must(t, os.WriteFile(filepath.Join(big, "a-big"), bytes.Repeat([]byte{1}, 900<<10), 0o600))
	must(t, os.WriteFile(filepath.Join(big, "b-big"), bytes.Repeat([]byte{1}, 800<<10), 0o600))
	must(t, os.WriteFile(filepath.Join(big, "small"), []byte("x"), 0o600))
	m = list(t, big, roomy)
	if m.Left() != "bytes 1" || !strings.Contains(text(m), sum("x")) || !strings.Contains(text(m), "- /workspace/a-big") {
		t.Errorf("big files: left out %q of\n%s", m.Left(), text(m))
	}
	hasty := roomy
	hasty.Time = 1
	if m := list(t, wide, hasty); m.LeftOut[leftTime] == 0 || len(m.Entries) > 0 {
		t.Errorf("without time: left out %q, %d entries", m.Left(), len(m.Entries))
	}
}

// TestPartsAreNamedAsTheKidNamesThem; what is in none is not listed, and one that is not there is no error.
func TestPartsAreNamedAsTheKidNamesThem(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "upper", "bin"), 0o700))
	must(t, os.MkdirAll(filepath.Join(dir, "work", "x"), 0o700))
	m := list(t, dir, roomy, Part{"upper", "/usr"}, Part{"missing", "/opt"})
	if len(m.Entries) != 1 || !strings.HasSuffix(m.Entries[0], " /usr/bin") || m.Left() != "" {
		t.Errorf("left out %q of\n%s", m.Left(), text(m))
	}
}
