package dnsfilter

import (
	"encoding/binary"
	"net"
	"net/netip"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batchLen is how many datagrams are taken from the kernel, and given to it, with one call. It is below what the
// kernel cuts one message into (UDP_MAX_SEGMENTS), and so many answers are below what one message may have (64 KiB).
const batchLen = 32

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	hdr unix.Msghdr
	len uint32
}

// segments is the control message that has the kernel cut one message into datagrams of size bytes (UDP_SEGMENT,
// udp(7)), as late as it can: answers to one asker pass routing, firewall and programs together. A kid's socket gets
// them one by one. Whoever reads a kid's link by itself, as a user-space network stack does, has to switch
// tx-udp-segmentation off on the box's end of the link.
type segments struct {
	hdr  unix.Cmsghdr
	size uint16
	_    [6]byte // up to the alignment of the next one
}

// batch moves datagrams between one socket and the filter, many with one system call when many wait. One
// goroutine uses it.
type batch struct {
	rc syscall.RawConn

	in, out     [batchLen]mmsghdr
	inIO, outIO [batchLen]unix.Iovec
	cuts        [batchLen]segments // of out
	from        [batchLen]unix.RawSockaddrInet4
	queries     [batchLen][]byte
	replies     [batchLen][maxUDP]byte

	got    int           // datagrams of the last receive
	left   int           // replies to send
	msgs   int           // messages that they make: of out
	apart  bool          // the kernel cuts no messages here: each reply is one
	errn   syscall.Errno // of the last call
	number int           // of messages that it took
	single [1]mmsghdr
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
		b.cuts[i].hdr = unix.Cmsghdr{Level: unix.SOL_UDP, Type: unix.UDP_SEGMENT}
		b.cuts[i].hdr.SetLen(unix.CmsgLen(2))
	}
	return b, nil
}

// receive waits for datagrams and returns how many came.
func (b *batch) receive() (int, error) {
	for i := range b.in {
		b.in[i].hdr.Namelen = unix.SizeofSockaddrInet4
	}
	b.left, b.msgs = 0, 0
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
	io := &b.outIO[b.left]
	io.Base = &msg[0]
	io.SetLen(len(msg))
	b.left++
	if b.msgs > 0 && b.joins(i, len(msg)) {
		return
	}
	m := &b.out[b.msgs].hdr
	m.Name = (*byte)(unsafe.Pointer(&b.from[i]))
	m.Iov = io
	m.SetIovlen(1)
	m.Control = nil
	m.SetControllen(0)
	b.msgs++
}

// joins adds the newest reply, of size bytes to the i-th datagram, to the last message, where that goes to the same
// asker in pieces of the same size.
func (b *batch) joins(i, size int) bool {
	m, cut := &b.out[b.msgs-1].hdr, &b.cuts[b.msgs-1]
	to := (*unix.RawSockaddrInet4)(unsafe.Pointer(m.Name))
	if b.apart || to.Addr != b.from[i].Addr || to.Port != b.from[i].Port || int(m.Iov.Len) != size {
		return false
	}
	cut.size = uint16(size) // no reply is longer than a datagram
	m.Control = (*byte)(unsafe.Pointer(cut))
	m.SetControllen(int(unsafe.Sizeof(*cut)))
	m.SetIovlen(int(m.Iovlen) + 1)
	return true
}

// send sends the answers. One that cannot be sent (the kid is gone, its link is down) concerns that kid alone
// and is passed over.
func (b *batch) send() error {
	for first := 0; first < b.msgs; {
		if err := b.sendmmsg(b.out[first:b.msgs]); err != nil {
			return err
		}
		if b.errn != 0 && b.errn != unix.EINTR { // it is the first one's fault: sendmmsg(2) reports no other
			if err := b.sendApart(&b.out[first]); err != nil {
				return err
			}
			b.number = 1
		}
		first += b.number
	}
	return nil
}

// sendApart sends the answers of a message that was not taken as a whole one by one. A device on the way that does
// no checksums is a reason for that (EIO), an old kernel another.
func (b *batch) sendApart(m *mmsghdr) error {
	if m.hdr.Control == nil {
		return nil // it was one
	}
	b.apart = b.apart || b.errn == unix.EIO || b.errn == unix.EINVAL
	for i := range int(m.hdr.Iovlen) {
		one := &b.single[0].hdr
		*one = m.hdr
		one.Iov = (*unix.Iovec)(unsafe.Add(unsafe.Pointer(m.hdr.Iov), uintptr(i)*unsafe.Sizeof(unix.Iovec{})))
		one.SetIovlen(1)
		one.Control = nil
		one.SetControllen(0)
		for b.errn = unix.EINTR; b.errn == unix.EINTR; {
			if err := b.sendmmsg(b.single[:]); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendmmsg gives messages to the kernel; number and errn say what came of it.
func (b *batch) sendmmsg(msgs []mmsghdr) error {
	return b.rc.Write(func(fd uintptr) bool {
		r, _, errno := syscall.Syscall6(unix.SYS_SENDMMSG, fd, uintptr(unsafe.Pointer(&msgs[0])), uintptr(len(msgs)), unix.MSG_DONTWAIT, 0, 0)
		if b.number, b.errn = int(r), errno; errno != 0 {
			b.number = 0
		}
		return errno != unix.EAGAIN
	})
}
