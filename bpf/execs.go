package bpf

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
)

// Exec is one program that was started in a kid, as the kernel had it before the program's first instruction. Names,
// paths and arguments are the kid's own bytes: any byte but zero may be in them.
type Exec struct {
	Boot       time.Duration // CLOCK_BOOTTIME
	Mark       uint32
	CgroupID   uint64
	PID        int // in the host's pid namespace
	Parent     int // there too
	UID        uint32
	Comm       string
	File       string // name of the file that runs, without its directory: of a script it is the interpreter
	Inode      uint64 // of that file
	Path       string // as it was given to execve(2)
	Args       []string
	ArgsLength int  // of all arguments, a zero byte after each
	Cut        bool // Args are only the first of them, and the last of Args may be cut
}

// ExecCount is how many programs were started in a session since its first, exactly. Untold are those among them that
// Execs does not hand over, and Told how many of these ToldExecs was called for.
type ExecCount struct{ Started, Untold, Told uint64 }

// execLink is the name of the pinned link that keeps the program on its hook.
const execLink = "link_exec"

// attachExec puts the program that sees starts of programs on its hook, in place of an older one. Both are there for a
// moment: a start then is told twice rather than not at all.
func attachExec(coll *ebpf.Collection, pinDir string) error {
	prog := coll.Programs[tagoutProgTagoutExec]
	if prog == nil {
		return nil // the kernel cannot; see load
	}
	l, err := link.AttachTracing(link.TracingOptions{Program: prog})
	if err != nil {
		return fmt.Errorf("attaching %s: %w", tagoutProgTagoutExec, err)
	}
	defer l.Close() // the pin keeps it
	if err := (pin{name: execLink, obj: l, mode: 0o600}).write(pinDir); err != nil {
		return fmt.Errorf("pinning %s: %w", execLink, err)
	}
	return nil
}

// haveKernelTypes says whether the kernel describes its types, without which the program that sees starts of programs
// cannot be loaded.
func haveKernelTypes() error {
	if _, err := os.Stat("/sys/kernel/btf/vmlinux"); err != nil {
		return fmt.Errorf("the kernel was built without CONFIG_DEBUG_INFO_BTF: %w", err)
	}
	return nil
}

// SeesExecs is why nobody sees which programs the kids start; nil where it is seen.
func (m *Maps) SeesExecs() error {
	if _, err := os.Stat(filepath.Join(m.pinDir, execLink)); err != nil {
		if none := haveKernelTypes(); none != nil {
			return none
		}
		return fmt.Errorf("the program that sees starts of programs is not attached: run `tagout setup`: %w", err)
	}
	return nil
}

// Execs calls fn for every program that is started in a kid and handed over, in order, until ctx ends, and then returns
// nil. One process at a time may read. What is not handed over is counted in ExecCounts, as what is.
func (m *Maps) Execs(ctx context.Context, fn func(Exec)) error {
	return m.read(ctx, tagoutMapExecs, &m.execs, func(sample []byte) error {
		e, err := decodeExec(sample)
		if err == nil {
			fn(e)
		}
		return err
	})
}

// DrainExecs returns nil when every start that was in the ring before the call has been handed to the fn of Execs. It
// fails with ErrNoReader where no Execs runs, and with ctx's error.
func (m *Maps) DrainExecs(ctx context.Context) error { return m.execs.drain(ctx) }

