package proxy

import (
	"net/netip"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// floodWindow is the time of which one record tells at most, for one sender and one reason.
const floodWindow = 500 * time.Millisecond

// floods sums up the connections that were refused before they were served: the first of a sender is recorded
// at once, those of the following windows by number. Nothing is lost, and the log is not what a kid that opens
// thousands of connections a second fills. The zero value is ready.
type floods struct {
	mu      sync.Mutex
	windows map[floodKey]*flood // guarded by mu; as many as there are senders, times the few reasons
}

type floodKey struct {
	from netip.Addr
	via  string
	code reason.Code
}

type flood struct {
	first *conn
	count uint64      // guarded by floods.mu: since the last record
	timer *time.Timer // guarded by floods.mu
}

// add records that c was refused, now or with others.
func (f *floods) add(c *conn, code reason.Code) {
	key := floodKey{c.kid.Addr(), c.via, code}
	f.mu.Lock()
	if w := f.windows[key]; w != nil {
		w.count++
		f.mu.Unlock()
		c.p.cfg.Metrics.Connection(c.via, audit.OutcomeDeny, code)
		return
	}
	if f.windows == nil {
		f.windows = map[floodKey]*flood{}
	}
	w := &flood{first: c}
	w.timer = time.AfterFunc(floodWindow, func() { f.tell(key) })
	f.windows[key] = w
	f.mu.Unlock()
	c.recordRefused(refusal{code: code})
}

// tell writes what has come together in a window and opens the next one, or closes it where nothing has.
func (f *floods) tell(key floodKey) {
	f.mu.Lock()
	w := f.windows[key]
	if w == nil {
		f.mu.Unlock()
		return
	}
	n := w.count
	w.count = 0
	if n == 0 {
		delete(f.windows, key)
	} else {
		w.timer.Reset(floodWindow)
	}
	f.mu.Unlock()
	if n == 0 {
		return
	}
	r := w.first.record(audit.EventConnOpened, audit.OutcomeDeny, key.code, "more of the same")
	r.Conn, r.Process, r.Count = "", nil, n
	r.Fields["from"] = key.from.String()
	w.first.p.cfg.Audit.Log(r)
}

// tellAll writes what has come together so far.
func (f *floods) tellAll() {
	f.mu.Lock()
	keys := make([]floodKey, 0, len(f.windows))
	for key, w := range f.windows {
		w.timer.Stop()
		keys = append(keys, key)
	}
	f.mu.Unlock()
	for _, key := range keys {
		f.tell(key)
	}
}
