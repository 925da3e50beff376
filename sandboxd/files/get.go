package files

import (
	"archive/tar"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Info describes one entry of a directory, not followed where it is a link.
type Info struct {
	Name     string
	Mode     fs.FileMode
	Size     int64
	Modified time.Time
}

// readBatch is how many names of a directory are in memory at once.
const readBatch = 1024

// List returns up to limit entries of the directory rel whose names follow after, by name, and whether there are
// more. A directory of a million entries costs time and no memory.
func (t *Tree) List(rel, after string, limit int) (out []Info, more bool, err error) {
	err = t.asOwner(func() error {
		dir, err := at(t.root, rel, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer dir.Close() // only read
		first := &lastFirst{}
		if err := names(dir, func(name string) error {
			if name > after {
				heap.Push(first, name)
			}
			if first.Len() > limit {
				heap.Pop(first)
				more = true
			}
			return nil
		}); err != nil {
			return err
		}
		slices.Sort(*first)
		for _, name := range *first {
			info, err := lstat(dir, name)
			if errors.Is(err, unix.ENOENT) {
				continue // gone meanwhile
			}
			if err != nil {
				return err
			}
			out = append(out, info)
		}
		return nil
	})
	return out, more, err
}

// lastFirst is a heap whose top is the greatest name.
type lastFirst []string

func (h lastFirst) Len() int           { return len(h) }
func (h lastFirst) Less(i, j int) bool { return h[i] > h[j] }
func (h lastFirst) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *lastFirst) Push(x any)        { *h = append(*h, x.(string)) } // only strings are pushed
func (h *lastFirst) Pop() any {
	old := *h
	last := old[len(old)-1]
	*h = old[:len(old)-1]
	return last
}

// names calls fn with each name in dir.
func names(dir *os.File, fn func(name string) error) error {
	for {
		batch, err := dir.Readdirnames(readBatch)
		for _, name := range batch {
			if err := fn(name); err != nil {
				return err
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func lstat(dir *os.File, name string) (Info, error) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return Info{}, &fs.PathError{Op: "fstatat", Path: name, Err: err}
	}
	mode := fs.FileMode(st.Mode & 0o777)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	default:
		mode |= fs.ModeDevice
	}
	return Info{Name: name, Mode: mode, Size: st.Size, Modified: time.Unix(st.Mtim.Unix()).UTC()}, nil
}

// Get opens the regular file rel for reading; the caller closes it and reads Info.Size bytes of it, no more: a file
// may grow for ever. A sparse file that claims to be larger than its place is refused.
func (t *Tree) Get(rel string) (f *os.File, info Info, err error) {
	err = t.asOwner(func() error {
		var st fs.FileInfo
		f, st, err = regular(t.root, rel)
		if err != nil {
			return err
		}
		if st.Size() > t.size {
			f.Close() // only read
			return fmt.Errorf("%w: the file claims %d bytes, its place holds %d", ErrLarge, st.Size(), t.size)
		}
		info = Info{Name: path.Base(rel), Mode: st.Mode().Perm(), Size: st.Size(), Modified: st.ModTime().UTC()}
		return nil
	})
	return f, info, err
}

// Survey is what an archive of a directory would hold.
type Survey struct {
	Entries int
	Bytes   int64
	Special int // links, FIFOs, sockets and devices
}

// Survey walks the directory rel. An error that wraps ErrLarge says that it is more than is carried.
func (t *Tree) Survey(rel string) (s Survey, err error) {
	err = t.asOwner(func() error {
		return t.walk(rel, &s, func(*os.File, string, Info) error { return nil })
	})
	return s, err
}

// Archive writes the directory rel to w as a tar stream: regular files and directories, names relative to rel. What
// is neither is left out where skip says so, and refused otherwise.
func (t *Tree) Archive(rel string, skip bool, w io.Writer) (s Survey, err error) {
	out := tar.NewWriter(w)
	err = t.asOwner(func() error {
		err := t.walk(rel, &s, func(dir *os.File, name string, info Info) error {
			switch {
			case info.Mode.IsDir():
				return out.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: name + "/", Mode: int64(info.Mode.Perm()), ModTime: info.Modified})
			case info.Mode.IsRegular():
				return pack(out, dir, name, info)
			case skip:
				return nil
			}
			return fmt.Errorf("%s: %w", name, ErrKind)
		})
		return errors.Join(err, out.Close())
	})
	return s, err
}

// pack writes one file as it is now: as long as it was when it was opened.
func pack(out *tar.Writer, dir *os.File, name string, info Info) error {
	f, st, err := regular(dir, path.Base(name))
	if errors.Is(err, unix.ENOENT) {
		return nil // gone meanwhile
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	defer f.Close() // only read
	if st.Size() > info.Size {
		st = shorter{st, info.Size} // counted as it was
	}
	if err := out.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: int64(st.Mode().Perm()), Size: st.Size(), ModTime: st.ModTime()}); err != nil {
		return err
	}
	n, err := io.CopyN(out, f, st.Size())
	if errors.Is(err, io.EOF) {
		err = fmt.Errorf("%s got shorter, after %d bytes, while it was read", name, n)
	}
	return err
}

// shorter is a file's information with another size.
type shorter struct {
	fs.FileInfo
	size int64
}

func (s shorter) Size() int64 { return s.size }

// walk visits what is below rel, counting it in s. It runs as the kid's user.
func (t *Tree) walk(rel string, s *Survey, visit func(dir *os.File, name string, info Info) error) error {
	dir, err := at(t.root, rel, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close() // only read
	return t.walkDir(dir, "", 1, s, visit)
}

func (t *Tree) walkDir(dir *os.File, prefix string, depth int, s *Survey, visit func(dir *os.File, name string, info Info) error) error {
	if depth > MaxDepth {
		return fmt.Errorf("%s: %w: more than %d levels deep", prefix, ErrLarge, MaxDepth)
	}
	return names(dir, func(base string) error {
		info, err := lstat(dir, base)
		if errors.Is(err, unix.ENOENT) {
			return nil // gone meanwhile
		}
		if err != nil {
			return err
		}
		name := prefix + base
		if err := s.count(info, t.size); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := visit(dir, name, info); err != nil || !info.Mode.IsDir() {
			return err
		}
		sub, err := at(dir, base, unix.O_RDONLY|unix.O_DIRECTORY, 0)
		if errors.Is(err, unix.ENOENT) {
			return nil // as above
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		defer sub.Close() // only read
		return t.walkDir(sub, name+"/", depth+1, s, visit)
	})
}

// count adds an entry. What holds no links twice and no holes is never larger than its place.
func (s *Survey) count(info Info, most int64) error {
	s.Entries++
	switch {
	case info.Mode.IsRegular():
		s.Bytes += info.Size
	case !info.Mode.IsDir():
		s.Special++
	}
	switch {
	case s.Entries > MaxEntries:
		return fmt.Errorf("%w: more than %d files", ErrLarge, MaxEntries)
	case s.Bytes > most || s.Bytes < 0:
		return fmt.Errorf("%w: the files claim more bytes than their place holds (%d)", ErrLarge, most)
	}
	return nil
}
