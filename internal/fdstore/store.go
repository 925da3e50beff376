package fdstore

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Store is the process that keeps. One goroutine serves it.
type Store struct {
	listen int
	conns  []int
	sets   map[string][]int
	met    bool // somebody was connected
}

// NewStore returns a store that answers on a listening SOCK_SEQPACKET socket.
func NewStore(listen int) *Store { return &Store{listen: listen, sets: map[string][]int{}} }

// Serve returns nil when nothing is kept any more and nobody is there who could want it to.
func (s *Store) Serve() error {
	for !s.met || len(s.conns) > 0 || len(s.sets) > 0 {
		set := []unix.PollFd{{Fd: int32(s.listen), Events: unix.POLLIN}} // descriptors are small
		if len(s.conns) == maxConns {
			set[0].Fd = -1 // who comes now waits
		}
		for _, c := range s.conns {
			set = append(set, unix.PollFd{Fd: int32(c), Events: unix.POLLIN})
		}
		if _, err := unix.Poll(set, -1); errors.Is(err, unix.EINTR) {
			continue
		} else if err != nil {
			return fmt.Errorf("waiting for requests: %w", err)
		}
		conns := s.conns[:0]
		for i, c := range s.conns {
			if set[i+1].Revents != 0 && s.answer(c) != nil {
				unix.Close(c) // whoever it was is gone, or never knew how to ask
				continue
			}
			conns = append(conns, c)
		}
		s.conns = conns
		if set[0].Revents == 0 {
			continue
		}
		if err := s.accept(); err != nil {
			return fmt.Errorf("waiting for somebody to connect: %w", err)
		}
	}
	return nil
}

func (s *Store) accept() error {
	c, _, err := unix.Accept4(s.listen, unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
	if errors.Is(err, unix.EINTR) || errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EAGAIN) {
		return nil // it went away
	}
	if err != nil {
		return err
	}
	if cred, err := unix.GetsockoptUcred(c, unix.SOL_SOCKET, unix.SO_PEERCRED); err != nil || int(cred.Uid) != unix.Geteuid() {
		unix.Close(c) // nothing was asked
		return nil
	}
	s.met = true
	s.conns = append(s.conns, c)
	return nil
}

// answer carries one request out. An error means that nobody listens any more.
func (s *Store) answer(c int) error {
	var buf [1 + maxID + 1]byte
	n, files, err := receive(c, buf[:], unix.MSG_DONTWAIT)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return nil
	case errors.Is(err, unix.EMFILE):
		return send(c, []byte{byte(unix.EMFILE)}, nil, unix.MSG_DONTWAIT)
	case err != nil:
		return err
	case n == 0:
		return errors.New("the end")
	}
	op, id := buf[0], string(buf[1:n])
	if op == opPut {
		return send(c, []byte{byte(s.put(id, files))}, nil, unix.MSG_DONTWAIT)
	}
	closeAll(files) // nobody asked for them
	switch op {
	case opGet:
		kept, ok := s.sets[id]
		if !ok {
			return send(c, []byte{byte(unix.ENOENT)}, nil, unix.MSG_DONTWAIT)
		}
		return send(c, []byte{0}, kept, unix.MSG_DONTWAIT)
	case opDrop:
		closeAll(s.sets[id])
		delete(s.sets, id)
		return send(c, []byte{0}, nil, unix.MSG_DONTWAIT)
	case opList:
		out := []byte{0}
		for id := range s.sets {
			out = append(append(out, id...), '\n')
		}
		return send(c, out, nil, unix.MSG_DONTWAIT)
	}
	return send(c, []byte{byte(unix.EINVAL)}, nil, unix.MSG_DONTWAIT)
}

// put keeps the files, in the place of others that had the id.
func (s *Store) put(id string, files []int) unix.Errno {
	old, known := s.sets[id]
	switch {
	case !goodID(id) || len(files) == 0:
		closeAll(files)
		return unix.EINVAL
	case !known && len(s.sets) >= MaxSets:
		closeAll(files)
		return unix.ENOSPC
	}
	closeAll(old)
	s.sets[id] = files
	return 0
}