// read hands over what is in a ring buffer.
func (m *Maps) read(ctx context.Context, name string, r *reader, fn func(sample []byte) error) error {
	t, err := m.table(name)
	if err != nil {
		return err
	}
	rd, err := ringbuf.NewReader(t)
	if err != nil {
		return fmt.Errorf("reading BPF events: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { rd.Close() }) // wakes the reader
	defer func() {
		if stop() {
			rd.Close() // nothing was written
		}
	}()
	r.begin(rd)
	defer r.end()
	var rec ringbuf.Record
	for {
		if err := rd.ReadInto(&rec); err != nil {
			if errors.Is(err, ringbuf.ErrFlushed) {
				r.flushed()
				continue
			}
			if ctx.Err() != nil && errors.Is(err, ringbuf.ErrClosed) {
				return nil
			}
			return fmt.Errorf("reading BPF events: %w", err)
		}
		if err := fn(rec.RawSample); err != nil {
			return fmt.Errorf("reading BPF events: %w", err)
		}
	}
}

// execHead is the length of what precedes the arguments.
var execHead = binary.Size(tagoutExecEvent{}) - len(tagoutExecEvent{}.Args)

func decodeExec(sample []byte) (Exec, error) {
	var raw tagoutExecEvent
	if len(sample) < execHead {
		return Exec{}, fmt.Errorf("start of a program in %d bytes: %w", len(sample), ErrLayout)
	}
	whole := make([]byte, binary.Size(&raw))
	copy(whole, sample)
	if _, err := binary.Decode(whole, binary.NativeEndian, &raw); err != nil {
		return Exec{}, err
	}
	args := sample[execHead:min(execHead+int(raw.ArgsHere), len(sample))]
	return Exec{
		Boot: time.Duration(raw.Boot), Mark: raw.Mark, CgroupID: raw.CgroupId, PID: int(raw.Pid), Parent: int(raw.Ppid), UID: raw.Uid,
		Comm: text(raw.Comm[:]), File: text(raw.Name[:]), Inode: raw.Inode, Path: text(raw.Path[:]),
		Args: splitArgs(args), ArgsLength: int(raw.ArgsLength), Cut: int(raw.ArgsLength) > len(args),
	}, nil
}

// splitArgs takes the arguments apart. The last one may lack its zero byte where it was cut.
func splitArgs(raw []byte) []string {
	if len(raw) == 0 {
		return nil
	}
	var out []string
	for _, arg := range bytes.Split(bytes.TrimSuffix(raw, []byte{0}), []byte{0}) {
		out = append(out, string(arg))
	}
	return out
}

// text is a C string.
func text(raw []int8) string {
	b := make([]byte, 0, len(raw))
	for _, c := range raw {
		if c == 0 {
			break
		}
		b = append(b, byte(c)) // bytes either way
	}
	return string(b)
}

// ExecCounts returns how many programs were started, by mark. Sessions in which none was are not in it.
func (m *Maps) ExecCounts() (map[uint32]ExecCount, error) {
	told := map[uint32]uint64{}
	if err := eachOf(m, tagoutMapExecTold, func(mark uint32, n uint64) { told[mark] = n }); err != nil {
		return nil, err
	}
	out := map[uint32]ExecCount{}
	err := eachOf(m, tagoutMapExecCounts, func(mark uint32, c tagoutExecCount) {
		out[mark] = ExecCount{Started: c.Started, Untold: c.Untold, Told: told[mark]}
	})
	return out, err
}

// ExecCount is ExecCounts of one session.
func (m *Maps) ExecCount(mark uint32) (ExecCount, error) {
	var c tagoutExecCount
	var told uint64
	_, err := m.get(tagoutMapExecCounts, mark, &c)
	if err == nil {
		_, err = m.get(tagoutMapExecTold, mark, &told)
	}
	return ExecCount{Started: c.Started, Untold: c.Untold, Told: told}, err
}

// ToldExecs notes how many of a session's untold starts somebody has written down: it outlives this process.
func (m *Maps) ToldExecs(mark uint32, n uint64) error { return m.put(tagoutMapExecTold, mark, n) }

// ForgetExecs removes what was counted of a session. Nothing may run in it any more.
func (m *Maps) ForgetExecs(mark uint32) error {
	return errors.Join(m.remove(tagoutMapExecCounts, mark), m.remove(tagoutMapExecTold, mark))
}

// detachExec takes the program off its hook; one that is not there is not an error.
func detachExec(pinDir string) error {
	if err := os.Remove(filepath.Join(pinDir, execLink)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("taking %s off its hook: %w", tagoutProgTagoutExec, err)
	}
	return nil
}
