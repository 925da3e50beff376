package proxy

import (
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/policy"
)

// relay moves bytes both ways until both directions have ended. The end of one direction is passed on as
// such (half-close); a direction that breaks takes the other one with it, as a reset. Every byte that the
// other side took is counted.
func relay(c *conn, u *upstream) error {
	up, down := newFlow(c, u, upward, u.tcp, c.client), newFlow(c, u, downward, c.client, u.tcp)
	up.look = u.rule.Protocol == policy.TCP
	var ended atomic.Int32
	var upErr error
	var wg sync.WaitGroup
	wg.Go(func() { upErr = up.toTheEnd(&ended) })
	downErr := down.toTheEnd(&ended)
	wg.Wait()
	if upErr == nil && downErr == nil {
		return nil
	}
	return errors.Join(upErr, downErr)
}

// toTheEnd runs the flow and passes its end on. ended counts the directions that have ended: the last one's end
// goes with the socket, which is closed at once.
func (f *flow) toTheEnd(ended *atomic.Int32) error {
	err := f.run()
	if err != nil {
		if errors.As(err, new(refusal)) {
			settle(f.src) // the other direction's last bytes are counted too
		}
		reset(f.dst)
		reset(f.src)
		return err
	}
	if ended.Add(1) == 1 {
		f.dst.CloseWrite() // the reader is gone already where this fails, and the other direction finds out
	}
	return nil
}

// flow is one direction of a relay. Bytes move from socket to socket inside the kernel (splice(2)); where the
// rule limits them, or no pipe is to be had, through memory. Pipe and buffer are held only while bytes move,
// so that an idle direction costs a goroutine and nothing else.
type flow struct {
	c   *conn
	u   *upstream
	way way
	dst *sock
	src *sock

	pull func(fd uintptr) bool // bound once: a closure for every step would be garbage
	push func(fd uintptr) bool

	// Owned by run.
	pipe *pipe
	buf  *[relayBuf]byte
	look bool // src has shown nothing yet, and what it shows first is looked at
	n    int  // moved by the last pull, or still in the pipe
	err  error
}

// relayBuf is the size of a step through memory, spliceMax that of a step inside the kernel.
const (
	relayBuf  = 64 << 10
	spliceMax = 1 << 20
)

var relayBufs = sync.Pool{New: func() any { return new([relayBuf]byte) }}

func newFlow(c *conn, u *upstream, w way, dst, src *sock) *flow {
	f := &flow{c: c, u: u, way: w, dst: dst, src: src}
	f.pull, f.push = f.pullStep, f.pushStep
	return f
}

// run moves bytes until src ends or something breaks.
func (f *flow) run() error {
	defer f.rest()
	for {
		if f.err != nil {
			return f.err
		}
		if err := f.src.raw.Read(f.pull); err != nil {
			return err
		}
		switch {
		case f.err != nil:
			return f.err
		case f.n == 0:
			return nil
		case f.buf != nil:
			f.err = f.c.pass(f.u, f.way, f.dst, f.buf[:f.n])
		case f.u.meter.limited(f.way):
			f.err = f.unpipe()
		default:
			f.err = f.drain()
		}
	}
}

// rest gives pipe and buffer back. A pipe with bytes in it is closed: they were somebody's.
func (f *flow) rest() {
	if f.buf != nil {
		relayBufs.Put(f.buf)
		f.buf = nil
	}
	if f.pipe != nil {
		f.pipe.giveBack(f.err == nil)
		f.pipe = nil
	}
}

// pullStep takes the next bytes from src. It returns false while there are none (syscall.RawConn), with
// nothing held.
func (f *flow) pullStep(fd uintptr) bool {
	if f.look {
		seen, err := peek(int(fd))
		if errors.Is(err, unix.EAGAIN) {
			return false
		}
		f.look = false
		if err := f.c.firstBytes(seen, f.u.rule); err != nil {
			f.n, f.err = 0, err
			return true
		}
	}
	if f.pipe == nil && f.buf == nil {
		if !f.u.meter.limited(f.way) {
			f.pipe = takePipe()
		}
		if f.pipe == nil {
			f.buf = relayBufs.Get().(*[relayBuf]byte)
		}
	}
	for {
		if f.pipe != nil {
			f.n, f.err = splice(int(fd), f.pipe.w, spliceMax, true)
		} else {
			f.n, f.err = unix.Read(int(fd), f.buf[:])
		}
		switch {
		case errors.Is(f.err, unix.EINTR):
			continue
		case errors.Is(f.err, unix.EAGAIN):
			f.err = nil
			f.rest()
			return false
		case f.err != nil:
			f.n = 0
		}
		return true
	}
}

