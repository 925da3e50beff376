package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/bootclock"
	"tagout/internal/config"
	"tagout/sandboxd/events"
	"tagout/sandboxd/execlog"
	"tagout/sandboxd/kids"
)

// kernel lets package kids write the BPF maps.
type kernel struct {
	maps   *bpf.Maps
	lease  time.Duration                     // the first one of a session; killswitchd renews it
	opens  int                               // connections a second that the kernel lets one kid open
	forget atomic.Pointer[func(mark uint32)] // nil: nobody wants to know
}

// connectRate is twice what the proxy accepts: it says why it refuses the first few too many, and what goes beyond
// costs it nothing.
func connectRate(l config.KidLimits) int { return 2 * l.OpensPerSecond() }

// BeforeForgetting makes Withdraw call fn when nothing can use a session any more, and before its counters go.
func (k *kernel) BeforeForgetting(fn func(mark uint32)) { k.forget.Store(&fn) }

// Admit writes the session before anything that points to it. The link is known last, when its programs are
// there; until then they drop everything.
func (k *kernel) Admit(e kids.Entry) error {
	if err := k.maps.PutSession(e.Mark, bpf.SessionEntry{State: bpf.StateActive, Addr: e.Addr, OpensPerSecond: k.opens, HostNetwork: e.OnHost}); err != nil {
		return err
	}
	if err := k.maps.GrantLease(e.Mark, bootclock.Now()+k.lease); err != nil {
		return err
	}
	for _, port := range e.Ports {
		if err := k.maps.AllowPort(e.Mark, unix.IPPROTO_TCP, port); err != nil {
			return err
		}
	}
	for _, r := range e.Reach {
		if err := k.maps.AllowReach(e.Mark, r.To, r.Port); err != nil {
			return err
		}
	}
	if e.IfIndex != 0 { // a kid without a network has no link
		if err := k.maps.AttachLink(e.IfIndex); err != nil {
			return err
		}
	}
	return k.maps.PutKid(e.CgroupID, e.IfIndex, e.Mark)
}

// Withdraw forgets the kid before its session, so that nothing is ever judged by half of it.
func (k *kernel) Withdraw(e kids.Entry) error {
	if err := errors.Join(k.maps.DeleteKid(e.CgroupID, e.IfIndex), k.maps.ForgetPorts(e.Mark), k.maps.ForgetReach(e.Mark)); err != nil {
		return err
	}
	if fn := k.forget.Load(); fn != nil {
		(*fn)(e.Mark)
	}
	return k.maps.DeleteSession(e.Mark)
}

func (k *kernel) SetPorts(mark uint32, ports []uint16) error {
	return k.maps.SetPorts(mark, unix.IPPROTO_TCP, ports)
}

func (k *kernel) Stop(mark uint32) error { return k.maps.StopSession(mark) }

func (k *kernel) Stopped(mark uint32) (bool, error) {
	e, err := k.maps.Session(mark)
	if errors.Is(err, bpf.ErrNoSession) {
		return false, nil
	}
	return err == nil && e.State != bpf.StateActive, err
}

func (k *kernel) StoppedMarks() (map[uint32]bool, error) { return k.maps.StoppedMarks() }

// denials lets package events read the BPF ring buffer.
type denials struct{ maps *bpf.Maps }

func (d denials) Lost() (uint64, error) { return d.maps.LostInRing() }

func (d denials) Unsaid() (uint64, error) { return d.maps.Lost() }

func (d denials) Drain(ctx context.Context) error { return d.maps.Drain(ctx) }

func (d denials) Attempts() (events.Attempts, error) {
	a, err := d.maps.Attempts()
	return events.Attempts(a), err
}

func (d denials) Floods() ([]events.Flood, error) {
	floods, err := d.maps.TakeFloods()
	out := make([]events.Flood, len(floods))
	for i, f := range floods {
		out[i] = events.Flood{Count: f.Count, Denial: events.Denial{
			Mark: f.Mark, PID: f.PID, Comm: f.Comm, Hook: f.Hook.String(), Reason: f.Reason,
			Family: family(f.Family), Proto: f.Proto, Dst: f.Dst,
		}}
	}
	return out, err
}

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

// starts lets package execlog read which programs the kids start.
type starts struct{ maps *bpf.Maps }

func (s starts) Drain(ctx context.Context) error { return s.maps.DrainExecs(ctx) }

func (s starts) Told(mark uint32, n uint64) error { return s.maps.ToldExecs(mark, n) }

func (s starts) Forget(mark uint32) error { return s.maps.ForgetExecs(mark) }

func (s starts) Seen() error { return s.maps.SeesExecs() }

func (s starts) CountOf(mark uint32) (execlog.Count, error) {
	c, err := s.maps.ExecCount(mark)
	return execlog.Count(c), err
}

func (s starts) Counts() (map[uint32]execlog.Count, error) {
	counts, err := s.maps.ExecCounts()
	out := make(map[uint32]execlog.Count, len(counts))
	for mark, c := range counts {
		out[mark] = execlog.Count(c)
	}
	return out, err
}

func (s starts) Starts(ctx context.Context, fn func(execlog.Start)) error {
	return s.maps.Execs(ctx, func(e bpf.Exec) {
		fn(execlog.Start{
			Boot: e.Boot, Mark: e.Mark, PID: e.PID, Parent: e.Parent, UID: e.UID, Comm: e.Comm, File: e.File, Inode: e.Inode,
			Path: e.Path, Args: e.Args, ArgsLength: e.ArgsLength, Cut: e.Cut,
		})
	})
}
