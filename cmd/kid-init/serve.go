package main

import (
	"os"
	"os/signal"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"tagout/internal/kidinit"
)

const (
	// most bounds the children whose end is not reported yet. sandboxd orders fewer.
	most = 1024
	// again is how long a report waits before it is tried again, where the socket took none.
	again = 50 * time.Millisecond
)

// child is a place in the table of children.
type child struct {
	pid    int // 0: the place is free
	ended  bool
	report kidinit.Report
}

// server carries orders out. Nothing in it grows.
type server struct {
	fd int

	mu       sync.Mutex
	children [most]child // guarded by mu
	waiting  int         // ended children whose report was not sent; guarded by mu
}

func newServer(fd int) *server { return &server{fd: fd} }

// serve returns when nobody can give orders any more.
func (s *server) serve() {
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, unix.SIGCHLD)
	go s.reap(ended)
	for {
		id, fd, ok := s.next()
		if !ok {
			return
		}
		if fd >= 0 {
			s.start(id, fd)
			unix.Close(fd) // the child has its own
		}
	}
}

// next waits for an order and returns it with the descriptor that came with it; fd is negative where there is none
// to carry out. ok is false when the socket has ended.
func (s *server) next() (id uint64, fd int, ok bool) {
	fd = -1
	var space [64]byte // on the stack, as all here is
	io := unix.Iovec{Base: (*byte)(unsafe.Pointer(&id)), Len: kidinit.OrderSize}
	msg := unix.Msghdr{Iov: &io, Iovlen: 1, Control: &space[0], Controllen: uint64(unix.CmsgSpace(4))}
	n, _, errno := unix.Syscall(unix.SYS_RECVMSG, uintptr(s.fd), uintptr(unsafe.Pointer(&msg)), unix.MSG_CMSG_CLOEXEC)
	switch {
	case errno == unix.EINTR:
		return 0, -1, true
	case errno != 0 || n == 0:
		return 0, -1, false
	}
	head := (*unix.Cmsghdr)(unsafe.Pointer(&space[0]))
	if msg.Controllen >= uint64(unix.CmsgLen(4)) && head.Level == unix.SOL_SOCKET && head.Type == unix.SCM_RIGHTS {
		fd = int(*(*int32)(unsafe.Pointer(&space[unix.CmsgLen(0)])))
	}
	if n != kidinit.OrderSize && fd >= 0 {
		unix.Close(fd)
		fd = -1
	}
	return id, fd, true
}

// start forks a child that talks over fd.
func (s *server) start(id uint64, fd int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.free()
	if c == nil {
		s.refuse(id, unix.EAGAIN)
		return
	}
	pid, errno := fork(fd)
	if errno != 0 {
		s.refuse(id, errno)
		return
	}
	*c = child{pid: pid, report: kidinit.Report{ID: id}}
}

func (s *server) free() *child {
	for i := range s.children {
		if s.children[i].pid == 0 {
			return &s.children[i]
		}
	}
	return nil
}

// refuse says that there is no child. Where that cannot be sent, the other side finds its socket closed.
func (s *server) refuse(id uint64, errno unix.Errno) {
	r := kidinit.Report{ID: id, Kind: kidinit.Refused, Status: uint32(errno)}
	s.send(&r)
}

func (s *server) send(r *kidinit.Report) (sent bool) {
	_, _, errno := unix.Syscall6(unix.SYS_SENDTO, uintptr(s.fd), uintptr(unsafe.Pointer(r)), kidinit.ReportSize, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, 0, 0)
	return errno != unix.EAGAIN && errno != unix.EINTR // nobody is there for any other
}

// reap reaps whenever something has ended, for ever, and reports what was ordered.
func (s *server) reap(ended <-chan os.Signal) {
	later := time.NewTicker(again)
	later.Stop()
	for {
		s.collect()
		if s.report() {
			later.Stop()
		} else {
			later.Reset(again)
		}
		select {
		case <-ended:
		case <-later.C:
		}
	}
}

// collect reaps all that have ended.
func (s *server) collect() {
	for {
		var status unix.WaitStatus
		var used unix.Rusage
		s.mu.Lock() // so that no child ends between its fork and its place in the table
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, &used)
		if pid > 0 {
			s.note(pid, status, &used)
		}
		s.mu.Unlock()
		if pid <= 0 && err != unix.EINTR {
			return
		}
	}
}

func (s *server) note(pid int, status unix.WaitStatus, used *unix.Rusage) {
	for i := range s.children {
		c := &s.children[i]
		if c.pid != pid || c.ended {
			continue // the pid may be another's by now
		}
		c.ended = true
		c.report.Kind, c.report.Status = kidinit.Ended, uint32(status)
		c.report.User, c.report.System, c.report.MaxRSS = micro(used.Utime), micro(used.Stime), uint64(used.Maxrss)
		s.waiting++
		return
	}
}

func micro(t unix.Timeval) uint64 { return uint64(t.Sec)*1e6 + uint64(t.Usec) } // neither is negative

// report sends what is not sent yet and says whether nothing is left.
func (s *server) report() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.children {
		if s.waiting == 0 {
			return true
		}
		c := &s.children[i]
		if !c.ended {
			continue
		}
		if !s.send(&c.report) {
			return false
		}
		*c = child{}
		s.waiting--
	}
	return true
}
