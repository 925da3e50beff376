package alert

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/logtail"
)

const (
	keysPerKid = 256  // alerts of a kid that are told apart; further destinations are counted together, by reason
	keysInAll  = 4096 // of all kids; beyond it kids are counted together
	retryFirst = 250 * time.Millisecond
	retryMost  = 5 * time.Second
	lastTry    = 2 * time.Second // for what is being sent when the daemon ends
)

// errRefused means that the receiver will never take this alert.
var errRefused = errors.New("refused for good")

// sender sends one alert to a receiver. Only the lane's goroutine uses it.
type sender interface {
	send(ctx context.Context, a *alert) error // nil: it arrived, as far as the receiver can say
	close()
}

// window counts the repeats of an alert that was sent.
type window struct {
	ends    time.Time
	repeats *alert // nil: none yet
}

// lane is everything about one sink: what it was sent, what waits, what is under way.
type lane struct {
	sink    Sink
	sender  sender
	log     *slog.Logger
	metrics Metrics
	start   map[string]int64 // log -> records before it are not for this sink; the follower's goroutine only
	wake    chan struct{}

	mu      sync.Mutex
	windows map[key]*window // guarded by mu
	kids    map[string]int  // kid -> windows; guarded by mu
	queue   []*alert        // guarded by mu
	turns   map[string]int  // kid -> when it was served last, while there is a queue; guarded by mu
	turn    int             // guarded by mu
	queued  map[key]*alert  // those of queue; guarded by mu
	flight  *alert          // being sent; guarded by mu, its content is fixed
	dropped uint64          // attempts that are in no record yet; guarded by mu
}

func newLane(s Sink, send sender, cfg Config, start map[string]int64) *lane {
	cfg.Metrics.AlertsDropped(s.Name, 0) // so that the numbers are there before they grow
	cfg.Metrics.AlertsWaiting(s.Name, 0)
	return &lane{
		sink: s, sender: send, log: cfg.Log.With("sink", s.Name), metrics: cfg.Metrics, start: start, wake: make(chan struct{}, 1),
		windows: map[key]*window{}, kids: map[string]int{}, queued: map[key]*alert{}, turns: map[string]int{},
	}
}