// firstLook is how much of what a tunnel carries is looked at: what one segment brings, and what a client says before
// it waits for an answer.
const firstLook = 16 << 10

// peek returns what can be read from a socket, and leaves it there.
func peek(fd int) ([]byte, error) {
	buf := make([]byte, firstLook)
	for {
		n, _, err := unix.Recvfrom(fd, buf, unix.MSG_PEEK|unix.MSG_DONTWAIT)
		if !errors.Is(err, unix.EINTR) {
			return buf[:max(n, 0)], err
		}
	}
}

// firstBytes refuses a tunnel that nobody looks into when a token is in what it brings first. The error is a refusal.
func (c *conn) firstBytes(seen []byte, rule *policy.Rule) error {
	if why := c.strayText(string(seen), inTunnel, "a token in the first bytes of a tunnel, where none is swapped", rule); why != nil {
		return *why
	}
	return nil
}

// drain empties the pipe into dst.
func (f *flow) drain() error {
	for f.n > 0 {
		if err := f.dst.raw.Write(f.push); err != nil {
			f.err = err
		}
		if f.err != nil {
			return f.err
		}
	}
	return nil
}

// unpipe empties the pipe through memory, and goes on that way: a newer policy has brought a limit.
func (f *flow) unpipe() error {
	buf := relayBufs.Get().(*[relayBuf]byte)
	defer relayBufs.Put(buf)
	for f.n > 0 {
		n, err := unix.Read(f.pipe.r, buf[:min(f.n, relayBuf)])
		if err != nil {
			return err
		}
		f.n -= n
		if err := f.c.pass(f.u, f.way, f.dst, buf[:n]); err != nil {
			return err
		}
	}
	f.rest()
	return nil
}

func (f *flow) pushStep(fd uintptr) bool {
	for {
		n, err := splice(f.pipe.r, int(fd), f.n, f.n <= smallWrite)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case errors.Is(err, unix.EAGAIN):
			return false
		case err == nil && n == 0:
			err = io.ErrUnexpectedEOF // the pipe is not empty: cannot happen
		case err == nil:
			f.n -= n
			f.u.meter.passed(f.way, n)
			f.c.countWay(f.way, n)
		}
		f.err = err
		return true
	}
}

// splice moves up to n bytes between a socket and a pipe. short says that it takes no time worth mentioning.
func splice(from, to, n int, short bool) (int, error) {
	call := unix.Syscall6
	if short {
		call = unix.RawSyscall6
	}
	moved, _, e := call(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), unix.SPLICE_F_NONBLOCK|unix.SPLICE_F_MOVE)
	if e != 0 {
		return 0, e
	}
	return int(moved), nil
}

// pass writes bytes that were read to dst, up to the rule's limit, and counts what dst took. Where not all may
// pass the error is a refusal.
func (c *conn) pass(u *upstream, w way, dst *sock, b []byte) error {
	may := u.meter.take(w, len(b))
	n := 0
	var err error
	if may > 0 {
		n, err = dst.Write(b[:may])
	}
	u.meter.giveBack(w, may-n)
	c.countWay(w, n)
	if err == nil && may < len(b) {
		settle(dst)
		return c.spent(u, w)
	}
	return err
}

// settleTime is how long the last bytes that a limit lets through may take to be acknowledged, before the
// reset that would take them back.
const settleTime = time.Second

// settle waits until the other end has everything that was written.
func settle(tc *sock) {
	for deadline, pause := time.Now().Add(settleTime), time.Millisecond; time.Now().Before(deadline); pause = min(2*pause, 20*time.Millisecond) {
		queued := 0
		err := tc.control(func(fd int) (err error) {
			queued, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ)
			return err
		})
		if err != nil || queued == 0 {
			return
		}
		time.Sleep(pause)
	}
}
