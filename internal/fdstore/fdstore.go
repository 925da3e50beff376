// Package fdstore keeps descriptors open while the process that made them is replaced: what systemd calls a file
// descriptor store, for one box, whoever started it.
//
// A Store is a process of its own that does nothing else. It knows nothing of what it keeps: a set of descriptors has
// an id. Who may connect to its socket may put sets into it, take copies and drop them; that is root alone, by the
// socket's mode and by the kernel's word (SO_PEERCRED, unix(7)). It ends when it keeps nothing and nobody is connected.
//
// It promises nothing after its own end: a pipe whose last reader it was is broken then.
package fdstore

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// ListenFD is the descriptor on which a store inherits its listening socket.
const ListenFD = 3

// Bounds.
const (
	MaxFiles = 4    // of a set
	MaxSets  = 2048 // more than a box may have commands
	maxID    = 64   // bytes of an id
	maxConns = 8
)

// A request is one SOCK_SEQPACKET message: a byte that says what is wanted, and the id. The answer begins with an errno
// in one byte, 0 where it was done.
const (
	opPut  = 'p' // with the descriptors
	opGet  = 'g' // they come with the answer
	opDrop = 'd'
	opList = 'l' // all ids come in the answer, each with a newline behind it
)

const maxAnswer = 1 + MaxSets*(maxID+1)

// ErrNotKept says that a store has no such set, or that there is no store.
var ErrNotKept = errors.New("nothing is kept under that name")

// send sends one message. The caller keeps the descriptors.
func send(fd int, msg []byte, files []int, flags int) error {
	var rights []byte
	if len(files) > 0 {
		rights = unix.UnixRights(files...)
	}
	for {
		if err := unix.Sendmsg(fd, msg, rights, nil, flags|unix.MSG_NOSIGNAL); !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// receive reads one message and what came with it, which is the caller's to close. No message at all is the end.
func receive(fd int, buf []byte, flags int) (n int, files []int, err error) {
	oob := make([]byte, unix.CmsgSpace(4*MaxFiles))
	var oobn, got int
	for {
		n, oobn, got, _, err = unix.Recvmsg(fd, buf, oob, flags|unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil {
		return 0, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range messages {
		fds, rightsErr := unix.ParseUnixRights(&m)
		files, err = append(files, fds...), errors.Join(err, rightsErr)
	}
	if err == nil && got&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0 {
		err = fmt.Errorf("a message came in part: %w", unix.EMFILE) // there is room for no more descriptors
	}
	if err != nil {
		closeAll(files)
		return 0, nil, err
	}
	return n, files, nil
}

func closeAll(files []int) {
	for _, fd := range files {
		unix.Close(fd) // nothing that was written could be lost here
	}
}

func goodID(id string) bool {
	return id != "" && len(id) <= maxID && !strings.ContainsFunc(id, func(r rune) bool { return r <= ' ' || r > '~' })
}
