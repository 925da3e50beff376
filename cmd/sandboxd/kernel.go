package main

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/sandboxd/events"
	"tagout/sandboxd/kids"
)

// kernel lets package kids write the BPF maps.
type kernel struct{ maps *bpf.Maps }

// Admit writes the session before anything that points to it. The link is known last, when its programs are
// there; until then they drop everything.
func (k kernel) Admit(e kids.Entry) error {
	if err := k.maps.PutSession(e.Mark, bpf.SessionEntry{State: bpf.StateActive, Addr: e.Addr}); err != nil {
		return err
	}
	for _, port := range e.Ports {
		if err := k.maps.AllowPort(e.Mark, unix.IPPROTO_TCP, port); err != nil {
			return err
		}
	}
	if err := k.maps.AttachLink(e.IfIndex); err != nil {
		return err
	}
	return k.maps.PutKid(e.CgroupID, e.IfIndex, e.Mark)
}

// Withdraw forgets the kid before its session, so that nothing is ever judged by half of it.
func (k kernel) Withdraw(e kids.Entry) error {
	return errors.Join(k.maps.DeleteKid(e.CgroupID, e.IfIndex), k.maps.ForgetPorts(e.Mark), k.maps.DeleteSession(e.Mark))
}

func (k kernel) Stopped(mark uint32) (bool, error) {
	e, err := k.maps.Session(mark)
	if errors.Is(err, bpf.ErrNoSession) {
		return false, nil
	}
	return err == nil && e.State != bpf.StateActive, err
}

// denials lets package events read the BPF ring buffer.
type denials struct{ maps *bpf.Maps }

func (d denials) Lost() (uint64, error) { return d.maps.Lost() }

func (d denials) Denials(ctx context.Context, fn func(events.Denial)) error {
	return d.maps.Events(ctx, func(e bpf.Event) {
		fn(events.Denial{
			Mark: e.Mark, PID: e.PID, Comm: e.Comm, Hook: e.Hook.String(), Reason: e.Reason,
			Family: family(e.Family), Proto: e.Proto, Src: e.Src, Dst: e.Dst,
		})
	})
}

// family names an address family (socket(2)).
func family(n uint8) string {
	switch n {
	case 0:
		return ""
	case unix.AF_INET:
		return "ipv4"
	case unix.AF_INET6:
		return "ipv6"
	}
	return fmt.Sprintf("af-%d", n)
}
