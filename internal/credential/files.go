package credential

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"tagout/internal/atomicfile"
)

// writeFile replaces the file at path whole or not at all, readable by its owner only, and returns when it
// is on disk, name included.
func writeFile(path string, data []byte) error {
	return atomicfile.WriteSynced(path, data, 0o600, -1, -1)
}

// lockDir makes sure that one process uses dir; the kernel drops the lock when the process dies.
func lockDir(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("opening credd's directory: was `tagout setup` run? %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close() // already failing
		return nil, fmt.Errorf("locking %s: another credd is using it: stop that one first: %w", dir, err)
	}
	return f, nil
}

// removeLeftovers deletes the temporary files of a process that was killed while it wrote.
func removeLeftovers(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, ".new-*"))
	for _, path := range old {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}
