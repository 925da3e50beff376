// Package unpack turns the layers of an image, tar streams that nobody trusts, into a directory. It promises that
// nothing outside the directory is read, written or linked to, whatever the stream says: every path is resolved by
// the kernel inside the directory (openat2(2), RESOLVE_IN_ROOT), as a chroot would, what is there is removed and
// never written through, and all that a stream can use up is bounded.
//
// What an image cannot be trusted with is left out: devices, FIFOs and sockets (counted, with the reason), set-uid and
// set-gid bits, extended attributes. Owners are kept as the image has them; the directory's own must keep others out.
package unpack

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// Limits bound what all layers of an image together may use up. Every field is needed.
type Limits struct {
	Bytes int64 // contents of files, also of those that a later layer removes
	Files int   // entries, and directories that they need
	Depth int   // components of a path
}

// DefaultLimits are ample for an image of a whole distribution with development tools.
func DefaultLimits() Limits { return Limits{Bytes: 16 << 30, Files: 1 << 20, Depth: 128} }

// ErrLimit is wrapped by what Layer returns when an image is larger than its limits.
var ErrLimit = errors.New("the image is larger than its limits")

// Report says what was unpacked.
type Report struct {
	Bytes   int64          // contents of files
	Files   int            // entries, and directories that they needed
	Skipped map[string]int // reason -> entries that were left out; never nil
}

// perEntry is what an entry may take in the stream beside its content: headers, names, padding.
const perEntry = 4096

// Stream is how many bytes the layers of such an image may have as streams.
func (l Limits) Stream() int64 { return l.Bytes + perEntry*int64(l.Files) }

// Unpacker applies layers to one directory. It is used by one goroutine, and nobody else writes to the directory.
type Unpacker struct {
	root    *os.File
	limits  Limits
	report  Report
	streams int64         // bytes of all streams so far
	owners  bool          // give files to whom the image says; without root nobody can
	layers  int           // that were begun
	fresh   map[slot]bool // what the current layer has; nil in the first layer
	parent  *os.File      // the directory of the entry before, nil where its path may mean another one by now
	path    string        // parent's path
}

// New returns an unpacker for dir, an empty directory of the caller's. The caller must Close it.
func New(dir string, limits Limits) (*Unpacker, error) {
	root, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("unpacking: %w", err)
	}
	return &Unpacker{root: root, limits: limits, report: Report{Skipped: map[string]int{}}, owners: os.Geteuid() == 0}, nil
}

// Close closes the directory.
func (u *Unpacker) Close() error {
	u.forget()
	return u.root.Close()
}

// Report says what the layers so far brought.
func (u *Unpacker) Report() Report { return u.report }

// Layer applies one layer, an uncompressed tar stream, which is read to its end. After an error the directory is of no
// use any more.
func (u *Unpacker) Layer(ctx context.Context, stream io.Reader) error {
	u.fresh = nil
	if u.layers > 0 {
		u.fresh = map[slot]bool{}
	}
	u.layers++
	bounded := &meter{ctx: ctx, from: stream, read: &u.streams, most: u.limits.Stream()}
	tr := tar.NewReader(bounded)
	for {
		hdr, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("unpacking layer %d: %w", u.layers, err)
		}
		if err := u.entry(hdr, &wanted{ctx, tr}); err != nil {
			return fmt.Errorf("unpacking layer %d: entry %s: %w", u.layers, quote(hdr.Name), err)
		}
	}
	if _, err := io.Copy(io.Discard, bounded); err != nil { // what follows the archive is part of the digest
		return fmt.Errorf("unpacking layer %d: reading to its end: %w", u.layers, err)
	}
	return nil
}

// meter reads from a stream until the context ends or the limit is passed.
type meter struct {
	ctx  context.Context
	from io.Reader
	read *int64
	most int64
}

func (m *meter) Read(p []byte) (int, error) {
	if err := m.ctx.Err(); err != nil {
		return 0, err
	}
	if *m.read > m.most {
		return 0, fmt.Errorf("%w: more than %d bytes in its layers", ErrLimit, m.most)
	}
	n, err := m.from.Read(p)
	*m.read += int64(n)
	return n, err
}

// wanted reads until the context ends, also where what is read takes nothing from the stream: a hole in a sparse file.
type wanted struct {
	ctx  context.Context
	from io.Reader
}

func (w *wanted) Read(p []byte) (int, error) {
	if err := w.ctx.Err(); err != nil {
		return 0, err
	}
	return w.from.Read(p)
}

func (u *Unpacker) entry(hdr *tar.Header, content io.Reader) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if err := u.count(); err != nil {
		return err
	}
	path, err := u.clean(hdr.Name)
	if err != nil {
		return err
	}
	if path == "" {
		return nil // the root directory, which is the caller's
	}
	dir, base := split(path)
	if strings.HasPrefix(base, whiteout) {
		return u.hide(dir, base)
	}
	parent, err := u.open(dir)
	if err != nil {
		return err
	}
	at := int(parent.Fd())
	switch hdr.Typeflag {
	case tar.TypeDir:
		return u.makeDir(at, base, hdr)
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return u.makeFile(at, base, hdr, content)
	case tar.TypeSymlink:
		return u.makeSymlink(at, base, hdr)
	case tar.TypeLink:
		return u.makeLink(path, hdr)
	case tar.TypeChar, tar.TypeBlock:
		u.report.Skipped["a kid gets no device of an image"]++
	case tar.TypeFifo:
		u.report.Skipped["a FIFO in a read-only image is of no use"]++
	default:
		u.report.Skipped["an entry of an unknown type"]++
	}
	return nil
}

func (u *Unpacker) count() error {
	u.report.Files++
	if u.report.Files > u.limits.Files {
		return fmt.Errorf("%w: more than %d files", ErrLimit, u.limits.Files)
	}
	return nil
}

const (
	maxName = 255
	maxPath = 4095
)

// clean returns the path that an entry names, below the root and without a slash at its beginning; "" is the root.
func (u *Unpacker) clean(name string) (string, error) {
	if len(name) > maxPath {
		return "", fmt.Errorf("%w: a path of %d bytes", ErrLimit, len(name))
	}
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch {
		case part == "" || part == ".":
			continue
		case part == "..":
			return "", errors.New("its path leads upwards")
		case len(part) > maxName:
			return "", fmt.Errorf("%w: a name of %d bytes", ErrLimit, len(part))
		case strings.ContainsRune(part, 0):
			return "", errors.New("its path has a NUL byte")
		}
		parts = append(parts, part)
	}
	if len(parts) > u.limits.Depth {
		return "", fmt.Errorf("%w: a path of %d components", ErrLimit, len(parts))
	}
	return strings.Join(parts, "/"), nil
}

func split(path string) (dir, base string) {
	if i := strings.LastIndexByte(path, '/'); i >= 0 {
		return path[:i], path[i+1:]
	}
	return "", path
}

func quote(name string) string {
	if len(name) > 200 {
		name = name[:200] + "…"
	}
	return fmt.Sprintf("%q", name)
}
