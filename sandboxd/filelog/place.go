package filelog

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
)

// place is a Place that is watched. What is below root is guarded by its group's mu.
type place struct {
	of   Place
	kid  *watch
	id   fsid
	root *os.File

	top   *node
	known map[string]*node // directories, by handle
}

// node is a directory. Its name is that of the moment: the events that rename it are read in order.
type node struct {
	parent *node // nil: the top
	name   string
}

const (
	maxKnown = 20000 // directories that are remembered
	maxPath  = 4096  // bytes of a name in a record
)

// openPlace opens the top of a place.
func openPlace(p Place, k *watch) (*place, error) {
	fd, err := unix.Open(p.Dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", p.As, err)
	}
	out := &place{of: p, kid: k, root: os.NewFile(uintptr(fd), p.As), top: &node{}}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		out.root.Close() // only read
		return nil, fmt.Errorf("asking for the file system of %s: %w", p.As, err)
	}
	binary.NativeEndian.PutUint32(out.id[:], uint32(st.Fsid.Val[0]))  // bits
	binary.NativeEndian.PutUint32(out.id[4:], uint32(st.Fsid.Val[1])) // as above
	if st.Type != unix.TMPFS_MAGIC {
		out.root.Close() // only read
		return nil, fmt.Errorf("%s is on no file system that can be watched by name", p.As)
	}
	out.forget()
	return out, nil
}

// forget makes the place know its top and nothing else.
func (p *place) forget() {
	p.known = map[string]*node{}
	if h, _, err := unix.NameToHandleAt(int(p.root.Fd()), "", unix.AT_EMPTY_PATH); err == nil {
		p.known[key(h)] = p.top
	}
}

// key is a handle as it stands in events: its type and its bytes.
func key(h unix.FileHandle) string {
	raw := binary.NativeEndian.AppendUint32(nil, uint32(h.Type())) // bits
	return string(append(raw, h.Bytes()...))
}

// event records one event.
func (p *place) event(w *Watch, e *event) {
	isDir := e.mask&unix.FAN_ONDIR != 0
	if e.mask&unix.FAN_RENAME != 0 {
		p.renamed(w, e, isDir)
	}
	if !e.haveName {
		return
	}
	if e.mask&unix.FAN_CREATE != 0 {
		if isDir && e.file != "" {
			p.learn(e.file, p.dir(e.dir), e.name)
		}
		p.tell(w, p.created(e), e, isDir)
	}
	if e.mask&unix.FAN_CLOSE_WRITE != 0 {
		p.tell(w, audit.EventFileChanged, e, isDir)
	}
	if e.mask&unix.FAN_DELETE != 0 {
		p.tell(w, audit.EventFileDeleted, e, isDir)
		if isDir {
			delete(p.known, e.file)
		}
	}
}

