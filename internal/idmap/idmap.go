// Package idmap mounts a directory somewhere else with its files' owners shifted into a user namespace (idmapped
// mounts, mount_setattr(2)): a file of uid 0 on disk belongs to the namespace's root there, and nothing on disk changes.
// Every such mount is read-only, and neither set-uid programs nor devices work in it.
package idmap

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Mount mounts dir at target, an existing directory. With a path to a user namespace (proc_pid_ns(5)) owners are those
// that the namespace maps; with "" they stay what they are. The caller unmounts target.
func Mount(dir, target, userns string) error {
	fail := func(err error) error { return fmt.Errorf("mounting %s at %s: %w", dir, target, err) }
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(tree) // the mount lives on where it is attached
	attr := &unix.MountAttr{
		Attr_set:    unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV,
		Propagation: unix.MS_PRIVATE,
	}
	if userns != "" {
		ns, err := os.Open(userns)
		if err != nil {
			return fail(err)
		}
		defer ns.Close() // only read
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(ns.Fd())
	}
	if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, attr); err != nil {
		return fail(fmt.Errorf("setting its attributes: %w", err))
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fail(err)
	}
	return nil
}

// tryUID is a host uid that nobody has.
const tryUID = 0x6FFE0000

// Try makes a directory below dir and mounts it shifted, to find out whether the kernel and dir's file system can do it.
// Everything that it makes is gone when it returns, or with the next try. Only one may go on in dir at a time.
func Try(ctx context.Context, dir string) (err error) {
	top := filepath.Join(dir, ".idmap-try")
	if err := sweep(top); err != nil { // a killed predecessor's, if anything
		return fmt.Errorf("trying an idmapped mount: %w", err)
	}
	defer func() { err = errors.Join(err, sweep(top)) }()
	if err := try(ctx, top); err != nil {
		return fmt.Errorf("trying an idmapped mount: %w", err)
	}
	return nil
}

// try is Try, and leaves top with a mount in it.
func try(ctx context.Context, top string) error {
	from, to := filepath.Join(top, "from"), target(top)
	if err := errors.Join(os.Mkdir(top, 0o700), os.Mkdir(from, 0o700), os.Mkdir(to, 0o700)); err != nil {
		return err
	}
	return inUserNS(ctx, func(userns string) error {
		if err := Mount(from, to, userns); err != nil {
			return err
		}
		var st unix.Stat_t
		err := unix.Stat(to, &st)
		if err == nil && st.Uid != tryUID {
			err = fmt.Errorf("the mount took, but root's directory belongs to uid %d instead of %d", st.Uid, tryUID)
		}
		return err
	})
}

func target(top string) string { return filepath.Join(top, "to") }

// sweep removes what a try made, or half of it.
func sweep(top string) error {
	unix.Unmount(target(top), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW) // removing says it where that is not possible
	return os.RemoveAll(top)
}

// inUserNS calls fn with a user namespace that lives for as long.
func inUserNS(ctx context.Context, fn func(userns string) error) error {
	cmd := exec.CommandContext(ctx, "/bin/cat") // waits for its standard input to end
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: tryUID, Size: 1 << 16}}
	cmd.Env = []string{}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids, Pdeathsig: unix.SIGKILL}
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("making a user namespace: %w", err)
	}
	err = fn(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "ns", "user"))
	in.Close()                          // it ends on it
	return errors.Join(err, cmd.Wait()) // as above
}
