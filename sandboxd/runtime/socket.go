package runtime

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// socket is one end of a pair of SOCK_SEQPACKET sockets, which the poller waits for.
type socket struct {
	*os.File
	raw syscall.RawConn
}

// socketPair returns this side's end and theirs, which blocks and is the caller's to close.
func socketPair() (*socket, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	theirs := os.NewFile(uintptr(fds[1]), "theirs")
	err = unix.SetNonblock(fds[0], true)
	ours := os.NewFile(uintptr(fds[0]), "ours")
	var raw syscall.RawConn
	if err == nil {
		raw, err = ours.SyscallConn()
	}
	if err != nil {
		closeFiles(ours, theirs)
		return nil, nil, err
	}
	return &socket{File: ours, raw: raw}, theirs, nil
}

// send sends one message with descriptors.
func (s *socket) send(msg []byte, deadline time.Time, files ...*os.File) error {
	fds := make([]int, len(files))
	for i, f := range files {
		fds[i] = int(f.Fd())
	}
	if err := s.SetWriteDeadline(deadline); err != nil {
		return err
	}
	var sendErr error
	err := s.raw.Write(func(fd uintptr) bool {
		sendErr = unix.Sendmsg(int(fd), msg, unix.UnixRights(fds...), nil, unix.MSG_NOSIGNAL)
		return !errors.Is(sendErr, unix.EAGAIN)
	})
	return errors.Join(err, sendErr)
}

// receive reads one message, until the read deadline. pid is the sender's where the kernel was told to say (passPID),
// 0 otherwise. No message at all, n is 0, is the end. Descriptors that come along are closed.
func (s *socket) receive(buf []byte) (n int, from unix.Ucred, err error) {
	oob := make([]byte, unix.CmsgSpace(unix.SizeofUcred)+unix.CmsgSpace(4))
	var oobn int
	var recvErr error
	err = s.raw.Read(func(fd uintptr) bool {
		n, oobn, _, _, recvErr = unix.Recvmsg(int(fd), buf, oob, unix.MSG_CMSG_CLOEXEC)
		return !errors.Is(recvErr, unix.EAGAIN)
	})
	if err := errors.Join(err, recvErr); err != nil {
		return 0, from, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return 0, from, fmt.Errorf("reading what came with a message: %w", err)
	}
	for _, m := range messages {
		if cred, err := unix.ParseUnixCredentials(&m); err == nil {
			from = *cred
		} else if fds, err := unix.ParseUnixRights(&m); err == nil {
			for _, fd := range fds {
				unix.Close(fd) // nobody asked for it
			}
		}
	}
	return n, from, nil
}

// passPID makes the kernel say who sent a message.
func (s *socket) passPID() error {
	var optErr error
	err := s.raw.Control(func(fd uintptr) { optErr = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1) })
	return errors.Join(err, optErr)
}
