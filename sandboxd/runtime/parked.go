package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/kidinit"
)

// parked is a child of kid-init in a cgroup of its own that waits for its command.
type parked struct {
	id     uint64
	pid    int      // on the host
	handle *os.File // pidfd
	sock   *socket
	report <-chan kidinit.Report
	group  execGroup
}

// groups numbers the cgroups of commands. Their names are never used again by this process; the time keeps them apart
// from a predecessor's.
var groups atomic.Uint64

var started = time.Now().UnixNano()

func groupName() string { return fmt.Sprintf("%s%x-%d", groupPrefix, started, groups.Add(1)) }

// park gets a child from kid-init and puts it into a cgroup.
func (m *master) park(ctx context.Context) (_ *parked, err error) {
	deadline := time.Now().Add(patience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	sock, theirs, err := socketPair()
	if err != nil {
		return nil, fmt.Errorf("making a command's socket: %w", err)
	}
	p := &parked{sock: sock}
	defer func() {
		theirs.Close() // the child has its own
		if err != nil {
			m.giveUp(p)
			err = m.explain(ctx, p, err)
		}
	}()
	if err := sock.passPID(); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { sock.SetDeadline(time.Now()) }) // ends waiting
	defer stop()
	p.group, err = newUnitGroup(m.unit, groupName())
	if err != nil {
		return nil, err
	}
	if p.id, p.report, err = m.order(theirs, deadline); err != nil {
		return nil, err
	}
	theirs.Close() // so that its end is heard; closing twice is harmless
	return p, m.meet(p, deadline)
}

// meet waits until the child shows itself, and moves it.
func (m *master) meet(p *parked, deadline time.Time) error {
	if err := p.sock.SetReadDeadline(deadline); err != nil {
		return err
	}
	var hello [2]byte
	n, from, err := p.sock.receive(hello[:])
	if err != nil {
		return err
	}
	if n != 1 || hello[0] != kidinit.Hello || from.Pid <= 1 {
		return errors.New("kid-init made no child")
	}
	p.pid = int(from.Pid)
	if p.handle, err = pidfd(p.pid); err != nil {
		return err
	}
	// The pid is the kernel's word, the rest is looked up: a child that died at once may have left it to another.
	theirs, err := cgroupOf(p.pid)
	if err != nil {
		return err
	}
	inits, err := cgroupOf(m.init)
	if err != nil {
		return err
	}
	if theirs != inits || theirs == "" {
		return fmt.Errorf("process %d is not kid-init's child: it is in the cgroup %q", p.pid, theirs)
	}
	if err := cgroup.Join(p.group.unified, p.pid); err != nil {
		return err
	}
	if !p.alive() {
		return errors.New("kid-init's child died while it was moved")
	}
	return nil
}

// explain says why there is no child, as far as kid-init told or the clock did.
func (m *master) explain(ctx context.Context, p *parked, err error) error {
	select {
	case r := <-p.report: // nil where it was never ordered
		if r.Kind == kidinit.Refused {
			return fmt.Errorf("%w: %w", ErrNotStarted, unix.Errno(r.Status))
		}
	default:
	}
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("it had not started when it was called off: %w", ctx.Err())
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("it did not start within %v: kid-init does not answer", patience)
	}
	return err
}

// alive says whether the child has not ended.
func (p *parked) alive() bool {
	ended, err := readable(p.handle)
	return err == nil && !ended
}

// giveUp ends a child that has no command: its socket ends, and so does it.
func (m *master) giveUp(p *parked) {
	m.forget(p.id)
	closeFiles(p.sock.File, p.handle)
	if p.group.unified != "" {
		m.abandon(p.group) // also where it does not listen
	}
}

// pidfd returns a descriptor of the process that the poller can wait for.
func pidfd(pid int) (*os.File, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("opening process %d: %w", pid, err)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}

// readable says whether there is something to read: in a pidfd, that the process has ended.
func readable(f *os.File) (yes bool, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return false, err
	}
	ctlErr := raw.Control(func(fd uintptr) { yes, err = pollIn(fd) })
	return yes, errors.Join(ctlErr, err)
}

func pollIn(fd uintptr) (bool, error) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		if !errors.Is(err, unix.EINTR) { // a signal of Go's runtime ends one that does not even wait (poll(2))
			return n > 0, err
		}
	}
}

// awaitEnd returns when the process of the pidfd has ended, without holding a thread.
func awaitEnd(f *os.File) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var pollErr error
	err = raw.Read(func(fd uintptr) bool {
		ended, err := pollIn(fd)
		if errors.Is(err, unix.EINTR) {
			return false
		}
		pollErr = err
		return ended || err != nil
	})
	return errors.Join(err, pollErr)
}

// cgroupOf returns the process's path in the v2 hierarchy.
func cgroupOf(pid int) (string, error) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(raw)) {
		if rel, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(rel), nil
		}
	}
	return "", fmt.Errorf("process %d is in no cgroup v2 hierarchy", pid)
}
