package killswitch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"tagout/internal/session"
)

// NetlinkSockets destroys sockets through sock_diag(7) with SOCK_DESTROY (kernel 4.5, CAP_NET_ADMIN,
// CONFIG_INET_DIAG_DESTROY) in the network namespace of the calling thread. TCP sockets go in every state in
// which they can still send, orphaned ones included; of UDP sockets the connected ones go.
type NetlinkSockets struct{}

// Constants of linux/sock_diag.h and linux/inet_diag.h that package unix lacks.
const (
	tcpGetSock      = 18 // TCPDIAG_GETSOCK: one look at TCP sockets of both families
	sockDestroy     = 21 // SOCK_DESTROY
	diagBytecode    = 1  // INET_DIAG_REQ_BYTECODE
	diagMark        = 15 // INET_DIAG_MARK
	bytecodeJump    = 1  // INET_DIAG_BC_JMP
	bytecodeDst     = 8  // INET_DIAG_BC_D_COND
	bytecodeMark    = 10 // INET_DIAG_BC_MARK_COND
	sizeofDiagReq   = 56 // struct inet_diag_req_v2
	sizeofTCPReq    = 60 // struct inet_diag_req
	offsetTCPStates = 52
	sizeofDiagMsg   = 72 // struct inet_diag_msg
	sizeofDiagSock  = 48 // struct inet_diag_sockid
	offsetReqSock   = 8
	offsetMsgSock   = 4
	offsetSockDst   = 20
	stateEstab      = 1
	stateTimeWait   = 6
	stateClose      = 7
	stateListen     = 10
	stateNewSynRecv = 12
)

// tcpStates are the states in which a TCP socket can send: neither closed, nor listening, nor TIME_WAIT.
const tcpStates = (1<<(stateNewSynRecv+1) - 1) &^ (1<<0 | 1<<stateTimeWait | 1<<stateClose | 1<<stateListen)

// destroyRounds bounds the looks: a proxy that is still dialling may make new sockets between two of them.
const destroyRounds = 50

