package filelog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
)

// group is one queue of the kernel's.
type group struct {
	of   *Watch
	file *os.File
	raw  syscall.RawConn
	over atomic.Bool // it is being closed

	mu     sync.Mutex
	places map[fsid]*place // guarded by mu
	kids   int             // guarded by mu
	buf    []byte          // guarded by mu
}

// fsid tells file systems apart.
type fsid [8]byte

// mask is what is asked for, of directories too.
const mask = unix.FAN_CREATE | unix.FAN_DELETE | unix.FAN_RENAME | unix.FAN_CLOSE_WRITE | unix.FAN_ONDIR

// bufLen is what is read at once.
const bufLen = 128 << 10

func newGroup(w *Watch) (*group, error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_UNLIMITED_MARKS|unix.FAN_REPORT_DFID_NAME_TARGET, unix.O_RDONLY|unix.O_CLOEXEC)
	switch {
	case errors.Is(err, unix.EMFILE):
		return nil, errors.New("no more file watches: raise fs.fanotify.max_user_groups")
	case errors.Is(err, unix.EINVAL):
		return nil, errors.New("watching files by name needs Linux 5.17")
	case err != nil:
		return nil, fmt.Errorf("asking for a file watch: %w", err)
	}
	g := &group{of: w, file: os.NewFile(uintptr(fd), "fanotify"), places: map[fsid]*place{}, buf: make([]byte, bufLen)}
	if g.raw, err = g.file.SyscallConn(); err != nil {
		g.file.Close() // nothing was written
		return nil, fmt.Errorf("asking for a file watch: %w", err)
	}
	go g.run()
	return g, nil
}

func (g *group) close() {
	g.over.Store(true)
	g.file.Close() // only read
}

func (g *group) size() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.kids
}

// add marks the file systems of a kid's places. Those that cannot be are left out.
func (g *group) add(k *watch) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.kids++
	var errs []error
	for _, p := range k.places {
		g.places[p.id] = p
		err := g.control(func(fd int) error {
			return unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_FILESYSTEM, mask, int(p.root.Fd()), "")
		})
		if err != nil {
			delete(g.places, p.id)
			errs = append(errs, fmt.Errorf("watching %s: %w", p.of.As, err))
		}
	}
	return errors.Join(errs...)
}

// remove takes the marks of a kid off, after everything about it has been read: what was queued before the call is
// recorded when it returns.
func (g *group) remove(k *watch) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.drain()
	g.kids--
	for _, p := range k.places {
		if g.places[p.id] != p {
			continue
		}
		err := g.control(func(fd int) error {
			return unix.FanotifyMark(fd, unix.FAN_MARK_REMOVE|unix.FAN_MARK_FILESYSTEM, mask, int(p.root.Fd()), "")
		})
		if err != nil && !errors.Is(err, unix.ENOENT) && !g.over.Load() {
			g.of.cfg.Log.Error("ending a file watch", "kid", k.rec.Kid, "error", err)
		}
		delete(g.places, p.id)
	}
}

func (g *group) control(fn func(fd int) error) (err error) {
	if e := g.raw.Control(func(fd uintptr) { err = fn(int(fd)) }); e != nil {
		return e
	}
	return err
}

// run reads events until the group is closed.
func (g *group) run() {
	err := g.raw.Read(func(uintptr) (done bool) {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.drain()
		return false // wait for more
	})
	if err != nil && !g.over.Load() {
		g.of.cfg.Log.Error("watching what kids do to their files", "error", err)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.everyone("watching what the kid does to its files failed: " + err.Error())
	}
}

// drain reads what is queued. g.mu is held.
func (g *group) drain() {
	for {
		n := 0
		err := g.control(func(fd int) (err error) { n, err = unix.Read(fd, g.buf); return err })
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil || n <= 0:
			return // EAGAIN: that was all; or closed
		}
		g.events(g.buf[:n])
	}
}

