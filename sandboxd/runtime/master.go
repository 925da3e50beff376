package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/kidinit"
)

// errNoInit says that a kid-init takes no orders: it was started by another sandboxd, or is gone.
var errNoInit = errors.New("kid-init takes no orders from here")

// reportGrace is how long kid-init may take to say how a command ended whose end the kernel has told already.
const reportGrace = 2 * time.Second

// master is this side of one kid-init's socket. kid-init is not believed: what it sends is bounded and checked, every
// wait has a deadline, and what a command is and whether it lives the kernel tells.
type master struct {
	sock *socket
	unit string // the container's cgroup in the v2 hierarchy
	init int    // kid-init's pid on the host

	abandon func(execGroup) // kills what is in it and removes it when it can be

	mu      sync.Mutex
	last    uint64                         // id of the last order; guarded by mu
	waiting map[uint64]chan kidinit.Report // guarded by mu; nil when nothing is read any more
	parked  *parked                        // guarded by mu; a child that waits for its command
	parking chan struct{}                  // guarded by mu; closed when the child under way is there or will not be; nil: none is under way
	closed  bool                           // guarded by mu
}

// newMaster returns this side's end and the one for kid-init, which is the caller's to close.
func newMaster(abandon func(execGroup)) (*master, *os.File, error) {
	sock, theirs, err := socketPair()
	if err != nil {
		return nil, nil, fmt.Errorf("making kid-init's socket: %w", err)
	}
	return &master{sock: sock, abandon: abandon, waiting: map[uint64]chan kidinit.Report{}}, theirs, nil
}

// read passes kid-init's reports on to whoever waits for them, until the socket ends.
func (m *master) read() {
	defer m.hangUp()
	buf := make([]byte, kidinit.ReportSize+1)
	for {
		n, _, err := m.sock.receive(buf)
		if err != nil || n == 0 {
			return
		}
		r, err := kidinit.DecodeReport(buf[:n])
		if err != nil {
			return // it is not our kid-init any more
		}
		m.mu.Lock()
		c := m.waiting[r.ID]
		delete(m.waiting, r.ID)
		m.mu.Unlock()
		if c != nil {
			c <- r // there is room, and an id is sent on once
		}
	}
}

// hangUp ends every wait for a report.
func (m *master) hangUp() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, c := range m.waiting {
		close(c)
	}
	m.waiting = nil
}

// close gives the socket up. Children that wait for a command end.
func (m *master) close() {
	m.mu.Lock()
	p := m.parked
	m.parked, m.closed = nil, true
	m.mu.Unlock()
	m.sock.Close()
	if p != nil {
		m.giveUp(p)
	}
}

// order makes kid-init fork a child that talks over theirs, and returns where its end will be reported.
func (m *master) order(theirs *os.File, deadline time.Time) (uint64, <-chan kidinit.Report, error) {
	c := make(chan kidinit.Report, 1)
	m.mu.Lock()
	if m.waiting == nil {
		m.mu.Unlock()
		return 0, nil, errNoInit
	}
	m.last++
	id := m.last
	m.waiting[id] = c
	m.mu.Unlock()
	if err := m.sock.send(kidinit.EncodeOrder(id), deadline, theirs); err != nil {
		m.forget(id)
		if errors.Is(err, unix.EPIPE) || errors.Is(err, os.ErrClosed) {
			err = errNoInit
		}
		return 0, nil, err
	}
	return id, c, nil
}

// forget stops waiting for the report about id.
func (m *master) forget(id uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.waiting, id)
}

// take returns a child that is ready for a command.
func (m *master) take(ctx context.Context) (*parked, error) {
	for {
		m.mu.Lock()
		p, under := m.parked, m.parking
		m.parked = nil
		m.mu.Unlock()
		switch {
		case p != nil && p.alive():
			return p, nil
		case p != nil:
			m.giveUp(p)
			continue
		case under == nil:
			return m.park(ctx)
		}
		select { // one is under way, and nobody else has asked for it yet
		case <-under:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// prepare parks a child for the next command: moving a process into a cgroup can take the kernel ten milliseconds and
// more (it waits for an RCU grace period), which no command should have to wait for.
func (m *master) prepare() {
	m.mu.Lock()
	if m.parked != nil || m.parking != nil || m.closed {
		m.mu.Unlock()
		return
	}
	done := make(chan struct{})
	m.parking = done
	m.mu.Unlock()
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		p, err := m.park(ctx)
		m.mu.Lock()
		m.parking = nil
		if err == nil && !m.closed {
			m.parked, p = p, nil
		}
		m.mu.Unlock()
		close(done)
		if err == nil && p != nil {
			m.giveUp(p) // too late
		}
	}()
}

// Parked is the pid on the host of the child that waits for the container's next command, 0 where there is none.
func (r *Runc) Parked(id string) int {
	m := r.master(id)
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.parked == nil {
		return 0
	}
	return m.parked.pid
}