// created is what the kid did when a file came to be: where its files lie in an overlay, it deletes one of the lower layer
// by a whiteout, a character device 0:0.
func (p *place) created(e *event) string {
	if p.of.Parts == nil || e.mask&unix.FAN_ONDIR != 0 {
		return audit.EventFileCreated
	}
	fd, err := p.open(e.file)
	if err != nil {
		return audit.EventFileCreated
	}
	defer unix.Close(fd) // only looked at
	var st unix.Stat_t
	if unix.Fstat(fd, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 {
		return audit.EventFileDeleted
	}
	return audit.EventFileCreated
}

// open opens a file by its handle, only to look at it.
func (p *place) open(handle string) (int, error) {
	if len(handle) < 4 {
		return -1, unix.EINVAL
	}
	h := unix.NewFileHandle(int32(binary.NativeEndian.Uint32([]byte(handle))), []byte(handle[4:])) // bits
	return unix.OpenByHandleAt(int(p.root.Fd()), h, unix.O_PATH|unix.O_CLOEXEC)
}

// learn remembers a directory.
func (p *place) learn(handle string, parent *node, name string) {
	if len(p.known) >= maxKnown {
		p.forget()
	}
	p.known[handle] = &node{parent: parent, name: name}
}

// renamed records a rename, and follows it where a directory was renamed.
func (p *place) renamed(w *Watch, e *event, isDir bool) {
	if !e.haveName || !e.haveTo {
		return // it came from, or went, nowhere: the kernel tells both where both are in the place
	}
	from, in := p.of.inKid(path(p.dir(e.dir), e.name))
	if isDir {
		if n := p.known[e.file]; n != nil {
			n.parent, n.name = p.dir(e.to), e.renamed
		} else {
			p.forget() // directories below it may be known by its old name
			p.learn(e.file, p.dir(e.to), e.renamed)
		}
	}
	to := *e
	to.dir, to.name = e.to, e.renamed
	if !in {
		// From the part where an overlay prepares copies of lower files: only now the kid has it.
		p.tell(w, p.created(&to), &to, isDir)
		return
	}
	p.add(w, audit.EventFileRenamed, e.dir+"\x00"+e.name+"\x00"+e.to+"\x00"+e.renamed, func() (audit.Record, bool) {
		r, ok := p.record(audit.EventFileRenamed, &to, isDir)
		if !ok { // it left what the kid can see
			r, ok = p.record(audit.EventFileDeleted, e, isDir)
			return r, ok
		}
		r.Fields["from"] = shown(from)
		return r, ok
	})
}

// tell records one operation on one name.
func (p *place) tell(w *Watch, name string, e *event, isDir bool) {
	if _, in := p.of.inKid(p.first(e)); !in {
		return
	}
	p.add(w, name, e.dir+"\x00"+e.name, func() (audit.Record, bool) { return p.record(name, e, isDir) })
}

// first is the name of a file as inKid needs it to decide whether it is in a part; it is short where there are no parts.
func (p *place) first(e *event) string {
	if p.of.Parts == nil {
		return ""
	}
	return path(p.dir(e.dir), e.name)
}

// add hands an event to the tally. The record is made only where it is needed: a flood costs next to nothing.
func (p *place) add(w *Watch, event, key string, record func() (audit.Record, bool)) {
	session := p.kid.session
	if w.tally.Again(session, event+key) || w.tally.More(session, event, audit.OutcomeOK) {
		return
	}
	r, ok := record()
	if ok {
		w.tally.Add(session, event+key, func() audit.Record { return r })
	}
}

// record makes the record of an operation.
func (p *place) record(name string, e *event, isDir bool) (audit.Record, bool) {
	in, ok := p.of.inKid(path(p.dir(e.dir), e.name))
	r := p.kid.rec
	r.Event = name
	r.Fields = map[string]string{"path": shown(in)}
	if isDir {
		r.Fields["kind"] = "directory"
	}
	if e.pid == os.Getpid() {
		r.Actor = "sandboxd"
	}
	if e.pid > 0 {
		r.Process = processOf(e.pid)
	}
	return r, ok
}

// shown is a name as it stands in a record.
func shown(path string) string {
	if len(path) > maxPath {
		path = path[:maxPath/2] + "…" + path[len(path)-maxPath/2:]
	}
	return audit.Shown(path)
}

// dir returns the directory of a handle. One that is not remembered, because it was there before the watch say, is asked
// for: it has the name that it has now.
func (p *place) dir(handle string) *node {
	if n := p.known[handle]; n != nil {
		return n
	}
	n := &node{parent: p.top, name: p.ask(handle)}
	if len(p.known) >= maxKnown {
		p.forget()
	}
	p.known[handle] = n
	return n
}

// gone stands for a directory that nobody knows the name of any more.
const gone = "(a directory that is gone)"

// ask finds the path of a directory, relative to the top.
func (p *place) ask(handle string) string {
	fd, err := p.open(handle)
	if err != nil {
		return gone
	}
	defer unix.Close(fd) // only looked at
	at, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(fd))
	if err != nil {
		return gone
	}
	top, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(p.root.Fd())))
	if err != nil {
		return gone
	}
	rel, ok := strings.CutPrefix(at, strings.TrimSuffix(top, "/")+"/")
	if !ok {
		return gone
	}
	return rel
}

// path is a name below a directory, relative to the top. One that is too long is cut in the middle by shown; what is
// deeper than can be shown is not walked.
func path(dir *node, name string) string {
	parts := []string{name}
	size := len(name)
	for n := dir; n != nil && n.parent != nil; n = n.parent {
		if size += len(n.name) + 1; size > 2*maxPath {
			parts = append(parts, "…")
			break
		}
		parts = append(parts, n.name)
	}
	var b bytes.Buffer
	for i := len(parts) - 1; i >= 0; i-- {
		b.WriteString(parts[i])
		if i > 0 {
			b.WriteByte('/')
		}
	}
	return b.String()
}

// processOf names a process; what could not be read is empty.
func processOf(pid int) *audit.Process {
	p := &audit.Process{PID: pid}
	dir := "/proc/" + strconv.Itoa(pid)
	if raw, err := os.ReadFile(dir + "/comm"); err == nil && len(raw) > 0 {
		p.Comm = audit.Shown(string(raw[:len(raw)-1]))
	}
	if exe, err := os.Readlink(dir + "/exe"); err == nil {
		p.Exe = audit.Shown(exe)
	}
	return p
}
