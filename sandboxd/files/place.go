package files

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Input is one regular file of the host that a kid finds in its workspace.
type Input struct {
	Dir  string      // absolute directory on the host that From does not leave
	From string      // path below Dir
	To   string      // path below the workspace
	Mode fs.FileMode // permission bits; 0 keeps those that it has on the host
}

// beneath makes the kernel refuse every way out of the workspace, whoever put it there.
const beneath = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV

// Text is a file that a kid finds in its workspace, with what is in it.
type Text struct {
	To   string // path below the workspace
	Text string
	Mode fs.FileMode // permission bits
}

// Write makes files in the workspace at dir, owned by owner. The first that fails ends it. Errors do not quote texts.
func Write(dir string, texts []Text, owner Owner) error {
	root, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("making files: %w", err)
	}
	defer root.Close() // only read
	p := placer{root: root, owner: owner}
	for _, t := range texts {
		if err := p.fill(t.To, strings.NewReader(t.Text), t.Mode); err != nil {
			return fmt.Errorf("making the file %s: %w", t.To, err)
		}
	}
	return nil
}

// Through returns a reader of the content of the file that goes to a path, which may end it with an error. nil: the content
// is taken as it is.
type Through func(to string, src io.Reader) io.Reader

func (t Through) of(to string, src io.Reader) io.Reader {
	if t == nil {
		return src
	}
	return t(to, src)
}

// Place copies inputs through through into the workspace at dir, owned by owner. The first that fails ends it.
func Place(dir string, inputs []Input, owner Owner, through Through) error {
	root, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("placing inputs: %w", err)
	}
	defer root.Close() // only read
	p := placer{root: root, owner: owner, through: through}
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

	through Through
}

// place copies one regular file.
func (p placer) place(in Input) error {
	src, mode, err := openInput(in)
	if err != nil {
		return err
	}
	defer src.Close() // only read
	return p.fill(in.To, p.through.of(in.To, src), mode)
}

// fill makes the file at to, which must not be there.
func (p placer) fill(to string, src io.Reader, mode fs.FileMode) error {
	if !filepath.IsLocal(to) || path.Clean(to) == "." {
		return errors.New("the target is not a file below the workspace")
	}
	if err := p.dirs(path.Dir(path.Clean(to))); err != nil {
		return err
	}
	dst, err := open(p.root, to, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL, 0o600, beneath)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Chown(p.owner.UID, p.owner.GID), dst.Chmod(mode.Perm()), dst.Close())
}

// openInput opens the input's file, following links only as long as they stay in its directory.
func openInput(in Input) (*os.File, fs.FileMode, error) {
	dir, err := os.Open(in.Dir)
	if err != nil {
		return nil, 0, err
	}
	defer dir.Close() // only read
	src, err := open(dir, in.From, unix.O_RDONLY|unix.O_NONBLOCK, 0, unix.RESOLVE_BENEATH|unix.RESOLVE_NO_MAGICLINKS)
	if errors.Is(err, unix.EXDEV) {
		return nil, 0, fmt.Errorf("it leads out of %s", in.Dir)
	}
	if err != nil {
		return nil, 0, err
	}
	info, err := src.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errors.New("it is not a regular file")
	}
	if err != nil {
		src.Close() // only read
		return nil, 0, err
	}
	mode := in.Mode
	if mode == 0 {
		mode = info.Mode()
	}
	return src, mode, nil
}

// dirs makes the directory rel and its parents.
func (p placer) dirs(rel string) error {
	if rel == "." {
		return nil
	}
	if err := p.dirs(path.Dir(rel)); err != nil {
		return err
	}
	parent, err := open(p.root, path.Dir(rel), unix.O_DIRECTORY|unix.O_RDONLY, 0, beneath)
	if err != nil {
		return err
	}
	defer parent.Close() // only read
	name := path.Base(rel)
	switch err := unix.Mkdirat(int(parent.Fd()), name, 0o755); {
	case errors.Is(err, unix.EEXIST):
		dir, err := open(p.root, rel, unix.O_DIRECTORY|unix.O_RDONLY, 0, beneath)
		if err != nil {
			return err
		}
		return dir.Close()
	case err != nil:
		return &fs.PathError{Op: "mkdirat", Path: rel, Err: err}
	}
	dir, err := open(p.root, rel, unix.O_DIRECTORY|unix.O_RDONLY, 0, beneath)
	if err != nil {
		return err
	}
	return errors.Join(dir.Chown(p.owner.UID, p.owner.GID), dir.Chmod(0o755), dir.Close())
}

// openTries is how often a path is resolved anew that was moved meanwhile, or that somebody holds a lease on.
const openTries = 64

// open opens rel below root; resolve says how strictly (openat2(2)).
func open(root *os.File, rel string, flags int, perm, resolve uint64) (*os.File, error) {
	how := &unix.OpenHow{Flags: uint64(flags) | unix.O_CLOEXEC, Mode: perm, Resolve: resolve} // flags are not negative
	for tries := 0; ; tries++ {
		fd, err := unix.Openat2(int(root.Fd()), rel, how)
		if errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) && tries < openTries {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "openat2", Path: rel, Err: err}
		}
		return os.NewFile(uintptr(fd), rel), nil
	}
}
