package atomicfile

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

const fileVar = "TAGOUT_TEST_WRITE"

var content = bytes.Repeat([]byte("whole\n"), 10_000)

func TestMain(m *testing.M) {
	if file := os.Getenv(fileVar); file != "" {
		for { // until it is killed
			if Write(file, content, 0o600, -1, -1) != nil {
				os.Exit(1)
			}
		}
	}
	os.Exit(m.Run())
}

// TestAKilledWriterIsSweptUp: the file is whole whenever its writer is killed, and what that leaves goes with Sweep, which
// touches nothing else.
func TestAKilledWriterIsSweptUp(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	others := []string{filepath.Join(dir, ".new-other-1"), filepath.Join(dir, ".new-fil"), filepath.Join(dir, "new-file-1")}
	for _, other := range others {
		if err := os.WriteFile(other, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	left := func() []string {
		found, err := filepath.Glob(filepath.Join(dir, ".new-file-*"))
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	for deadline := time.Now().Add(30 * time.Second); len(left()) == 0; {
		if time.Now().After(deadline) {
			t.Fatal("no kill left anything: the test shows nothing")
		}
		killed(t, file)
		if raw, err := os.ReadFile(file); err != nil || !bytes.Equal(raw, content) {
			t.Fatalf("after a kill the file has %d bytes, %v", len(raw), err)
		}
	}
	if err := Sweep(file); err != nil {
		t.Fatal(err)
	}
	if l := left(); len(l) > 0 {
		t.Errorf("still there: %v", l)
	}
	for _, other := range append(others, file) {
		if _, err := os.Stat(other); err != nil {
			t.Errorf("another file: %v", err)
		}
	}
}

// killed writes the file in another process, over and over, and kills that.
func killed(t *testing.T, file string) {
	t.Helper()
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), fileVar+"="+file)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()         // it was killed
	defer cmd.Process.Kill() // as is meant
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if info, err := os.Stat(file); err == nil && info.Size() > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("nothing was written in 10 s")
		}
	}
}
