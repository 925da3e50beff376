package audit

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/testroot"
)

// TestAFullDiskLeavesAWholeLog, a real one, also where it fills up at the change of files. What found no room is counted,
// exactly.
func TestAFullDiskLeavesAWholeLog(t *testing.T) {
	testroot.Require(t)
	tl := newTestLog(t)
	disk := mountedTmpfs(t, 24)
	tl.dir, tl.size = filepath.Join(disk, "x"), 100_000
	l := tl.open()
	tl.log(l, "before")
	room := fill(t, disk)
	refuses(t, l)
	begun := time.Now()
	const more = queueLen + 1000
	for range more {
		l.Log(Record{Event: EventLookup, Detail: "while it is full"})
	}
	if d := time.Since(begun); d > 5*time.Second {
		t.Errorf("appending to a full disk took %v", d)
	}
	room()
	tl.log(l, "after")
	lost := l.Stats().Lost
	tl.end(l)
	var told uint64
	for _, line := range tl.whole(true) {
		if r := parse(line); r.Event == EventGap {
			told += r.Count
		}
	}
	if told != lost || lost == 0 {
		t.Errorf("%d records lost, %d told", lost, told)
	}
}

// TestAKillOnAFullDiskLosesNothingAcknowledged: the writer is killed while the disk takes nothing.
func TestAKillOnAFullDiskLosesNothingAcknowledged(t *testing.T) {
	testroot.Require(t)
	for range 3 {
		tl := newTestLog(t)
		disk := mountedTmpfs(t, 4)
		tl.dir = filepath.Join(disk, "x")
		if err := os.MkdirAll(tl.dir, 0o700); err != nil {
			t.Fatal(err)
		}
		var room func()
		acked := killedAtRandom(t, tl.path(), func() { room = fill(t, disk) })
		room()
		l := tl.open()
		tl.log(l, "after")
		tl.end(l)
		have := map[string]bool{}
		for _, line := range tl.whole(true) {
			have[parse(line).Detail] = true
		}
		for _, name := range acked {
			if !have[name] {
				t.Errorf("record %s was acknowledged and is not there", name)
			}
		}
		if !have["after"] || len(acked) == 0 {
			t.Errorf("the log does not go on, or nothing was acknowledged: %d", len(acked))
		}
	}
}

// TestAReadOnlyFilesystemLeavesAWholeLog: records wait, and go on where they left off.
func TestAReadOnlyFilesystemLeavesAWholeLog(t *testing.T) {
	testroot.Require(t)
	tl := newTestLog(t)
	disk := mountedTmpfs(t, 4)
	tl.dir = filepath.Join(disk, "x")
	l := tl.open()
	tl.log(l, "before")
	tl.end(l)
	remount := func(how string) {
		t.Helper()
		if out, err := exec.Command("mount", "-o", "remount,"+how, disk).CombinedOutput(); err != nil {
			t.Fatalf("remounting: %v: %s", err, out)
		}
	}
	remount("ro")
	if _, err := Open(tl.path(), "test", "x"); err == nil {
		t.Error("a log on a read-only filesystem was opened")
	}
	late := OpenLate(tl.path(), "test", "x")
	late.Log(Record{Event: EventLookup, Detail: "while it is read-only"})
	for deadline := time.Now().Add(20 * time.Second); late.Err() == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if late.Err() == nil {
		t.Error("the log does not say that it cannot be written")
	}
	remount("rw")
	tl.log(late, "after")
	tl.end(late)
	lines := tl.whole(true)
	if len(lines) != 3 || parse(lines[1]).Detail != "while it is read-only" {
		t.Errorf("%q", lines)
	}
}

// TestTheDirectoryIsRemovedUnderTheLog: a new log is begun where there is a directory again, and says so.
func TestTheDirectoryIsRemovedUnderTheLog(t *testing.T) {
	t.Parallel()
	tl := newTestLog(t)
	l := tl.open()
	tl.log(l, "before")
	if err := os.RemoveAll(tl.dir); err != nil {
		t.Fatal(err)
	}
	l.Log(Record{Event: EventLookup, Detail: "without a directory"})
	for deadline := time.Now().Add(20 * time.Second); l.Err() == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
	}
	if l.Err() == nil {
		t.Error("the log does not say that its directory is gone")
	}
	if err := os.MkdirAll(tl.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	tl.log(l, "after")
	tl.end(l)
	lines := tl.whole(true)
	if g := gaps(lines); len(g) != 1 || g[0] != "removed1" {
		t.Errorf("gaps %v\n%q", g, lines)
	}
}
