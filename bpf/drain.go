package bpf

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf/ringbuf"
)

// ErrNoReader means that nobody reads the events, or no longer.
var ErrNoReader = errors.New("nobody reads the BPF events")

// reader lets others wait until the goroutine in Events has handed over what is in the ring.
type reader struct {
	mu   sync.Mutex
	ring *ringbuf.Reader // nil while nobody reads; guarded by mu
	// A flush that was asked for before a waiter came may end after it came, and say nothing about the events
	// in between. So each waiter sees two ends: the flush that led to the second began after it came.
	fresh, ripe []chan error // guarded by mu; each channel takes one value
}

func (r *reader) begin(ring *ringbuf.Reader) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ring = ring
}

func (r *reader) end() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range append(r.fresh, r.ripe...) {
		w <- ErrNoReader
	}
	r.ring, r.fresh, r.ripe = nil, nil, nil
}

// flushed notes that everything that was in the ring when the last flush began was handed over.
func (r *reader) flushed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.ripe {
		w <- nil
	}
	r.ripe, r.fresh = r.fresh, nil
	if len(r.ripe) > 0 {
		r.flush()
	}
}

// flush wakes the reading goroutine. Where that fails the ring is closed and end follows.
func (r *reader) flush() { _ = r.ring.Flush() }

// Drain returns nil when every event that was in the ring before the call has been handed to the fn of Events.
// It fails with ErrNoReader where no Events runs, and with ctx's error.
func (m *Maps) Drain(ctx context.Context) error { return m.reader.drain(ctx) }

func (r *reader) drain(ctx context.Context) error {
	done := make(chan error, 1)
	r.mu.Lock()
	if r.ring == nil {
		r.mu.Unlock()
		return fmt.Errorf("waiting for BPF events to be read: %w", ErrNoReader)
	}
	r.fresh = append(r.fresh, done)
	r.flush()
	r.mu.Unlock()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("waiting for BPF events to be read: %w", ctx.Err())
	}
}
