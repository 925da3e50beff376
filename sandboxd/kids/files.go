package kids

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/runtime"
)

// The writable places of every kid, as its own processes see them.
var carryPlaces = []string{runtime.Home, "/tmp"}

// Bounds of what is carried at the same time: each takes a thread.
const (
	maxCarriesOfKid = 8
	maxCarries      = 32
)

// carry is one use of a kid's files.
type carry struct {
	m     *Manager
	k     *kid
	tree  *files.Tree
	place string // one of carryPlaces
	rel   string // below the place
	write bool
}

// ListFiles returns up to limit entries of a directory in the kid whose names follow after, by name, and whether there
// are more.
func (m *Manager) ListFiles(ctx context.Context, name, actor, dir, after string, limit int) (out []wire.File, more bool, err error) {
	err = m.carry(ctx, name, dir, false, audit.Record{Event: audit.EventFilesListed, Actor: actor}, func(c *carry, _ map[string]string) error {
		infos, rest, err := c.tree.List(c.rel, after, limit)
		for _, i := range infos {
			out = append(out, fileOf(i))
		}
		more = rest
		return err
	})
	return out, more, err
}

// GetFile hands begin what a regular file in the kid is like, and writes the file to what begin returns.
func (m *Manager) GetFile(ctx context.Context, name, actor, path string, begin func(wire.File) io.Writer) error {
	return m.carry(ctx, name, path, false, audit.Record{Event: audit.EventFileRead, Actor: actor}, func(c *carry, fields map[string]string) error {
		f, info, err := c.tree.Get(c.rel)
		if err != nil {
			return err
		}
		defer f.Close() // only read
		n, err := io.CopyN(begin(fileOf(info)), c.reading(f), info.Size)
		fields["bytes"] = fmt.Sprint(n)
		if errors.Is(err, io.EOF) {
			err = errors.New("the file got shorter while it was read")
		}
		return err
	})
}

// GetArchive writes a directory in the kid as a tar stream to what begin returns. begin is told how many entries are
// neither files nor directories: they are left out where skip says so, and refused otherwise.
func (m *Manager) GetArchive(ctx context.Context, name, actor, path string, skip bool, begin func(left int) io.Writer) error {
	return m.carry(ctx, name, path, false, audit.Record{Event: audit.EventFileRead, Actor: actor}, func(c *carry, fields map[string]string) error {
		s, err := c.tree.Survey(c.rel) // what is refused now still has a status of its own
		if err == nil && s.Special > 0 && !skip {
			err = fmt.Errorf("%w: there are %d links, FIFOs, sockets or devices: leave them out", files.ErrKind, s.Special)
		}
		if err != nil {
			return err
		}
		s, err = c.tree.Archive(c.rel, skip, c.writing(begin(s.Special)))
		fields["bytes"], fields["files"] = fmt.Sprint(s.Bytes), fmt.Sprint(s.Entries-s.Special)
		return err
	})
}

// PutFile makes or replaces a regular file in the kid with what src holds.
func (m *Manager) PutFile(ctx context.Context, name, actor, path string, mode fs.FileMode, src io.Reader) (out wire.Carried, err error) {
	err = m.carry(ctx, name, path, true, audit.Record{Event: audit.EventFileWritten, Actor: actor}, func(c *carry, fields map[string]string) error {
		n, err := c.tree.Put(c.rel, mode, m.searchIn(c.k, actor).file(path, c.reading(src)))
		out = wire.Carried{Bytes: n, Files: 1}
		fields["bytes"] = fmt.Sprint(n)
		return err
	})
	return out, err
}

// PutArchive unpacks a tar stream below a directory in the kid, which it makes.
func (m *Manager) PutArchive(ctx context.Context, name, actor, path string, src io.Reader) (out wire.Carried, err error) {
	err = m.carry(ctx, name, path, true, audit.Record{Event: audit.EventFileWritten, Actor: actor}, func(c *carry, fields map[string]string) error {
		s, err := c.tree.Unpack(c.rel, c.reading(src), func(to string, src io.Reader) io.Reader { return m.searchIn(c.k, actor).file(c.place+"/"+to, src) })
		out = wire.Carried{Bytes: s.Bytes, Files: s.Entries}
		fields["bytes"], fields["files"] = fmt.Sprint(s.Bytes), fmt.Sprint(s.Entries)
		return err
	})
	return out, err
}

// carry opens the place that path is in, calls do, and records what became of it.
func (m *Manager) carry(ctx context.Context, name, path string, write bool, rec audit.Record, do func(c *carry, fields map[string]string) error) error {
	rec.Kid, rec.Fields = name, map[string]string{"path": audit.Shown(path)}
	c, err := m.openCarry(ctx, name, path, write)
	if err == nil {
		defer m.closeCarry(c)
		s := &c.k.rec.Session
		rec.Session, rec.Mark, rec.Card = s.ID, s.Mark, s.Card
		err = refusedCarry(path, do(c, rec.Fields))
	}
	rec.Outcome = audit.OutcomeOK
	if err != nil {
		rec.Outcome, rec.Reason, rec.Detail = audit.OutcomeFail, ReasonOf(err), err.Error()
	}
	if rec.Reason == reason.LooksLikeKey && len(m.cfg.Keys.Find(path)) > 0 {
		rec.Fields["path"] = "(left out)" // the record says why
	}
	m.cfg.Audit.Log(rec)
	return err
}

