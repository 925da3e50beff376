package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

const diskSize = 8 << 20

// From linux/fs.h; the same on every architecture that Tagout is built for.
const (
	ioctlFreeze = 0xc0045877 // FIFREEZE
	ioctlThaw   = 0xc0045878 // FITHAW
)

// holdDisk runs outside the kid, as root: it makes an ext4 filesystem in a file below DIR, mounts it into the mount
// namespace of process PID at TARGET, for UID, and then freezes and thaws it as standard input says, a word a
// line. It answers each with a word. When the input ends, also because whoever gave it was killed, it thaws the
// filesystem and lets go of it: nothing may wait for it for ever.
//
//	hostile hold-disk DIR PID TARGET UID
func holdDisk(in io.Reader, out io.Writer, args []string) error {
	if len(args) != 4 {
		usage("hold-disk wants DIR PID TARGET UID")
	}
	pid, err := strconv.Atoi(args[1])
	uid, uidErr := strconv.Atoi(args[3])
	if err := errors.Join(err, uidErr); err != nil {
		return fmt.Errorf("hold-disk: %w", err)
	}
	root, err := mountDisk(args[0], uid, func(mount int) error { return moveInto(pid, mount, args[2]) })
	if err != nil {
		return fmt.Errorf("holding a disk: %w", err)
	}
	defer unix.Close(root)                     // the last use of it, once the kid is gone
	defer unix.IoctlSetInt(root, ioctlThaw, 0) // it may not be frozen
	fmt.Fprintln(out, "mounted")
	for sc := bufio.NewScanner(in); sc.Scan(); {
		request, word := uint(ioctlThaw), "thawed"
		if sc.Text() == "freeze" {
			request, word = ioctlFreeze, "frozen"
		}
		if err := unix.IoctlSetInt(root, request, 0); err != nil {
			return fmt.Errorf("holding a disk: %s: %w", sc.Text(), err)
		}
		fmt.Fprintln(out, word)
	}
	return nil
}

// mountDisk makes the filesystem, hands its mount to place and returns a descriptor of its root.
func mountDisk(dir string, uid int, place func(mount int) error) (root int, err error) {
	image := filepath.Join(dir, "disk.img")
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return -1, err
	}
	if err := os.Truncate(image, diskSize); err != nil {
		return -1, err
	}
	if text, err := exec.Command("mkfs.ext4", "-q", "-F", image).CombinedOutput(); err != nil {
		return -1, fmt.Errorf("making an ext4 filesystem: %w: %s", err, text)
	}
	loop, err := attachLoop(image)
	if err != nil {
		return -1, err
	}
	defer loop.Close()     // the mount holds it, and lets go of it at its own end
	defer os.Remove(image) // likewise
	mount, err := mountExt4(loop.Name())
	if err != nil {
		return -1, err
	}
	defer unix.Close(mount) // it stays where place put it
	root, err = unix.Openat(mount, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Fchown(root, uid, uid)
	}
	if err == nil {
		err = place(mount)
	}
	if err != nil && root >= 0 {
		unix.Close(root) // already failing
	}
	return root, err
}

// attachLoop puts a file behind a free loop device, which is freed when nobody uses it any more (loop(4)).
func attachLoop(image string) (*os.File, error) {
	file, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close() // the device has its own
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close() // only asked
	for range 16 {        // somebody else may take the one that is free
		var nr int
		if nr, err = unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE); err != nil {
			return nil, fmt.Errorf("finding a free loop device: %w", err)
		}
		var dev *os.File
		if dev, err = os.OpenFile(fmt.Sprintf("/dev/loop%d", nr), os.O_RDWR, 0); err != nil {
			return nil, err
		}
		config := &unix.LoopConfig{Fd: uint32(file.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_AUTOCLEAR}}
		if err = unix.IoctlLoopConfigure(int(dev.Fd()), config); err == nil {
			return dev, nil
		}
		dev.Close() // nothing was done with it
		if !errors.Is(err, unix.EBUSY) {
			break
		}
	}
	return nil, fmt.Errorf("attaching a loop device: %w", err)
}

// mountExt4 returns a mount that is nowhere yet.
func mountExt4(device string) (int, error) {
	fs, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("mounting ext4: %w", err)
	}
	defer unix.Close(fs) // the mount outlives it
	err = unix.FsconfigSetString(fs, "source", device)
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return -1, fmt.Errorf("mounting ext4: %w", err)
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOSUID|unix.MOUNT_ATTR_NODEV)
	if err != nil {
		return -1, fmt.Errorf("mounting ext4: %w", err)
	}
	return mount, nil
}

// moveInto puts a mount into another process's mount namespace.
func moveInto(pid, mount int, target string) error {
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(ns) // only read
	moved := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this function
		// A thread may change its mount namespace once it shares its working directory with no other (setns(2)).
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Setns(ns, unix.CLONE_NEWNS)
		}
		if err == nil {
			err = os.Mkdir(target, 0o755)
		}
		if err == nil {
			err = unix.MoveMount(mount, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH)
		}
		moved <- err
	}()
	if err := <-moved; err != nil {
		return fmt.Errorf("putting the disk into process %d's %s: %w", pid, target, err)
	}
	return nil
}
