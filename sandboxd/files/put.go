package files

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/oklog/ulid/v2"
	"golang.org/x/sys/unix"
)

// newPrefix begins the name of a file that is being written. It goes with the kid at the latest.
const newPrefix = ".tagout-new-"

// Put writes what src holds to the regular file rel, which it makes or replaces whole: until then the old one is
// there. The directory must exist.
func (t *Tree) Put(rel string, mode fs.FileMode, src io.Reader) (n int64, err error) {
	var dir, tmp *os.File
	name := newPrefix + ulid.Make().String()
	if err := t.asOwner(func() (err error) {
		if dir, err = at(t.root, path.Dir(rel), unix.O_RDONLY|unix.O_DIRECTORY, 0); err != nil {
			return err
		}
		if err = replaceable(dir, path.Base(rel)); err == nil {
			tmp, err = at(dir, name, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
		}
		if err != nil {
			dir.Close() // only looked through
		}
		return err
	}); err != nil {
		return 0, err
	}
	defer dir.Close() // as above
	n, err = io.Copy(tmp, src)
	err = errors.Join(err, tmp.Chmod(mode.Perm()), tmp.Close())
	return n, t.asOwner(func() error {
		if err == nil {
			err = replaceable(dir, path.Base(rel))
		}
		if err == nil { // never follows a link that is there by now
			err = unix.Renameat(int(dir.Fd()), name, int(dir.Fd()), path.Base(rel))
		}
		if err != nil {
			unix.Unlinkat(int(dir.Fd()), name, 0) // the kid may have been faster
		}
		return err
	})
}

// replaceable says whether a file may be put there: there is nothing, or a regular file.
func replaceable(dir *os.File, base string) error {
	info, err := lstat(dir, base)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case err != nil:
		return err
	case info.Mode&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: %s is a link", ErrPath, base)
	case !info.Mode.IsRegular():
		return fmt.Errorf("%w: %s", ErrKind, base)
	}
	return nil
}

// Unpack writes a tar stream's files, each through through, and directories below the directory rel, which it makes.
// Anything else in it is refused. What was written before an error stays.
func (t *Tree) Unpack(rel string, src io.Reader, through Through) (s Survey, err error) {
	in := tar.NewReader(src)
	if err := t.asOwner(func() error { return mkdirs(t.root, rel, 0o755) }); err != nil {
		return s, err
	}
	for {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return s, nil
		}
		if err != nil {
			return s, fmt.Errorf("reading the archive: %w", err)
		}
		if err := t.unpack(rel, h, in, through, &s); err != nil {
			return s, fmt.Errorf("unpacking %s: %w", h.Name, err)
		}
	}
}

func (t *Tree) unpack(rel string, h *tar.Header, src io.Reader, through Through, s *Survey) error {
	if strings.HasPrefix(h.Name, "/") {
		return fmt.Errorf("%w: it is absolute", ErrPath)
	}
	name, err := Rel(h.Name)
	if err != nil {
		return err
	}
	to, err := Rel(path.Join(rel, name))
	if err != nil {
		return err
	}
	s.Entries++
	if s.Entries > MaxEntries {
		return fmt.Errorf("%w: more than %d files", ErrLarge, MaxEntries)
	}
	mode := fs.FileMode(h.Mode).Perm()
	switch h.Typeflag {
	case tar.TypeDir:
		return t.asOwner(func() error { return mkdirs(t.root, to, mode|0o700) })
	case tar.TypeReg:
		if name == "." {
			return fmt.Errorf("%w: it is the directory itself", ErrPath)
		}
		if err := t.asOwner(func() error { return mkdirs(t.root, path.Dir(to), 0o755) }); err != nil {
			return err
		}
		n, err := t.Put(to, mode, through.of(to, src))
		s.Bytes += n
		return err
	case tar.TypeXGlobalHeader:
		return nil
	}
	return ErrKind
}

// mkdirs makes the directory rel and its parents below root; perm counts for the last one. It runs as the kid's user.
func mkdirs(root *os.File, rel string, perm fs.FileMode) error {
	if rel == "." {
		return nil
	}
	dir, err := at(root, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	for i, name := range strings.Split(rel, "/") {
		if err != nil {
			return err
		}
		made := false
		switch err = unix.Mkdirat(int(dir.Fd()), name, 0o700); {
		case err == nil:
			made = true
		case errors.Is(err, unix.EEXIST):
			err = nil
		default:
			err = &fs.PathError{Op: "mkdirat", Path: name, Err: err}
		}
		parent := dir
		if err == nil {
			dir, err = at(parent, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		}
		parent.Close() // only looked through
		if err == nil && made {
			mode := fs.FileMode(0o755)
			if i == strings.Count(rel, "/") {
				mode = perm
			}
			err = dir.Chmod(mode)
		}
	}
	if err == nil {
		err = dir.Close()
	}
	return err
}
