package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Input is one file or directory of the host that a kid finds in its workspace. Links below a directory are
// refused: they could mean something else inside.
type Input struct {
	From string      // absolute path on the host
	To   string      // path below the workspace; "." is the workspace itself, for a directory
	Mode fs.FileMode // of a file; 0 keeps the permission bits that it has on the host
}

// beneath makes the kernel refuse every way out of the workspace, whoever put it there.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// Place copies inputs into the workspace at dir, owned by owner. The first that fails ends it.
func Place(dir string, inputs []Input, owner Owner) error {
	root, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("placing inputs: %w", err)
	}
	defer root.Close() //nolint:errcheck // only read
	p := placer{root: root, owner: owner}
	for _, in := range inputs {
		if err := p.place(in); err != nil {
			if errors.Is(err, unix.ENOSPC) {
				err = fmt.Errorf("%w: make filesystem.workspace larger in the card", err)
			}
			return fmt.Errorf("placing input %s at %s: %w", in.From, in.To, err)
		}
	}
	return nil
}

type placer struct {
	root  *os.File
	owner Owner
}

func (p placer) place(in Input) error {
	if !filepath.IsLocal(in.To) {
		return errors.New("the target is not a path below the workspace")
	}
	to := path.Clean(in.To)
	info, err := os.Stat(in.From)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		if to == "." {
			return errors.New("the target names no file")
		}
		return p.file(in.From, to, in.Mode)
	}
	return filepath.WalkDir(in.From, func(from string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(in.From, from)
		if err != nil {
			return err
		}
		target := path.Join(to, filepath.ToSlash(rel))
		switch {
		case e.IsDir():
			return p.dirs(target)
		case e.Type().IsRegular():
			return p.file(from, target, in.Mode)
		default:
			return fmt.Errorf("%s is neither a file nor a directory", from)
		}
	})
}

// file copies one regular file. It is opened without following a link, so that a directory which changes
// under the copy cannot bring in another file.
func (p placer) file(from, to string, mode fs.FileMode) error {
	src, err := os.OpenFile(from, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer src.Close() //nolint:errcheck // only read
	info, err := src.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", from)
	}
	if mode == 0 {
		mode = info.Mode()
	}
	if err := p.dirs(path.Dir(to)); err != nil {
		return err
	}
	dst, err := p.open(to, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Chown(p.owner.UID, p.owner.GID), dst.Chmod(mode.Perm()), dst.Close())
}

// dirs makes the directory rel and its parents.
func (p placer) dirs(rel string) error {
	if rel == "." {
		return nil
	}
	if err := p.dirs(path.Dir(rel)); err != nil {
		return err
	}
	parent, err := p.open(path.Dir(rel), unix.O_DIRECTORY|unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer parent.Close() //nolint:errcheck // only read
	name := path.Base(rel)
	switch err := unix.Mkdirat(int(parent.Fd()), name, 0o755); {
	case errors.Is(err, unix.EEXIST):
		dir, err := p.open(rel, unix.O_DIRECTORY|unix.O_RDONLY, 0)
		if err != nil {
			return err
		}
		return dir.Close()
	case err != nil:
		return &fs.PathError{Op: "mkdirat", Path: rel, Err: err}
	}
	dir, err := p.open(rel, unix.O_DIRECTORY|unix.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(dir.Chown(p.owner.UID, p.owner.GID), dir.Chmod(0o755), dir.Close())
}

// open opens rel beneath the workspace.
func (p placer) open(rel string, flags int, perm uint64) (*os.File, error) {
	how := &unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC, Mode: perm, Resolve: beneath} //nolint:gosec // flags are not negative
	for {
		fd, err := unix.Openat2(int(p.root.Fd()), rel, how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "openat2", Path: rel, Err: err}
		}
		return os.NewFile(uintptr(fd), rel), nil
	}
}
