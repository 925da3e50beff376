package killswitch

import (
	"context"
	"sync/atomic"
	"time"

	"tagout/internal/audit"
)

// courierLen is how many records may wait for the recorder.
const courierLen = 4096

// courier hands records to a Recorder from a goroutine of its own, so that a Recorder that hangs, against
// its promise, holds no stop up. What does not fit is counted and the count recorded once it moves again.
type courier struct {
	queue   chan parcel
	lost    atomic.Uint64
	at      atomic.Pointer[time.Time] // since when a record is being handed over; nil: none is
	metrics Metrics
}

// parcel is a record, or a question whether everything before it was delivered.
type parcel struct {
	rec  audit.Record
	done chan struct{}
}

func newCourier(to Recorder, m Metrics) *courier {
	c := &courier{queue: make(chan parcel, courierLen), metrics: m}
	go func() {
		for p := range c.queue {
			if p.done != nil {
				close(p.done)
				continue
			}
			now := time.Now()
			c.at.Store(&now)
			if n := c.lost.Swap(0); n > 0 {
				to.Log(audit.Record{Event: audit.EventGap, Count: n, Detail: "records of stops were lost while the audit log hung"})
			}
			to.Log(p.rec)
			c.at.Store(nil)
		}
	}()
	return c
}

// stuck is for how long the recorder has been at one record, 0 where it is at none.
func (c *courier) stuck() time.Duration {
	if at := c.at.Load(); at != nil {
		return time.Since(*at)
	}
	return 0
}

func (c *courier) send(r audit.Record) {
	select {
	case c.queue <- parcel{rec: r}:
	default:
		c.lost.Add(1)
		c.metrics.RecordsLost(1)
	}
}

// flush returns when everything sent so far was delivered, or when ctx ends.
func (c *courier) flush(ctx context.Context) {
	done := make(chan struct{})
	select {
	case c.queue <- parcel{done: done}:
	case <-ctx.Done():
		return
	}
	select {
	case <-done:
	case <-ctx.Done():
	}
}