// Destroy implements Sockets.
func (NetlinkSockets) Destroy(ctx context.Context, marks []uint32, addrs []netip.Addr) (int, error) {
	c, err := dialDiag()
	if err != nil {
		return 0, fmt.Errorf("destroying sockets: %w", err)
	}
	defer unix.Close(c.fd) // nothing is buffered
	w := newWanted(marks, addrs)
	total := 0
	for range destroyRounds {
		found, err := c.find(w)
		if err != nil {
			return total, fmt.Errorf("finding sockets to destroy: %w", err)
		}
		if len(found) == 0 {
			return total, nil
		}
		for _, s := range found {
			done, err := c.destroy(s)
			if err != nil {
				return total, fmt.Errorf("destroying a socket: %w", err)
			}
			if done {
				total++
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	return total, errors.New("new sockets keep appearing")
}

// wanted says which sockets are meant.
type wanted struct {
	marks  map[uint32]bool
	addrs  map[netip.Addr]bool
	filter []byte // bytecode that the kernel filters with; it lets at least all of them through
}

func newWanted(marks []uint32, addrs []netip.Addr) wanted {
	w := wanted{marks: map[uint32]bool{}, addrs: map[netip.Addr]bool{}}
	for _, m := range marks {
		w.marks[m] = true
	}
	for _, a := range addrs {
		w.addrs[a.Unmap()] = true
	}
	switch {
	case len(w.marks) == 0:
		w.filter = addrFilter(addrs)
	case len(w.addrs) == 0:
		w.filter = markFilter(marks)
	default:
		w.filter = either(markFilter(marks), addrFilter(addrs))
	}
	return w
}

// either lets through what one of two conditions, each from bytecode, lets through: the first goes on to a jump to
// the end where it is met, and to the second where it is not.
func either(a, b []byte) []byte {
	out := slices.Clone(a)
	binary.NativeEndian.PutUint16(out[2:], uint16(len(a)+4)) // 24 at most
	out = append(out, bytecodeJump, 4)
	out = binary.NativeEndian.AppendUint16(out, uint16(4+len(b)))
	return append(out, b...)
}

// markFilter lets sockets through whose mark agrees with all marks in the bits in which those agree, SecretBit aside.
func markFilter(marks []uint32) []byte {
	mask := ^uint32(session.SecretBit)
	for _, m := range marks {
		mask &^= m ^ marks[0]
	}
	arg := binary.NativeEndian.AppendUint32(nil, marks[0]&mask)
	return bytecode(bytecodeMark, binary.NativeEndian.AppendUint32(arg, mask))
}

// addrFilter lets sockets through whose peer's address has the prefix that all IPv4 addrs share.
func addrFilter(addrs []netip.Addr) []byte {
	first := addrs[0].Unmap().As4()
	n := 32
	for _, a := range addrs {
		b := a.Unmap().As4()
		n = min(n, bits.LeadingZeros32(binary.BigEndian.Uint32(first[:])^binary.BigEndian.Uint32(b[:])))
	}
	arg := []byte{unix.AF_INET, byte(n), 0, 0}                      // struct inet_diag_hostcond
	arg = binary.NativeEndian.AppendUint32(arg, uint32(0xFFFFFFFF)) // any port
	return bytecode(bytecodeDst, append(arg, first[:]...))
}

// bytecode is one struct inet_diag_bc_op with its argument: on yes go on behind it, which is the end and
// accepts; on no jump 4 bytes past the end, which refuses.
func bytecode(op byte, arg []byte) []byte {
	size := 4 + len(arg)
	head := []byte{op, byte(size)}
	head = binary.NativeEndian.AppendUint16(head, uint16(size+4)) // 20 at most
	return append(head, arg...)
}

// match looks at one answer in full.
func (w wanted) match(s diagSocket) bool {
	return s.hasMark && (w.marks[s.mark] || w.marks[s.mark&^session.SecretBit]) || w.addrs[s.dst]
}

// diagSocket is one socket as the kernel described it.
type diagSocket struct {
	family, protocol byte
	id               []byte // struct inet_diag_sockid, cookie included
	mark             uint32
	hasMark          bool
	dst              netip.Addr
}

type diagConn struct {
	fd  int
	seq uint32
	buf []byte
}

func dialDiag() (*diagConn, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("opening sock_diag: %w", err)
	}
	limit := unix.Timeval{Sec: 1}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		unix.Close(fd) // already failing
		return nil, fmt.Errorf("opening sock_diag: %w", err)
	}
	return &diagConn{fd: fd, buf: make([]byte, 64<<10)}, nil
}

// find lists the sockets that w means. Each look goes through all sockets of the box, those that only wait for
// their end included, and holds its processor meanwhile: there are no more of them than need be.
func (c *diagConn) find(w wanted) ([]diagSocket, error) {
	var out []diagSocket
	for _, look := range []struct {
		kind     uint16
		body     []byte
		protocol byte
	}{
		{tcpGetSock, tcpRequest(), unix.IPPROTO_TCP},
		{unix.SOCK_DIAG_BY_FAMILY, udpRequest(unix.AF_INET), unix.IPPROTO_UDP},
		{unix.SOCK_DIAG_BY_FAMILY, udpRequest(unix.AF_INET6), unix.IPPROTO_UDP},
	} {
		found, err := c.dump(look.kind, look.body, look.protocol, w.filter)
		if err != nil {
			return nil, err
		}
		for _, s := range found {
			if w.match(s) {
				out = append(out, s)
			}
		}
	}
	return out, nil
}

// tcpRequest is a struct inet_diag_req for TCP sockets of both families in one of tcpStates.
func tcpRequest() []byte {
	body := make([]byte, sizeofTCPReq)
	binary.NativeEndian.PutUint32(body[offsetTCPStates:], tcpStates)
	return body
}

// udpRequest is a struct inet_diag_req_v2 for connected UDP sockets of one family.
func udpRequest(family byte) []byte {
	body := make([]byte, sizeofDiagReq)
	body[0], body[1] = family, unix.IPPROTO_UDP
	binary.NativeEndian.PutUint32(body[4:], 1<<stateEstab)
	return body
}

func (c *diagConn) dump(kind uint16, body []byte, protocol byte, filter []byte) ([]diagSocket, error) {
	body = binary.NativeEndian.AppendUint16(body, uint16(4+len(filter))) // 48 at most
	body = binary.NativeEndian.AppendUint16(body, diagBytecode)
	body = append(body, filter...)
	if err := c.send(kind, unix.NLM_F_DUMP, body); err != nil {
		return nil, err
	}
	var out []diagSocket
	err := c.receive(func(msg []byte) {
		if s, ok := parseDiag(msg, protocol); ok {
			out = append(out, s)
		}
	})
	if errors.Is(err, unix.ENOENT) { // the kernel has no diag module for this family and protocol
		return nil, nil
	}
	return out, err
}

// destroy destroys one socket; done is false where it is already gone.
func (c *diagConn) destroy(s diagSocket) (done bool, err error) {
	body := make([]byte, sizeofDiagReq)
	body[0], body[1] = s.family, s.protocol
	copy(body[offsetReqSock:], s.id)
	if err := c.send(sockDestroy, unix.NLM_F_ACK, body); err != nil {
		return false, err
	}
	err = c.receive(func([]byte) {})
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT):
		return false, nil
	case errors.Is(err, unix.EOPNOTSUPP):
		return false, fmt.Errorf("this kernel cannot (CONFIG_INET_DIAG_DESTROY): %w", err)
	}
	return false, err
}