func (m *Manager) openCarry(ctx context.Context, name, path string, write bool) (*carry, error) {
	place, rel, err := placeOf(path)
	if err != nil {
		return nil, refusedCarry(path, err)
	}
	if err := m.canRecord(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil {
		return nil, notFound(name)
	}
	if write {
		if m.isStopped(ctx, k) {
			return nil, refuse(Tagged, reason.Stopped, "kid %s was stopped: nothing is changed in it any more", name)
		}
		if err := m.clear(ctx, k); err != nil {
			return nil, err
		}
	}
	c := &carry{m: m, k: k, place: place, rel: rel, write: write}
	if err := c.may(); err != nil {
		return nil, err
	}
	if err := m.countCarry(k, 1); err != nil {
		return nil, err
	}
	m.touch(k)
	if c.tree, err = m.openPlace(k, place, write); err != nil {
		m.countCarry(k, -1) // taking away always works
		return nil, refusedCarry(path, err)
	}
	return c, nil
}

func (m *Manager) closeCarry(c *carry) {
	c.tree.Close()
	c.m.touch(c.k)
	m.countCarry(c.k, -1) // taking away always works
}

func (m *Manager) countCarry(k *kid, n int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n > 0 && (k.carries >= maxCarriesOfKid || m.carries >= maxCarries) {
		return refuse(Capacity, reason.Capacity, "too many files are being carried already (%d of kid %s, %d in all): wait for some to end", k.carries, k.name, m.carries)
	}
	k.carries += n
	m.carries += n
	return nil
}

// openPlace goes through the kid's own mount namespace. Where nothing runs in it any more, the workspace can still be
// read through the host's own mount of it.
func (m *Manager) openPlace(k *kid, place string, write bool) (*files.Tree, error) {
	tree, err := files.OpenInside(k.pid, m.pins(k.name).User, place, m.owner(k))
	if errors.Is(err, files.ErrGone) && place == runtime.Home && !write {
		return files.OpenHost(m.workspaceDir(k), m.owner(k))
	}
	return tree, err
}

// placeOf splits a path into a writable place of the kid and what is below it.
func placeOf(path string) (place, rel string, err error) {
	for _, p := range carryPlaces {
		if path == p {
			return p, ".", nil
		}
		if below, ok := strings.CutPrefix(path, p+"/"); ok {
			rel, err := files.Rel(below)
			return p, rel, err
		}
	}
	return "", "", fmt.Errorf("%w: it is not below %s", files.ErrPath, strings.Join(carryPlaces, " or "))
}

// may says whether the kid is still in a state in which its files are carried.
func (c *carry) may() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	state := &c.k.state
	if state.Is(wire.KidSpawning, wire.KidDestroying) || c.write && !state.Alive() {
		return refuse(Conflict, reason.OK, "kid %s is %s: its files cannot be carried now", c.k.name, state.Now())
	}
	return nil
}

// checked asks before each piece whether it may still be carried: a stop or a destroy ends it.
type checked struct {
	c *carry
	r io.Reader
	w io.Writer
}

func (c *carry) reading(r io.Reader) io.Reader { return &checked{c: c, r: r} }
func (c *carry) writing(w io.Writer) io.Writer { return &checked{c: c, w: w} }

func (s *checked) Read(p []byte) (int, error) {
	if err := s.c.may(); err != nil {
		return 0, err
	}
	return s.r.Read(p)
}

func (s *checked) Write(p []byte) (int, error) {
	if err := s.c.may(); err != nil {
		return 0, err
	}
	return s.w.Write(p)
}

// refusedCarry says what kind of refusal an error of the file system is.
func refusedCarry(path string, err error) error {
	kind, code := Internal, reason.Internal
	switch {
	case err == nil:
		return nil
	case KindOf(err) != Internal:
		return err
	case errors.Is(err, files.ErrGone):
		kind, code = Conflict, reason.OK
	case errors.Is(err, files.ErrPath):
		kind, code = Invalid, reason.PathRefused
	case errors.Is(err, files.ErrKind):
		kind, code = Invalid, reason.FileKind
	case errors.Is(err, files.ErrLarge):
		kind, code = TooLarge, reason.TooLarge
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		kind, code = NotFound, reason.PathRefused
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		kind, code = Capacity, reason.Capacity
	}
	return refuse(kind, code, "%q: %w", path, err)
}

func fileOf(i files.Info) wire.File {
	kind := wire.KindOther
	switch i.Mode.Type() {
	case 0:
		kind = wire.KindFile
	case fs.ModeDir:
		kind = wire.KindDirectory
	case fs.ModeSymlink:
		kind = wire.KindLink
	}
	return wire.File{Name: i.Name, Kind: kind, Size: i.Size, Mode: fmt.Sprintf("%04o", i.Mode.Perm()), Modified: i.Modified}
}