// add takes one denied attempt. It never waits for the receiver.
func (l *lane) add(r *audit.Record, at place, now time.Time) {
	if at.off < l.start[at.log] {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	k := l.key(r)
	w := l.windows[k]
	switch {
	case w == nil:
		l.windows[k] = &window{ends: now.Add(l.sink.Window)}
		l.kids[k.kid]++
		l.push(newAlert(k, r, at, false))
	case w.repeats == nil:
		w.repeats = newAlert(k, r, at, true)
	default:
		w.repeats.add(r, at)
	}
}

// key returns what the record is deduplicated by. It is called with mu held.
func (l *lane) key(r *audit.Record) key {
	k := key{r.Kid, destination(r), r.Reason}
	if l.windows[k] != nil {
		return k
	}
	if l.kids[k.kid] >= keysPerKid {
		k.destination = others
	}
	if l.windows[k] == nil && len(l.windows) >= keysInAll {
		k.kid, k.destination = others, others
	}
	return k
}

// tick sends the summaries of the windows that ended.
func (l *lane) tick(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for k, w := range l.windows {
		if now.Before(w.ends) {
			continue
		}
		if w.repeats == nil {
			delete(l.windows, k)
			if l.kids[k.kid]--; l.kids[k.kid] == 0 {
				delete(l.kids, k.kid)
			}
			continue
		}
		l.push(w.repeats)
		w.repeats, w.ends = nil, now.Add(l.sink.Window)
	}
}

// push queues a, or folds it into an alert with its key that still waits. It is called with mu held.
func (l *lane) push(a *alert) {
	if waiting := l.queued[a.key]; waiting != nil {
		waiting.merge(a)
		return
	}
	if len(l.queue) >= l.sink.Queue && !l.makeRoom(a.key.kid) {
		l.drop(a)
		return
	}
	l.queue = append(l.queue, a)
	l.queued[a.key] = a
	l.tellWaiting()
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// tellWaiting counts what is being sent, too. It is called with mu held.
func (l *lane) tellWaiting() {
	n := len(l.queue)
	if l.flight != nil {
		n++
	}
	l.metrics.AlertsWaiting(l.sink.Name, n)
}

// drop is called with mu held.
func (l *lane) drop(a *alert) {
	l.dropped += a.count
	l.metrics.AlertsDropped(l.sink.Name, a.count)
}

// recordDrops writes what was dropped since the last call into the audit log.
func (l *lane) recordDrops(rec Recorder) {
	l.mu.Lock()
	n := l.dropped
	l.dropped = 0
	l.mu.Unlock()
	if n > 0 {
		rec.Log(audit.Record{Event: audit.EventAlertDropped, Outcome: audit.OutcomeFail, Count: n, Fields: map[string]string{"sink": l.sink.Name},
			Detail: "denied attempts that this receiver will not be told of: its queue was full, or it refused them for good"})
	}
}

// cursor returns, for each log, the place before which this sink is done with everything.
func (l *lane) cursor(read map[string]logtail.Mark) map[string]int64 {
	out := map[string]int64{}
	for log, m := range read {
		out[log] = max(m.Pos, l.start[log])
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.windows {
		hold(out, w.repeats)
	}
	for _, a := range l.queue {
		hold(out, a)
	}
	hold(out, l.flight)
	return out
}

func hold(cursor map[string]int64, a *alert) {
	if a == nil {
		return
	}
	for log, off := range a.from {
		cursor[log] = min(cursor[log], off)
	}
}

// moved notes that a log was cut to size, or replaced by another.
func (l *lane) moved(log string, size int64, replaced bool) {
	l.start[log] = min(l.start[log], size)
	if !replaced {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, w := range l.windows {
		if w.repeats != nil {
			delete(w.repeats.from, log)
		}
	}
	for _, a := range append([]*alert{l.flight}, l.queue...) {
		if a != nil {
			delete(a.from, log)
		}
	}
}

// run sends what is queued until ctx ends. What is left then stays before the cursor.
func (l *lane) run(ctx context.Context) {
	defer l.sender.close()
	wait, failing := retryFirst, false
	for {
		a := l.next(ctx)
		if a == nil {
			return
		}
		err := l.try(ctx, a)
		switch {
		case err == nil || errors.Is(err, errRefused):
			l.done(a, err)
			if failing && err == nil {
				l.log.Info("alerts arrive again")
			}
			wait, failing = retryFirst, false
		default:
			l.metrics.AlertFailed(l.sink.Name)
			if !failing {
				l.log.Error("sending an alert; trying again until it arrives", "error", err)
			}
			failing = true
			pause(ctx, wait)
			wait = min(2*wait, retryMost)
		}
	}
}

// next returns the alert that is to be sent, waiting for one; nil when ctx ended.
func (l *lane) next(ctx context.Context) *alert {
	for ctx.Err() == nil {
		if a := l.pop(); a != nil {
			return a
		}
		select {
		case <-ctx.Done():
		case <-l.wake:
		}
	}
	return nil
}

// pop serves the kids in turn, so that one that tries hundreds of destinations does not hold up another's alert.
func (l *lane) pop() *alert {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.flight != nil {
		return l.flight
	}
	if len(l.queue) == 0 {
		clear(l.turns)
		return nil
	}
	next := 0
	for i, a := range l.queue {
		if l.turns[a.key.kid] < l.turns[l.queue[next].key.kid] {
			next = i
		}
	}
	l.turn++
	l.flight = l.take(next)
	l.turns[l.flight.key.kid] = l.turn
	return l.flight
}

// take removes an alert from the queue. It is called with mu held.
func (l *lane) take(i int) *alert {
	a := l.queue[i]
	l.queue = slices.Delete(l.queue, i, i+1)
	delete(l.queued, a.key)
	return a
}

// makeRoom drops the last alert of the kid that has the most in the queue, where it has more than the one that room is
// made for. It is called with mu held.
func (l *lane) makeRoom(kid string) bool {
	waiting, most := map[string]int{}, kid
	for _, a := range l.queue {
		if waiting[a.key.kid]++; waiting[a.key.kid] > waiting[most] {
			most = a.key.kid
		}
	}
	if waiting[most] <= waiting[kid]+1 {
		return false
	}
	for i, a := range slices.Backward(l.queue) {
		if a.key.kid == most {
			l.drop(l.take(i))
			break
		}
	}
	return true
}

// try sends a once. A try that has begun is let finish when ctx ends, for a short while: cut short, the alert
// would often be sent twice.
func (l *lane) try(ctx context.Context, a *alert) error {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.sink.Timeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastTry, cancel) })()
	return l.sender.send(limited, a)
}

func (l *lane) done(a *alert, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flight = nil
	l.tellWaiting()
	if err != nil {
		l.log.Error("giving an alert up", "error", err, "event", a.record.ID)
		l.drop(a)
		return
	}
	l.metrics.AlertSent(l.sink.Name)
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// describe says what happened in one line of ASCII, for people.
func (a *alert) describe() string {
	who := "somebody"
	if a.key.kid != "" {
		who = "kid " + a.key.kid
	}
	if p := a.record.Process; p != nil {
		who += fmt.Sprintf(" (%+q, pid %d)", p.Comm, p.PID)
	}
	times := ""
	if a.count != 1 {
		times = fmt.Sprintf(", %d times", a.count)
	}
	return fmt.Sprintf("%s was denied %+q: %s%s", who, a.key.destination, a.key.reason.Info().Text, times)
}
