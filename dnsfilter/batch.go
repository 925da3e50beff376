package dnsfilter

import (
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batchLen is how many datagrams are taken from the kernel, and given to it, with one call.
const batchLen = 32

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
}

// batch moves datagrams between one socket and the filter, many with one system call when many wait. One
// goroutine uses it.
type batch struct {
	rc syscall.RawConn

	in, out     [batchLen]mmsghdr
	inIO, outIO [batchLen]unix.Iovec
	from        [batchLen]unix.RawSockaddrInet4
	queries     [batchLen][]byte
	replies     [batchLen][maxUDP]byte

	got  int           // datagrams of the last receive
	left int           // replies to send
	errn syscall.Errno // of the last call
}

func newBatch(c *net.UDPConn) (*batch, error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	b := &batch{rc: rc}
	for i := range b.in {
		b.queries[i] = make([]byte, 64<<10)
		b.inIO[i].Base = &b.queries[i][0]
		b.inIO[i].SetLen(len(b.queries[i]))
		b.in[i].hdr.Name = (*byte)(unsafe.Pointer(&b.from[i]))
		b.in[i].hdr.Iov = &b.inIO[i]
		b.in[i].hdr.SetIovlen(1)
		b.out[i].hdr.Namelen = unix.SizeofSockaddrInet4
		b.out[i].hdr.Iov = &b.outIO[i]
		b.out[i].hdr.SetIovlen(1)
	}
	return b, nil
}

// receive waits for datagrams and returns how many came.
func (b *batch) receive() (int, error) {
	for i := range b.in {
		b.in[i].hdr.Namelen = unix.SizeofSockaddrInet4
	}
	b.left = 0
	if err := b.rc.Read(b.recvmmsg); err != nil {
		return 0, err
	}
	if b.errn != 0 {
		return 0, b.errn
	}
	return b.got, nil
}

// recvmmsg takes what waits; false means that nothing does.
func (b *batch) recvmmsg(fd uintptr) bool {
	n, _, errno := syscall.Syscall6(unix.SYS_RECVMMSG, fd, uintptr(unsafe.Pointer(&b.in[0])), batchLen, unix.MSG_DONTWAIT, 0, 0)
	b.got, b.errn = int(n), errno
	return errno != unix.EAGAIN
}

// query returns the i-th datagram and who sent it. Both are valid until the next receive.
func (b *batch) query(i int) (raw []byte, src netip.AddrPort) {
	sa := &b.from[i]
	port := binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&sa.Port))[:]) // in network order
	return b.queries[i][:b.in[i].len], netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), port)
}

// space is where the answer to the i-th datagram may be built.
func (b *batch) space(i int) []byte { return b.replies[i][:0] }

// reply puts an answer to the i-th datagram with those that send sends. msg must not be empty, and stays
// untouched until then.
func (b *batch) reply(i int, msg []byte) {
	b.out[b.left].hdr.Name = (*byte)(unsafe.Pointer(&b.from[i]))
	b.outIO[b.left].Base = &msg[0]
	b.outIO[b.left].SetLen(len(msg))
	b.left++
}

// send sends the answers. One that cannot be sent (the kid is gone, its link is down) concerns that kid alone
// and is passed over.
func (b *batch) send() error {
	for first := 0; first < b.left; {
		var n int
		err := b.rc.Write(func(fd uintptr) bool {
			r, _, errno := syscall.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&b.out[first])), uintptr(b.left-first), unix.MSG_DONTWAIT, 0, 0)
			n, b.errn = int(r), errno
			return errno != unix.EAGAIN
		})
		switch {
		case err != nil:
			return err
		case b.errn == unix.EINTR:
			n = 0
		case b.errn != 0:
			n = 1 // it is the first one's fault: sendmmsg(2) reports no other
		}
		first += n
	}
	return nil
}