// everyone records a gap for every kid of the group. g.mu is held.
func (g *group) everyone(detail string) {
	told := map[*watch]bool{}
	for _, p := range g.places {
		p.forget()
		if told[p.kid] {
			continue
		}
		told[p.kid] = true
		g.of.tally.Add(p.kid.session, "gap", func() audit.Record {
			r := p.kid.rec
			r.Event, r.Outcome, r.Detail = audit.EventGap, audit.OutcomeFail, detail
			r.Fields = map[string]string{audit.FieldLost: kind}
			return r
		})
	}
}

// Offsets in struct fanotify_event_metadata, and what follows it (fanotify(7)).
const (
	metaLen = 24
	offMeta = 6
	offMask = 8
	offPID  = 20

	infoHead = 4  // type, padding, length
	infoFSID = 12 // end of the file system's id
	infoFH   = 20 // end of the handle's length and type
)

// event is one event, taken apart. Handles are empty where there are none.
type event struct {
	mask             uint64
	pid              int
	id               fsid
	dir, to, file    string // handles of the directory, of the one it was renamed into, and of the file itself
	name, renamed    string
	haveName, haveTo bool
}

// errShort means that the kernel's account cannot be read.
var errShort = errors.New("the kernel's account of the files cannot be read")

// parse takes the first event of raw apart and returns the rest.
func parse(raw []byte) (e event, rest []byte, err error) {
	if len(raw) < metaLen {
		return e, nil, errShort
	}
	length, meta := int(binary.NativeEndian.Uint32(raw)), int(binary.NativeEndian.Uint16(raw[offMeta:]))
	if length < metaLen || length > len(raw) || meta < metaLen || meta > length {
		return e, nil, errShort
	}
	e.mask = binary.NativeEndian.Uint64(raw[offMask:])
	e.pid = int(int32(binary.NativeEndian.Uint32(raw[offPID:])))
	for info := raw[meta:length]; len(info) > 0; {
		if len(info) < infoHead {
			return e, nil, errShort
		}
		n := int(binary.NativeEndian.Uint16(info[2:]))
		if n < infoHead || n > len(info) {
			return e, nil, errShort
		}
		if err := e.info(info[0], info[:n]); err != nil {
			return e, nil, err
		}
		info = info[n:]
	}
	return e, raw[length:], nil
}

// info takes one record of an event.
func (e *event) info(kind byte, raw []byte) error {
	switch kind {
	case unix.FAN_EVENT_INFO_TYPE_FID, unix.FAN_EVENT_INFO_TYPE_DFID_NAME, unix.FAN_EVENT_INFO_TYPE_OLD_DFID_NAME, unix.FAN_EVENT_INFO_TYPE_NEW_DFID_NAME:
	default:
		return nil // of no use here
	}
	if len(raw) < infoFH {
		return errShort
	}
	end := infoFH + int(binary.NativeEndian.Uint32(raw[infoFSID:]))
	if end < infoFH || end > len(raw) {
		return errShort
	}
	copy(e.id[:], raw[infoHead:])
	handle := string(raw[infoFSID+4 : end]) // its type and its bytes
	name := raw[end:]
	for i, c := range name {
		if c == 0 {
			name = name[:i]
			break
		}
	}
	switch kind {
	case unix.FAN_EVENT_INFO_TYPE_FID:
		e.file = handle
	case unix.FAN_EVENT_INFO_TYPE_NEW_DFID_NAME:
		e.to, e.renamed, e.haveTo = handle, string(name), true
	default:
		e.dir, e.name, e.haveName = handle, string(name), true
	}
	return nil
}

// events takes what one read returned. g.mu is held.
func (g *group) events(raw []byte) {
	for len(raw) > 0 {
		e, rest, err := parse(raw)
		if err != nil {
			g.everyone(err.Error())
			return
		}
		raw = rest
		if e.mask&unix.FAN_Q_OVERFLOW != 0 {
			g.everyone("more was done to files than could be looked at: what went unseen is in no record")
			continue
		}
		if p := g.places[e.id]; p != nil {
			p.event(g.of, &e)
		}
	}
}
