package doctor

import (
	"testing"

	"golang.org/x/sys/unix"
)

func unmount(t *testing.T, dir string) {
	t.Helper()
	if err := unix.Unmount(dir, 0); err != nil {
		t.Error(err)
	}
}
