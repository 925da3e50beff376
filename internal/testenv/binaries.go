package testenv

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

var built = sync.OnceValues(build)

// binaries returns the directory of the built binaries: TAGOUT_BIN where `make test` set it, else a fresh
// build, once a test process.
func binaries(t testing.TB) string {
	t.Helper()
	if dir := os.Getenv("TAGOUT_BIN"); dir != "" {
		return dir
	}
	dir, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func build() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	cmd := exec.Command("make", "build")
	cmd.Dir = root
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	return filepath.Join(root, "build", "bin"), cmd.Run()
}

func moduleRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", os.ErrNotExist
		}
		dir = parent
	}
}