func (c *diagConn) send(kind, flags uint16, body []byte) error {
	c.seq++
	msg := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body))) // small
	msg = binary.NativeEndian.AppendUint16(msg, kind)
	msg = binary.NativeEndian.AppendUint16(msg, unix.NLM_F_REQUEST|flags)
	msg = binary.NativeEndian.AppendUint32(msg, c.seq)
	msg = binary.NativeEndian.AppendUint32(msg, 0)
	if err := unix.Sendto(c.fd, append(msg, body...), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return fmt.Errorf("asking sock_diag: %w", err)
	}
	return nil
}

// receive hands every answer to the last question to each and returns when the kernel says that it was the
// last, with its error if it gives one.
func (c *diagConn) receive(each func(msg []byte)) error {
	for {
		n, _, err := unix.Recvfrom(c.fd, c.buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading sock_diag: %w", err)
		}
		for rest := c.buf[:n]; len(rest) >= unix.NLMSG_HDRLEN; {
			size := int(binary.NativeEndian.Uint32(rest))
			if size < unix.NLMSG_HDRLEN || size > len(rest) {
				return errors.New("reading sock_diag: a message that does not fit")
			}
			kind, seq := binary.NativeEndian.Uint16(rest[4:]), binary.NativeEndian.Uint32(rest[8:])
			body := rest[unix.NLMSG_HDRLEN:size]
			rest = rest[min((size+3)&^3, len(rest)):]
			if seq != c.seq { // the answer to an earlier question that was given up
				continue
			}
			switch kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				return errnoOf(body)
			default:
				each(body)
			}
		}
	}
}

// errnoOf reads the negative errno that begins NLMSG_ERROR and NLMSG_DONE.
func errnoOf(body []byte) error {
	if len(body) < 4 {
		return nil
	}
	if n := int32(binary.NativeEndian.Uint32(body)); n < 0 { // two's complement on purpose
		return unix.Errno(-n)
	}
	return nil
}

func parseDiag(msg []byte, protocol byte) (diagSocket, bool) {
	if len(msg) < sizeofDiagMsg {
		return diagSocket{}, false
	}
	id := slices.Clone(msg[offsetMsgSock : offsetMsgSock+sizeofDiagSock])
	s := diagSocket{family: msg[0], protocol: protocol, id: id}
	if s.family == unix.AF_INET {
		s.dst, _ = netip.AddrFromSlice(id[offsetSockDst : offsetSockDst+4])
	} else {
		s.dst, _ = netip.AddrFromSlice(id[offsetSockDst : offsetSockDst+16])
		s.dst = s.dst.Unmap()
	}
	for attrs := msg[sizeofDiagMsg:]; len(attrs) >= 4; {
		size := int(binary.NativeEndian.Uint16(attrs))
		if size < 4 || size > len(attrs) {
			break
		}
		if binary.NativeEndian.Uint16(attrs[2:]) == diagMark && size >= 8 {
			s.mark, s.hasMark = binary.NativeEndian.Uint32(attrs[4:]), true
		}
		attrs = attrs[min((size+3)&^3, len(attrs)):]
	}
	return s, true
}
