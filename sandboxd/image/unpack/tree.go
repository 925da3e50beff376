package unpack

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// inside makes the kernel resolve links as a chroot to the root would, and refuse other file systems.
const inside = unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// lookup opens the directory dir of the image; "" is its root.
func lookup(root *os.File, dir string) (*os.File, error) {
	if dir == "" {
		dir = "."
	}
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: inside}
	for {
		fd, err := unix.Openat2(int(root.Fd()), dir, how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, &os.PathError{Op: "openat2", Path: dir, Err: err}
		}
		return os.NewFile(uintptr(fd), dir), nil
	}
}

// open opens the directory dir, and makes it and its parents where they are missing. The result is the unpacker's.
func (u *Unpacker) open(dir string) (*os.File, error) {
	if u.parent != nil && u.path == dir {
		return u.parent, nil
	}
	f, err := lookup(u.root, dir)
	if errors.Is(err, unix.ENOENT) && dir != "" {
		f, err = u.make(dir)
	}
	if err != nil {
		return nil, err
	}
	if err := u.shallow(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	u.forget()
	u.parent, u.path = f, dir
	return f, nil
}

// shallow refuses to go on in a directory that lies deeper than an entry may. What an entry's path says is not enough: by way
// of links it can lead from one end to the next, down to where nobody can remove it any more (one descriptor for each level).
func (u *Unpacker) shallow(dir *os.File) error {
	root, err := where(u.root)
	if err != nil {
		return err
	}
	path, err := where(dir)
	levels := strings.Count(strings.TrimPrefix(path, root), "/")
	switch {
	case errors.Is(err, unix.ENAMETOOLONG):
		return fmt.Errorf("%w: a path of more than %d bytes", ErrLimit, maxPath)
	case err != nil:
		return err
	case levels >= u.limits.Depth:
		return fmt.Errorf("%w: something in a directory of %d levels, by way of links", ErrLimit, levels)
	}
	return nil
}

// where asks the kernel for the path of an open directory.
func where(f *os.File) (string, error) { return os.Readlink(fmt.Sprint("/proc/self/fd/", f.Fd())) }

// make makes a directory that the image did not list; its parents may be missing too.
func (u *Unpacker) make(dir string) (*os.File, error) {
	up, base := split(dir)
	parent, err := u.open(up)
	if err != nil {
		return nil, err
	}
	if err := u.count(); err != nil {
		return nil, err
	}
	at := int(parent.Fd())
	if err := unix.Mkdirat(at, base, 0o755); err != nil {
		return nil, &os.PathError{Op: "mkdirat", Path: dir, Err: err} // EEXIST: a link that leads nowhere
	}
	f, err := child(at, base)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only its attributes are used
	if err := errors.Join(f.Chmod(0o755), u.note(at, base)); err != nil {
		return nil, err
	}
	return lookup(u.root, dir)
}

// forget drops the directory that was kept open: what its path means may have changed.
func (u *Unpacker) forget() {
	if u.parent != nil {
		u.parent.Close() // O_PATH
		u.parent = nil
	}
}

// child opens a directory in at; a link is an error.
func child(at int, name string) (*os.File, error) {
	fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "openat", Path: name, Err: err}
	}
	return os.NewFile(uintptr(fd), name), nil
}

// slot is a name in a directory, whatever path led there.
type slot struct {
	dir  uint64 // inode
	name string
}

// note remembers that the current layer has what is called name in at, so that the layer's own whiteouts spare it.
func (u *Unpacker) note(at int, name string) error {
	if u.fresh == nil {
		return nil
	}
	dir, err := inode(at)
	if err == nil {
		u.fresh[slot{dir, name}] = true
	}
	return err
}

func inode(fd int) (uint64, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return st.Ino, err
}

// clear removes whatever is called name in at. Nothing is not an error.
func (u *Unpacker) clear(at int, name string) error {
	err := unix.Unlinkat(at, name, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EISDIR):
		return u.prune(at, name, nil)
	case err != nil:
		return &os.PathError{Op: "unlinkat", Path: name, Err: err}
	}
	return nil
}

// prune removes what is called name in at, with everything in it, except what keep has and what holds that. name may
// be missing.
func (u *Unpacker) prune(at int, name string, keep map[slot]bool) error {
	dir, err := inode(at)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	err = unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	kept := keep[slot{dir, name}]
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return &os.PathError{Op: "fstatat", Path: name, Err: err}
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return u.pruneDir(at, name, keep, kept)
	case kept:
		return nil
	}
	return unix.Unlinkat(at, name, 0)
}

func (u *Unpacker) pruneDir(at int, name string, keep map[slot]bool, kept bool) error {
	if err := u.pruneIn(at, name, keep); err != nil {
		return err
	}
	if kept {
		return nil
	}
	err := unix.Unlinkat(at, name, unix.AT_REMOVEDIR)
	if keep != nil && errors.Is(err, unix.ENOTEMPTY) {
		return nil // it holds something of this layer
	}
	return err
}

// pruneIn prunes everything in the directory name of at.
func (u *Unpacker) pruneIn(at int, name string, keep map[slot]bool) error {
	dir, err := child(at, name)
	if err != nil {
		return err
	}
	defer dir.Close() // only read
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, n := range names {
		if err := u.prune(int(dir.Fd()), n, keep); err != nil {
			return fmt.Errorf("removing %s: %w", quote(n), err)
		}
	}
	return nil
}
