// Package manifest lists what is in the places where a kid could write when its session ends: mode, size and sha256 of
// each file. Everything there is the kid's: names, depth, sizes and kinds are what it liked them to be, so nothing is
// followed, opened by name alone or waited for, and how much is looked at is bounded. What was left out is counted.
package manifest

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
)

// Root is the top of one place, open; Parts are the directories in it that count, none: all of it.
type Root struct {
	Dir   *os.File
	As    string // what the kid calls it
	Parts []Part
}

// Part is a directory of a Root, relative to it, and what the kid calls it.
type Part struct{ In, As string }

// Limits bound the work.
type Limits struct {
	Time    time.Duration // of all of it
	Entries int
	Depth   int   // directories below each other
	Bytes   int64 // that are read to be hashed
}

// Manifest is what was found. Each entry is a line: mode, size, sha256 (or "-") and name, as audit.Shown has it.
type Manifest struct {
	Entries []string
	LeftOut map[string]int // why, and how often: entries, depth, time, bytes, unreadable
}

// Left says what was left out, "" nothing.
func (m *Manifest) Left() string {
	var out []string
	for _, why := range []string{leftEntries, leftDepth, leftTime, leftBytes, leftUnreadable} {
		if n := m.LeftOut[why]; n > 0 {
			out = append(out, why+" "+strconv.Itoa(n))
		}
	}
	return strings.Join(out, ", ")
}

// Reasons for leaving something out.
const (
	leftEntries    = "entries"    // directories of which not all was listed
	leftDepth      = "depth"      // directories that lie too deep, or below names too long to be given to the kernel
	leftTime       = "time"       // directories and hashes for which no time was left
	leftBytes      = "bytes"      // hashes of files that are too big
	leftUnreadable = "unreadable" // what could not be opened
)

// entry is one file.
type entry struct {
	name  string
	mode  fs.FileMode
	size  int64
	sum   string
	place *Root
	at    string // below the place's top; "" where it cannot be opened again by name
}

// walk is one Make.
type walk struct {
	ctx  context.Context
	lim  Limits
	out  *Manifest
	all  []entry
	root *Root
}

// Make lists what is in the places, the smallest files hashed first. It never fails: what it could not do is in LeftOut.
func Make(ctx context.Context, roots []Root, lim Limits) *Manifest {
	ctx, cancel := context.WithTimeout(ctx, lim.Time)
	defer cancel()
	w := &walk{ctx: ctx, lim: lim, out: &Manifest{LeftOut: map[string]int{}}}
	for i := range roots {
		w.root = &roots[i]
		parts := w.root.Parts
		if parts == nil {
			parts = []Part{{".", w.root.As}}
		}
		for _, p := range parts {
			w.dir(p.In, p.As, 0)
		}
	}
	w.hash()
	slices.SortFunc(w.all, func(a, b entry) int { return cmp.Compare(a.name, b.name) })
	for _, e := range w.all {
		w.out.Entries = append(w.out.Entries, e.line())
	}
	return w.out
}

func (e *entry) line() string {
	sum := e.sum
	if sum == "" {
		sum = "-"
	}
	name := e.name
	if len(name) > maxName {
		name = name[:maxName/2] + "…" + name[len(name)-maxName/2:]
	}
	return fmt.Sprintf("%s %d %s %s", e.mode, e.size, sum, audit.Shown(name))
}

// maxName is how much of a name an entry has, in bytes. Of a longer one it has both ends.
const maxName = 1 << 10

// open opens what the kid made: beneath the top, through no link, waiting for nothing.
func (w *walk) open(at string, flags uint64) (*os.File, error) {
	fd, err := unix.Openat2(int(w.root.Dir.Fd()), at, &unix.OpenHow{
		Flags:   flags | unix.O_NOFOLLOW | unix.O_NONBLOCK | unix.O_CLOEXEC | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), at), nil
}

// batch is how many names are read at once.
const batch = 512

