package proxy

import (
	"context"
	"errors"
	"net/netip"
	"time"
)

// dialStagger is how long an address may be silent before the next one is tried beside it (RFC 8305, 5: the Connection
// Attempt Delay).
const dialStagger = 250 * time.Millisecond

// attempt is what came of dialling one address.
type attempt struct {
	s    *sock
	addr netip.Addr
	err  error
}

// race dials addrs, of which there is at least one, each dialStagger after the one before it or when that has failed,
// and returns the first socket that connects. dial ends when its ctx does. Of several errors all are returned.
func race(ctx context.Context, addrs []netip.Addr, dial func(context.Context, netip.Addr) (*sock, error)) (*sock, netip.Addr, error) {
	if len(addrs) == 1 { // nothing to race with, and no goroutine to pay for
		s, err := dial(ctx, addrs[0])
		return s, addrs[0], err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan attempt, len(addrs)) // nobody who loses waits for a reader
	open, next := 0, 0
	start := func() {
		a := addrs[next]
		open, next = open+1, next+1
		go func() {
			s, err := dial(ctx, a)
			done <- attempt{s, a, err}
		}()
	}
	defer func() {
		cancel()
		go closeLosers(done, open)
	}()
	stagger := time.NewTicker(dialStagger)
	defer stagger.Stop()
	var errs []error
	for start(); ; {
		select {
		case got := <-done:
			open--
			if got.err == nil {
				return got.s, got.addr, nil
			}
			if errs = append(errs, got.err); ctx.Err() != nil || open == 0 && next == len(addrs) {
				return nil, netip.Addr{}, errors.Join(errs...)
			}
		case <-stagger.C:
		}
		if next < len(addrs) {
			start()
			stagger.Reset(dialStagger)
		}
	}
}

// closeLosers closes what the last open attempts still connect.
func closeLosers(done <-chan attempt, open int) {
	for range open {
		if late := <-done; late.s != nil {
			reset(late.s)
		}
	}
}
