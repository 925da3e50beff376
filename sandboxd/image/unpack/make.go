package unpack

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	maxUID = 1<<16 - 1 // what a kid's user namespace has
	nobody = 65534
)

// owner is whom an entry belongs to. Users that no kid can have become nobody.
func owner(id int) int {
	if id < 0 || id > maxUID {
		return nobody
	}
	return id
}

// finish gives an open file or directory its owner and mode.
func (u *Unpacker) finish(f *os.File, hdr *tar.Header, bits uint32) error {
	fd := int(f.Fd())
	if u.owners {
		if err := unix.Fchown(fd, owner(hdr.Uid), owner(hdr.Gid)); err != nil {
			return err
		}
	}
	return unix.Fchmod(fd, uint32(hdr.Mode)&bits) // the mask leaves 12 bits at most
}

func (u *Unpacker) makeDir(at int, base string, hdr *tar.Header) error {
	err := unix.Mkdirat(at, base, 0o700)
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if err := unix.Fstatat(at, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		if err = nil; st.Mode&unix.S_IFMT != unix.S_IFDIR {
			if err = unix.Unlinkat(at, base, 0); err == nil {
				err = unix.Mkdirat(at, base, 0o700)
			}
		}
	}
	if err != nil {
		return err
	}
	f, err := child(at, base)
	if err != nil {
		return err
	}
	defer f.Close() // only its attributes are used
	return errors.Join(u.finish(f, hdr, unix.S_ISVTX|0o777), u.note(at, base))
}

func (u *Unpacker) makeFile(at int, base string, hdr *tar.Header, content io.Reader) error {
	if hdr.Size > u.limits.Bytes-u.report.Bytes {
		return fmt.Errorf("%w: more than %d bytes of files", ErrLimit, u.limits.Bytes)
	}
	if err := u.clear(at, base); err != nil {
		return err
	}
	fd, err := unix.Openat(at, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "openat", Path: base, Err: err}
	}
	f := os.NewFile(uintptr(fd), base)
	n, err := io.Copy(f, content)
	u.report.Bytes += n
	if err == nil {
		err = errors.Join(u.finish(f, hdr, 0o777), u.note(at, base))
	}
	if err == nil && !hdr.ModTime.IsZero() {
		ts := unix.NsecToTimespec(hdr.ModTime.UnixNano())
		err = unix.UtimesNanoAt(at, base, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	}
	return errors.Join(err, f.Close())
}

// makeSymlink makes a link whatever it points to: nobody follows it here but the kernel inside the root, and a kid
// follows it in a root of its own.
func (u *Unpacker) makeSymlink(at int, base string, hdr *tar.Header) error {
	if hdr.Linkname == "" || len(hdr.Linkname) > maxPath || strings.ContainsRune(hdr.Linkname, 0) {
		return errors.New("its target is no path")
	}
	if err := u.clear(at, base); err != nil {
		return err
	}
	if err := unix.Symlinkat(hdr.Linkname, at, base); err != nil {
		return err
	}
	if u.owners {
		if err := unix.Fchownat(at, base, owner(hdr.Uid), owner(hdr.Gid), unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
	}
	if err := u.note(at, base); err != nil {
		return err
	}
	u.forget()
	return nil
}

// makeLink gives a regular file of the image a second name.
func (u *Unpacker) makeLink(path string, hdr *tar.Header) error {
	target, err := u.clean(hdr.Linkname)
	if err != nil || target == "" {
		return errors.Join(errors.New("it is a second name for something outside the image"), err)
	}
	toDir, toBase := split(target)
	from, err := lookup(u.root, toDir)
	if err != nil {
		return fmt.Errorf("it is a second name for what is not there: %w", err)
	}
	defer from.Close() // O_PATH
	var st unix.Stat_t
	if err := unix.Fstatat(int(from.Fd()), toBase, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("it is a second name for what is not there: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return errors.New("it is a second name for what is no regular file")
	}
	dir, base := split(path)
	parent, err := u.open(dir)
	if err != nil {
		return err
	}
	at := int(parent.Fd())
	var old unix.Stat_t
	if err := unix.Fstatat(at, base, &old, unix.AT_SYMLINK_NOFOLLOW); err == nil && old.Ino == st.Ino {
		return u.note(at, base) // it has that name already
	}
	if err := u.clear(at, base); err != nil {
		return err
	}
	if err := unix.Linkat(int(from.Fd()), toBase, at, base, 0); err != nil { // what clear removed may have been it
		return fmt.Errorf("giving a file a second name: %w", err)
	}
	return u.note(at, base)
}

// Whiteouts, as the OCI image specification has them (layer.md): an entry that hides what lower layers had.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq" // everything in the directory
	auxiliar = ".wh..wh."     // other names with this prefix belong to AUFS itself
)

func (u *Unpacker) hide(dir, base string) error {
	if strings.HasPrefix(base, auxiliar) && base != opaque {
		return nil
	}
	parent, err := lookup(u.root, dir)
	if errors.Is(err, unix.ENOENT) {
		return nil // nothing to hide
	}
	if err != nil {
		return err
	}
	defer parent.Close() // O_PATH
	if u.fresh == nil {
		return nil // the lowest layer hides nothing
	}
	u.forget()
	if base == opaque {
		return u.pruneIn(int(parent.Fd()), ".", u.fresh)
	}
	name := strings.TrimPrefix(base, whiteout)
	if name == "" || name == "." || name == ".." {
		return errors.New("it hides nothing that can be named")
	}
	return u.prune(int(parent.Fd()), name, u.fresh)
}
