package filewatch

import (
	"crypto/sha256"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// file is what tells one file from another.
type file struct {
	dev, ino uint64
	size     int64
	sum      [sha256.Size]byte
}

// program is one that is forbidden.
type program struct {
	path   string
	there  bool // it was there when the watch began; without that only its path is known
	file   file
	loader file // its dynamic loader; zero where it has none
}

// maxSum bounds the files that are compared by content, in bytes.
const maxSum = 1 << 30

// programsOf finds the forbidden programs in a kid, through whatever links lead to them there.
func programsOf(pid int, paths []string) ([]program, error) {
	root, err := unix.Open(fmt.Sprintf("/proc/%d/root", pid), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening the kid's root: %w", err)
	}
	defer unix.Close(root) // nothing was written
	var out []program
	for _, path := range paths {
		p := program{path: path}
		f, err := openIn(root, path)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENOTDIR):
			out = append(out, p)
			continue
		case err != nil:
			return nil, fmt.Errorf("looking at the forbidden program %s: %w", path, err)
		}
		if p.file, err = identify(f); err == nil {
			p.there = true
			p.loader, err = loaderOf(root, f)
		}
		f.Close() // only read
		if err != nil {
			return nil, fmt.Errorf("looking at the forbidden program %s: %w", path, err)
		}
		out = append(out, p)
	}
	return out, nil
}

// openIn opens a file as a process with that root would, except that a FIFO or device is never waited for.
func openIn(root int, path string) (*os.File, error) {
	fd, err := unix.Openat2(root, path, &unix.OpenHow{Flags: unix.O_RDONLY | unix.O_NONBLOCK | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), path), nil
}

// identify reads all that a file is compared by. What is no regular file has no content.
func identify(f *os.File) (file, error) {
	id, err := inodeOf(f)
	if err == nil && id.size > 0 && id.size <= maxSum {
		id.sum, err = sumOf(f)
	}
	return id, err
}

func inodeOf(f *os.File) (file, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return file{}, err
	}
	id := file{dev: st.Dev, ino: st.Ino}
	if st.Mode&unix.S_IFMT == unix.S_IFREG {
		id.size = st.Size
	}
	return id, nil
}

func sumOf(f *os.File) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	if _, err := io.Copy(h, io.NewSectionReader(f, 0, maxSum)); err != nil {
		return sum, err
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// loaderOf identifies the dynamic loader that an ELF program names.
func loaderOf(root int, f *os.File) (file, error) {
	e, err := elf.NewFile(f)
	if err != nil {
		return file{}, nil // no ELF program: it has no loader
	}
	for _, p := range e.Progs {
		if p.Type != elf.PT_INTERP || p.Filesz > 4096 {
			continue
		}
		raw, err := io.ReadAll(p.Open())
		if err != nil {
			return file{}, err
		}
		l, err := openIn(root, strings.TrimRight(string(raw), "\x00"))
		if errors.Is(err, fs.ErrNotExist) {
			return file{}, nil // then it cannot run at all
		}
		if err != nil {
			return file{}, err
		}
		defer l.Close() // only read
		return identify(l)
	}
	return file{}, nil
}

// same says how f is the file known: by inode or by content; "" where it is another one.
func (known file) same(f *os.File) string {
	id, err := inodeOf(f)
	switch {
	case err != nil:
		return ""
	case id.dev == known.dev && id.ino == known.ino:
		return "inode"
	case id.size == 0 || id.size != known.size || id.size > maxSum:
		return ""
	}
	if sum, err := sumOf(f); err == nil && sum == known.sum {
		return "content"
	}
	return ""
}

// match says how f, started as path, is the program; "" where it is another one.
func (p *program) match(f *os.File, path string) string {
	if path == p.path {
		return "path"
	}
	if !p.there {
		return ""
	}
	return p.file.same(f)
}
