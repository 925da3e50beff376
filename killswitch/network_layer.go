package killswitch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"sync"
	"time"

	"tagout/internal/wire"
)

// fireNetwork drops the packets of every target from one map write on, destroys their sockets and then
// proves from the kernel's counters that nothing passes any more.
func (s *Switch) fireNetwork(r *run, found *future) {
	ctx, cancel := context.WithDeadline(context.Background(), r.from.Add(s.t.Network))
	defer cancel()
	if r.scope.All {
		err := s.cfg.Network.StopAll(true) // the first action of the layer: one write
		r.emitCut("", pointGlobal, err)
	}
	ts := found.get()
	cuts := make([]cut, 0, len(ts))
	for _, t := range ts {
		// For a stop of everything each session is stopped as well: taking the tag, and with it the global
		// flag, off must not re-activate a session that lives.
		cuts = append(cuts, s.cutSession(r, t))
	}
	var wg sync.WaitGroup
	wg.Go(func() { s.destroySockets(ctx, r, ts) })
	if r.scope.All {
		wg.Go(func() { s.seeFlag(ctx, r) })
	} else if len(ts) == 0 {
		r.emit("", wire.LayerNetwork, pointSession, wire.StateObserved, "no kid in scope")
	}
	for _, c := range cuts {
		wg.Go(func() { s.seeSilent(ctx, r, c) })
	}
	wg.Wait()
}

const unbornText = "it has no session, and the tag lets none begin"

// cut is one session whose packets are dropped since at (CLOCK_BOOTTIME, read after the write).
type cut struct {
	t     target
	at    time.Duration
	blind bool // its mark is not known
}

func (s *Switch) cutSession(r *run, t target) cut {
	if t.unborn {
		r.emit(t.kid, wire.LayerNetwork, pointSession, wire.StateObserved, unbornText)
		return cut{t: t, blind: true}
	}
	if t.mark == 0 {
		state, then := wire.StateFailed, "stop everything to cut it"
		if r.scope.All {
			state, then = wire.StatePartial, "the flag that stops everything cuts it, but its packets cannot be counted"
		}
		r.emit(t.kid, wire.LayerNetwork, pointSession, state, fmt.Sprintf("its mark is not known (%v): %s", t.problem, then))
		return cut{t: t, blind: true}
	}
	err := s.cfg.Network.StopSession(t.mark)
	c := cut{t: t, at: bootTime()}
	r.emitCut(t.kid, pointSession, err)
	return c
}

func (r *run) emitCut(kid, point string, err error) {
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.emit(kid, wire.LayerNetwork, point, wire.StateFailed, err.Error())
		return
	}
	r.emit(kid, wire.LayerNetwork, point, wire.StateFired, "")
}

// destroySockets ends the sockets at both sides of the proxy: the kernel would otherwise keep what they have
// queued, and their memory, for minutes.
func (s *Switch) destroySockets(ctx context.Context, r *run, ts []target) {
	var marks []uint32
	var addrs []netip.Addr
	for _, t := range ts {
		if t.mark != 0 {
			marks = append(marks, t.mark)
		}
		if t.addr.IsValid() {
			addrs = append(addrs, t.addr)
		}
	}
	if len(marks)+len(addrs) == 0 {
		return
	}
	n, err := s.cfg.Sockets.Destroy(ctx, marks, addrs)
	if err != nil {
		r.emit(r.single, wire.LayerNetwork, pointSockets, wire.StatePartial, fmt.Sprintf("%d sockets destroyed, then: %v", n, err))
		return
	}
	r.emit(r.single, wire.LayerNetwork, pointSockets, wire.StateObserved, fmt.Sprintf("%d sockets destroyed", n))
}

// seeFlag reads back that the global flag is set, and sets it again until it is.
func (s *Switch) seeFlag(ctx context.Context, r *run) {
	for {
		on, err := s.cfg.Network.AllStopped()
		switch {
		case on && err == nil:
			r.emit("", wire.LayerNetwork, pointGlobal, wire.StateObserved, "")
			return
		case ctx.Err() != nil:
			r.emit("", wire.LayerNetwork, pointGlobal, wire.StateFailed, lackText("the flag that stops everything is not set in the kernel", err))
			return
		}
		pause(ctx, s.t.Sample)
		if err := s.cfg.Network.StopAll(true); err == nil {
			r.emit("", wire.LayerNetwork, pointGlobal, wire.StateFired, "at a further attempt")
		}
	}
}

// seeSilent proves that a session's packets no longer pass: the kernel holds the stop, and over two looks at
// its counters nothing has passed since the cut. A packet that was already past the check when the map was
// written may carry a later time; then the map is written again and the proof starts anew from there.
func (s *Switch) seeSilent(ctx context.Context, r *run, c cut) {
	if c.blind {
		return
	}
	first, why := c.at, error(nil)
	for {
		why = s.lookSilent(ctx, c)
		if errors.Is(why, fs.ErrNotExist) {
			r.emit(c.t.kid, wire.LayerNetwork, pointSession, wire.StateObserved, "the kernel knows no such session and passes nothing of it")
			return
		}
		if why == nil {
			detail := ""
			if c.at != first {
				detail = fmt.Sprintf("silent only from a further write %v after the first", (c.at - first).Round(time.Microsecond))
			}
			r.emit(c.t.kid, wire.LayerNetwork, pointSession, wire.StateObserved, detail)
			return
		}
		if ctx.Err() != nil {
			break
		}
		if err := s.cfg.Network.StopSession(c.t.mark); err == nil {
			c.at = bootTime()
		}
		pause(ctx, s.t.Sample)
	}
	state := wire.StatePartial
	if on, err := s.cfg.Network.Stopped(c.t.mark); err != nil || !on {
		state = wire.StateFailed
	}
	r.emit(c.t.kid, wire.LayerNetwork, pointSession, state, why.Error())
}

// lookSilent takes two looks at a session's counters, a sample time apart; nil means silent.
func (s *Switch) lookSilent(ctx context.Context, c cut) error {
	on, err := s.cfg.Network.Stopped(c.t.mark)
	if err != nil {
		return fmt.Errorf("reading whether the session is stopped: %w", err)
	}
	if !on {
		return errors.New("the session is not stopped in the kernel")
	}
	before, err := s.cfg.Network.Counters(c.t.mark)
	if err != nil {
		return fmt.Errorf("reading the packet counters: %w", err)
	}
	pause(ctx, s.t.Sample)
	after, err := s.cfg.Network.Counters(c.t.mark)
	if err != nil {
		return fmt.Errorf("reading the packet counters: %w", err)
	}
	if n := after.Packets - before.Packets; n > 0 {
		return fmt.Errorf("%d packets passed within %v after the cut", n, s.t.Sample)
	}
	if after.LastPass > c.at {
		return fmt.Errorf("a packet passed %v after the cut", after.LastPass-c.at)
	}
	return nil
}

// lackText puts an error behind what is missing, where there is one.
func lackText(what string, err error) string {
	if err == nil {
		return what
	}
	return fmt.Sprintf("%s: %v", what, err)
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
