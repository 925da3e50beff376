package bpf

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// Hook is where a denial happened.
type Hook uint8

// Hooks, numbered as in maps.h. The down and ingress hooks drop and count, and emit no events.
const (
	HookConnect4      = Hook(tagoutHookHOOK_CONNECT4)
	HookConnect6      = Hook(tagoutHookHOOK_CONNECT6)
	HookSendmsg4      = Hook(tagoutHookHOOK_SENDMSG4)
	HookSendmsg6      = Hook(tagoutHookHOOK_SENDMSG6)
	HookSocket        = Hook(tagoutHookHOOK_SOCKET)
	HookKidEgress     = Hook(tagoutHookHOOK_KID_EGRESS)
	HookKidIngress    = Hook(tagoutHookHOOK_KID_INGRESS)
	HookLinkUp        = Hook(tagoutHookHOOK_LINK_UP)
	HookLinkDown      = Hook(tagoutHookHOOK_LINK_DOWN)
	HookDaemonEgress  = Hook(tagoutHookHOOK_DAEMON_EGRESS)
	HookDaemonIngress = Hook(tagoutHookHOOK_DAEMON_INGRESS)
	HookBind4         = Hook(tagoutHookHOOK_BIND4)
	HookBind6         = Hook(tagoutHookHOOK_BIND6)
)

var hookNames = map[Hook]string{
	HookConnect4: "connect4", HookConnect6: "connect6", HookSendmsg4: "sendmsg4", HookSendmsg6: "sendmsg6",
	HookSocket: "socket", HookKidEgress: "kid-egress", HookKidIngress: "kid-ingress", HookLinkUp: "link-up",
	HookLinkDown: "link-down", HookDaemonEgress: "daemon-egress", HookDaemonIngress: "daemon-ingress",
	HookBind4: "bind4", HookBind6: "bind6",
}

// String returns the hook's name as it stands in records.
func (h Hook) String() string {
	if s, ok := hookNames[h]; ok {
		return s
	}
	return fmt.Sprintf("hook-%d", uint8(h))
}

// NoUID stands where the kernel could not say who called.
const NoUID = ^uint32(0)

// Event is one denial.
type Event struct {
	Boot     time.Duration // CLOCK_BOOTTIME
	Mark     uint32        // 0 where no session is known
	CgroupID uint64        // the kid's cgroup, for calls and packets of its sockets
	IfIndex  int           // the kid's link, for packets there
	PID      int           // in the host's pid namespace; 0 where unknown
	UID      uint32        // in the host's user namespace; NoUID where unknown
	Comm     string        // chosen by the process itself: display it, do not trust it
	Hook     Hook
	Reason   reason.Code
	Family   uint8          // AF_INET, AF_INET6, or what a socket was asked for; 0 for other frames
	Proto    uint8          // IP protocol; 255 for socket protocols above it
	Src, Dst netip.AddrPort // zero where there are none; a source port of 0 is not chosen yet
}

// Events calls fn for every denial, in order, until ctx ends, and then returns nil. One process at a time may
// read. fn runs on the reading goroutine: what it holds up fills the ring, and what the ring cannot take is
// counted in Lost.
func (m *Maps) Events(ctx context.Context, fn func(Event)) error {
	return m.read(ctx, tagoutMapEvents, &m.reader, func(sample []byte) error {
		ev, err := decode(sample)
		if err == nil {
			fn(ev)
		}
		return err
	})
}

func decode(sample []byte) (Event, error) {
	var raw tagoutEvent
	if len(sample) < binary.Size(&raw) {
		return Event{}, fmt.Errorf("event of %d bytes: %w", len(sample), ErrLayout)
	}
	if _, err := binary.Decode(sample, binary.NativeEndian, &raw); err != nil {
		return Event{}, err
	}
	return Event{
		Boot: time.Duration(raw.Boot), Mark: raw.Mark, CgroupID: raw.CgroupId, IfIndex: int(raw.Ifindex), // boot time
		PID: int(raw.Pid), UID: raw.Uid, Comm: comm(raw.Comm), Hook: Hook(raw.Hook), Reason: reason.Code(raw.Reason),
		Family: raw.Family, Proto: raw.Proto,
		Src: addrPort(raw.Family, raw.Src, raw.Sport), Dst: addrPort(raw.Family, raw.Dst, raw.Dport),
	}, nil
}

func addrPort(family uint8, words [4]uint32, port uint16) netip.AddrPort {
	var b [16]byte
	for i, w := range words {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	var a netip.Addr
	switch family {
	case unix.AF_INET:
		a = netip.AddrFrom4([4]byte(b[:4]))
	case unix.AF_INET6:
		a = netip.AddrFrom16(b)
	default:
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a, port)
}

func comm(raw [16]int8) string {
	b := make([]byte, len(raw))
	for i, c := range raw {
		b[i] = byte(c) // bytes either way
	}
	b, _, _ = bytes.Cut(b, []byte{0})
	return strings.ToValidUTF8(string(b), "\uFFFD")
}

// Process names the process that opened a kid's connection, or sent its query, from this address and port. It
// is the last one to have used them: ask while the connection is new. proto is 6 or 17.
func (m *Maps) Process(kid netip.AddrPort, proto uint8) (audit.Process, bool) {
	if !kid.Addr().Unmap().Is4() {
		return audit.Process{}, false
	}
	key := tagoutFlowKey{Addr: wire(kid.Addr().Unmap()), Port: kid.Port(), Proto: proto}
	var p tagoutProc
	if there, err := m.get(tagoutMapFlows, &key, &p); err != nil || !there || p.Pid == 0 {
		return audit.Process{}, false
	}
	return audit.Process{PID: int(p.Pid), Comm: comm(p.Comm)}, true
}
