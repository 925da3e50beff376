package proxy

import (
	"context"
	"runtime"
	"sync/atomic"
	"time"
)

// Secrets live in requests. When a request is over nothing refers to its secrets any more but the buffers of the
// connection that carried them, which is closed when it has been idle for secretIdle; and what nothing refers to is
// overwritten by the garbage collector, where the process runs with GODEBUG=clobberfree=1. forget makes sure that the
// collector comes by: soon after the last secret, and now and then while there are always some.
const (
	secretIdle  = 3 * time.Second
	forgetAfter = secretIdle + time.Second
	forgetWhile = 30 * time.Second
	forgetLook  = 500 * time.Millisecond
)

// memory knows when secrets were used last.
type memory struct {
	used atomic.Int64 // UnixNano of the end of the last request with a secret; 0: none since the last sweep
}

// secretUsed notes that a request with a secret is over.
func (m *memory) secretUsed() { m.used.Store(time.Now().UnixNano()) }

// forget runs until ctx ends.
func (p *Proxy) forget(ctx context.Context) {
	tick := time.NewTicker(forgetLook)
	defer tick.Stop()
	swept := time.Now()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		used := p.memory.used.Load()
		switch {
		case used == 0:
		case time.Since(time.Unix(0, used)) >= forgetAfter && p.memory.used.CompareAndSwap(used, 0), time.Since(swept) >= forgetWhile:
			// What a sync.Pool keeps survives one collection.
			runtime.GC()
			runtime.GC()
			swept = time.Now()
		}
	}
}

// forget lets go of the secrets that the exchange knew.
func (x *exchange) forget() {
	if len(x.swapped) == 0 {
		return
	}
	x.swapped = nil
	x.c.p.memory.secretUsed()
}