// dir lists a directory and what is below it.
func (w *walk) dir(at, name string, depth int) {
	switch {
	case w.ctx.Err() != nil:
		w.out.LeftOut[leftTime]++
		return
	case depth > w.lim.Depth:
		w.out.LeftOut[leftDepth]++
		return
	}
	f, err := w.open(at, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) && depth == 0 {
		return // a part that was never there
	}
	if errors.Is(err, unix.ENAMETOOLONG) {
		w.out.LeftOut[leftDepth]++
		return
	}
	if err != nil {
		w.out.LeftOut[leftUnreadable]++
		return
	}
	names, more := w.names(f)
	if more {
		w.out.LeftOut[leftEntries]++
	}
	var below []string
	for _, n := range names {
		if w.look(f, path.Join(at, n), name, n) {
			below = append(below, n)
		}
	}
	f.Close() // before what is below it: a deep tree must not use up the descriptors
	for _, n := range below {
		w.dir(path.Join(at, n), join(name, n), depth+1)
	}
}

// names are those in a directory, sorted, as far as they may still be listed; more says whether there are others.
func (w *walk) names(f *os.File) (out []string, more bool) {
	for w.ctx.Err() == nil {
		room := w.lim.Entries - len(w.all) - len(out)
		got, err := f.Readdirnames(min(batch, room+1))
		out = append(out, got...)
		if len(got) > room {
			out, more = out[:len(out)-len(got)+room], true
			break
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				more = true
			}
			break
		}
	}
	slices.Sort(out)
	return out, more || w.ctx.Err() != nil
}

// look notes one file, and says whether it is a directory.
func (w *walk) look(dir *os.File, at, parent, name string) (isDir bool) {
	var st unix.Stat_t
	if err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		w.out.LeftOut[leftUnreadable]++
		return false
	}
	e := entry{name: join(parent, name), mode: modeOf(st.Mode), size: st.Size, place: w.root}
	if e.mode.IsRegular() {
		e.at = at
	}
	w.all = append(w.all, e)
	return e.mode.IsDir()
}

// hash reads the regular files, the small ones first.
func (w *walk) hash() {
	order := make([]int, 0, len(w.all))
	for i := range w.all {
		if w.all[i].at != "" {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(w.all[a].size, w.all[b].size) })
	left := w.lim.Bytes
	for _, i := range order {
		e := &w.all[i]
		switch {
		case e.size > left:
			w.out.LeftOut[leftBytes]++
			continue
		case w.ctx.Err() != nil:
			w.out.LeftOut[leftTime]++
			continue
		}
		left -= e.size
		w.root = e.place
		if err := w.sum(e); errors.Is(err, context.DeadlineExceeded) {
			w.out.LeftOut[leftTime]++
		} else if err != nil {
			w.out.LeftOut[leftUnreadable]++
		}
	}
}

// sum hashes one file, of which it reads no more than it said it is long.
func (w *walk) sum(e *entry) error {
	f, err := w.open(e.at, unix.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return errors.Join(err, errors.New("it is no regular file any more"))
	}
	h := sha256.New()
	for left := e.size; left > 0; {
		if err := w.ctx.Err(); err != nil {
			return err
		}
		n, err := io.CopyN(h, f, min(left, 1<<20))
		if err != nil {
			return err
		}
		left -= n
	}
	e.sum = hex.EncodeToString(h.Sum(nil))
	return nil
}

// modeOf is a mode as Go has it.
func modeOf(raw uint32) fs.FileMode {
	mode := fs.FileMode(raw & 0o777)
	switch raw & unix.S_IFMT {
	case unix.S_IFDIR:
		mode |= fs.ModeDir
	case unix.S_IFLNK:
		mode |= fs.ModeSymlink
	case unix.S_IFIFO:
		mode |= fs.ModeNamedPipe
	case unix.S_IFSOCK:
		mode |= fs.ModeSocket
	case unix.S_IFBLK:
		mode |= fs.ModeDevice
	case unix.S_IFCHR:
		mode |= fs.ModeDevice | fs.ModeCharDevice
	}
	for bit, is := range map[uint32]fs.FileMode{unix.S_ISUID: fs.ModeSetuid, unix.S_ISGID: fs.ModeSetgid, unix.S_ISVTX: fs.ModeSticky} {
		if raw&bit != 0 {
			mode |= is
		}
	}
	return mode
}

func join(dir, name string) string { return strings.TrimSuffix(dir, "/") + "/" + name }
