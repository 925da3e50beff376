package unpack

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"
)

// place opens the directory that path lies in, or makes it. at is its descriptor, which is the unpacker's, and base the
// name in it.
func (u *Unpacker) place(path string) (clean string, at int, base string, err error) {
	if clean, err = u.clean(path); err != nil {
		return "", 0, "", err
	}
	dir, base := split(clean)
	parent, err := u.open(dir)
	if err != nil {
		return "", 0, "", err
	}
	return clean, int(parent.Fd()), base, nil
}

// Dir makes sure that path is a directory: what else is there is replaced.
func (u *Unpacker) Dir(path string) error {
	path, at, base, err := u.place(path)
	if err != nil {
		return err
	}
	if f, err := child(at, base); err == nil {
		return f.Close()
	}
	if err := u.clear(at, base); err != nil {
		return err
	}
	f, err := u.make(path)
	if err != nil {
		return err
	}
	return f.Close()
}

// File makes sure that path is a regular file: what else is there is replaced by an empty one.
func (u *Unpacker) File(path string) error {
	if _, err := u.Read(path, 0); err == nil || errors.Is(err, ErrLimit) {
		return nil
	}
	return u.Write(path, nil)
}

// Write replaces path with a file that everybody may read.
func (u *Unpacker) Write(path string, content []byte) error {
	path, at, base, err := u.place(path)
	if err != nil {
		return err
	}
	if err := errors.Join(u.count(), u.clear(at, base)); err != nil {
		return err
	}
	fd, err := unix.Openat(at, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return &os.PathError{Op: "openat", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	_, err = f.Write(content)
	return errors.Join(err, f.Chmod(0o644), f.Close()) // see above
}

// Read returns a regular file of the image; fs.ErrNotExist where there is something else, and ErrLimit where it is
// longer than most bytes.
func (u *Unpacker) Read(path string, most int64) ([]byte, error) {
	path, err := u.clean(path)
	if err != nil {
		return nil, err
	}
	dir, base := split(path)
	parent, err := lookup(u.root, dir)
	if err != nil {
		return nil, err
	}
	defer parent.Close() // O_PATH
	fd, err := unix.Openat(int(parent.Fd()), base, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ELOOP) {
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, &os.PathError{Op: "openat", Path: path, Err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close() // only read
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, errors.Join(&os.PathError{Op: "openat", Path: path, Err: fs.ErrNotExist}, err)
	}
	raw, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(raw)) > most {
		err = fmt.Errorf("%w: %s is longer than %d bytes", ErrLimit, quote(path), most)
	}
	return raw, err
}
