package runtime

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// RemoveState removes dir, in which runc keeps its state of one container. A runc that is killed while it makes a container
// leaves a mount there: a copy of its own program, which nobody can remove before it is unmounted.
func RemoveState(dir string) error {
	paths, err := filepath.Glob(filepath.Join(dir, "*"))
	for _, path := range paths {
		if gone := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); gone != nil && !errors.Is(gone, unix.EINVAL) && !errors.Is(gone, unix.ENOENT) { // not a mount, or gone
			err = errors.Join(err, &os.PathError{Op: "unmount", Path: path, Err: gone})
		}
	}
	return errors.Join(err, os.RemoveAll(dir))
}
