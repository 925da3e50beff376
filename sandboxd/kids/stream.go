package kids

import (
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/wire"
	"tagout/sandboxd/outlog"
	"tagout/sandboxd/runtime"
)

// stream sends a command's output in frames. Reading waits for sending, so a slow receiver slows the command
// down and nothing piles up here.
type stream struct {
	failed func() // called when sending fails; set before read

	mu   sync.Mutex
	send func(wire.ExecFrame) error // guarded by mu
	err  error                      // guarded by mu; the first that send returned

	log     atomic.Pointer[outlog.Log] // takes what comes from pipes, by itself; nil: send gets all
	readers sync.WaitGroup
	cut     atomic.Bool // somebody still held a pipe open, or the log took no more
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

// keep sends everything from here on to the log; nil drops it. It is read all the same: the command goes on. trouble is
// told, once, that the log takes no more.
func (s *stream) keep(log *outlog.Log, trouble func(error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = nil
	s.send = func(f wire.ExecFrame) error {
		if log == nil {
			return nil
		}
		return errors.Join(log.Write(outlog.Stdout, f.Stdout), log.Write(outlog.Stderr, f.Stderr))
	}
	s.failed = func() {
		s.cut.Store(true)
		s.log.Store(nil)
		trouble(s.err)
	}
	s.log.Store(log)
	if log == nil {
		s.cut.Store(true)
	}
}

// read starts sending what the command writes.
func (s *stream) read(run *runtime.Running) {
	if run.Stderr == nil { // a terminal: it cannot be spliced
		s.readers.Go(func() { s.copy(run.Stdout, 0) })
		return
	}
	s.readers.Go(func() { s.copy(run.Stdout, outlog.Stdout) })
	s.readers.Go(func() { s.copy(run.Stderr, outlog.Stderr) })
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

// copy sends f until its end, or until its deadline and then what is still in the pipe. stream is 0 for a terminal.
func (s *stream) copy(f *os.File, stream int) {
	buf := make([]byte, frameSize)
	for {
		err := s.move(f, stream, buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			s.cut.Store(true)
			s.copyRest(f, buf, stream)
			return
		}
		if err != nil {
			return
		}
	}
}

// move waits for something to read and sends it. An error means that no more comes, or that its time is over.
func (s *stream) move(f *os.File, stream int, buf []byte) error {
	log := s.log.Load()
	if log == nil || stream == 0 {
		n, err := f.Read(buf)
		s.bytes(stream, buf[:n])
		return err
	}
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	n := 0
	var moveErr error
	err = raw.Read(func(fd uintptr) (done bool) {
		n, moveErr = log.Splice(stream, int(fd))
		return !errors.Is(moveErr, unix.EAGAIN) && !errors.Is(moveErr, unix.EINTR)
	})
	switch {
	case err != nil:
		return err
	case moveErr != nil:
		s.fail(moveErr) // it is read on, and dropped
		return nil
	case n == 0:
		return io.EOF
	}
	return nil
}

// fail is told of the first error only.
func (s *stream) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = err
		s.failed()
	}
}

func (s *stream) bytes(stream int, b []byte) {
	switch {
	case len(b) == 0:
	case stream == outlog.Stderr:
		s.frame(wire.ExecFrame{Stderr: b})
	default:
		s.frame(wire.ExecFrame{Stdout: b})
	}
}

// copyRest sends what lies in the pipe without waiting for more. A pipe held at most its own size when the
// command ended, so more than that is not the command's.
func (s *stream) copyRest(f *os.File, buf []byte, stream int) {
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
		log := s.log.Load()
		ctlErr := raw.Control(func(fd uintptr) {
			if log != nil && stream != 0 {
				n, err = log.Splice(stream, int(fd))
			} else {
				n, err = unix.Read(int(fd), buf[:min(len(buf), left)])
			}
		})
		if errors.Is(err, unix.EINTR) {
			err = nil
			continue
		}
		if ctlErr != nil || err != nil || n <= 0 { // EAGAIN: empty
			return
		}
		if log == nil || stream == 0 {
			s.bytes(stream, buf[:n])
		}
		left -= n
	}
}
