package kids

import (
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/wire"
	"tagout/sandboxd/runtime"
)

// stream sends a command's output in frames. Reading waits for sending, so a slow receiver slows the command
// down and nothing piles up here.
type stream struct {
	failed func() // called when sending fails; set before read

	mu   sync.Mutex
	send func(wire.ExecFrame) error // guarded by mu
	err  error                      // guarded by mu; the first that send returned

	readers sync.WaitGroup
	cut     atomic.Bool // somebody still held a pipe open
}

// frame sends one frame; after a failure it drops everything.
func (s *stream) frame(f wire.ExecFrame) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return
	}
	if s.err = s.send(f); s.err != nil && s.failed != nil {
		s.failed()
	}
}

// redirect sends everything from here on to another receiver.
func (s *stream) redirect(send func(wire.ExecFrame) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.send, s.err = send, nil
}

// read starts sending what the command writes.
func (s *stream) read(run *runtime.Running) {
	s.readers.Go(func() { s.copy(run.Stdout, func(b []byte) wire.ExecFrame { return wire.ExecFrame{Stdout: b} }) })
	if run.Stderr != nil {
		s.readers.Go(func() { s.copy(run.Stderr, func(b []byte) wire.ExecFrame { return wire.ExecFrame{Stderr: b} }) })
	}
}

// drain returns when everything that the command had written when it ended is sent. A child that holds the
// pipes open gets drainGrace to finish what it writes, and no more: then the output is cut.
func (s *stream) drain(run *runtime.Running) (cut bool) {
	deadline := time.Now().Add(drainGrace)
	for _, f := range []*os.File{run.Stdout, run.Stderr} {
		if f != nil {
			f.SetReadDeadline(deadline) // a pipe that takes no deadline is closed by now
		}
	}
	s.readers.Wait()
	return s.cut.Load()
}

const frameSize = 32 << 10

// copy sends f until its end, or until its deadline and then what is still in the pipe.
func (s *stream) copy(f *os.File, wrap func([]byte) wire.ExecFrame) {
	buf := make([]byte, frameSize)
	for {
		n, err := f.Read(buf)
		if n > 0 {
			s.frame(wrap(buf[:n]))
		}
		if errors.Is(err, os.ErrDeadlineExceeded) {
			s.cut.Store(true)
			s.copyRest(f, buf, wrap)
			return
		}
		if err != nil {
			return
		}
	}
}

// copyRest sends what lies in the pipe without waiting for more. A pipe held at most its own size when the
// command ended, so more than that is not the command's.
func (s *stream) copyRest(f *os.File, buf []byte, wrap func([]byte) wire.ExecFrame) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	left := 0
	sizeErr := raw.Control(func(fd uintptr) { left, err = unix.FcntlInt(fd, unix.F_GETPIPE_SZ, 0) })
	if errors.Is(err, unix.EBADF) { // a terminal, which holds less
		left, err = 1<<16, nil
	}
	for sizeErr == nil && err == nil && left > 0 {
		n := 0
		ctlErr := raw.Control(func(fd uintptr) { n, err = unix.Read(int(fd), buf[:min(len(buf), left)]) })
		if errors.Is(err, unix.EINTR) {
			err = nil
			continue
		}
		if ctlErr != nil || err != nil || n <= 0 { // EAGAIN: empty
			return
		}
		s.frame(wrap(buf[:n]))
		left -= n
	}
}
