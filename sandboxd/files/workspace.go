// Package files owns the one place of a kid that outlives a command: its workspace, a size-limited tmpfs of
// the host that is mounted into the kid. Inputs are put there before the kid starts. A kid can fill it and
// can put links into it, so whatever the host writes there is resolved by the kernel beneath it, without
// following links (openat2(2)).
package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// Owner is the host uid and gid of the kid's commands.
type Owner struct{ UID, GID int }

// bytesPerInode sizes the inode limit: as many files as a disk of that size would typically hold.
const (
	bytesPerInode = 4096
	minInodes     = 1024
)

// Mount makes dir a tmpfs of size bytes that belongs to owner: no set-uid programs, no devices.
func Mount(dir string, size int64, owner Owner) error {
	if size <= 0 {
		return fmt.Errorf("mounting workspace %s: size %d: give it a size", dir, size)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("mounting workspace: %w", err)
	}
	options := fmt.Sprintf("size=%d,nr_inodes=%d,uid=%d,gid=%d,mode=0755", size, max(size/bytesPerInode, minInodes), owner.UID, owner.GID)
	if err := unix.Mount("tagout", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mounting workspace %s: %w", dir, err)
	}
	return nil
}

// Unmount wipes the workspace: its memory is freed with the last mount of it. What is not there is not an
// error.
func Unmount(dir string) error {
	if err := Detach(dir); err != nil {
		return err
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing workspace %s: %w", dir, err)
	}
	return nil
}

// Detach unmounts whatever is mounted at dir; nothing, or no dir, is not an error.
func Detach(dir string) error {
	for {
		err := unix.Unmount(dir, unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EBUSY) { // somebody looks into it: out of sight now, freed when they leave
			err = unix.Unmount(dir, unix.UMOUNT_NOFOLLOW|unix.MNT_DETACH)
		}
		switch {
		case err == nil:
			continue // until nothing is mounted there
		case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT): // not a mount point, or not there
			return nil
		default:
			return fmt.Errorf("unmounting %s: %w", dir, err)
		}
	}
}
