// Package alert tells people about every denied attempt: it follows the audit logs of all daemons of an
// instance and sends the records whose outcome is deny to any number of receivers.
//
// It promises that the first attempt of a kid towards a destination for a reason leaves at once, that repeats
// follow as summaries whose counts are exact, and that each receiver gets each attempt at least once, in one of
// the two, also over a restart: the logs are the queue on disk, and a cursor says how far each receiver is. A
// receiver that is slow or down delays neither another receiver nor a decision. What it cannot take because its
// queue is full, or refuses for good, is dropped with a record that has the number. Receivers over UDP cannot
// say whether they got anything.
package alert

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/logtail"
)

const (
	pollEvery = 50 * time.Millisecond // how often the logs are looked at; alerts leave within 1 s
	saveEvery = 200 * time.Millisecond
)

// Metrics is what the follower reports to. It must not block.
type Metrics interface {
	AlertSent(sink string)                 // one alert, of one attempt or a summary, arrived
	AlertFailed(sink string)               // one try to send failed
	AlertsDropped(sink string, n uint64)   // n attempts will never be told to the sink
	AlertsWaiting(sink string, alerts int) // alerts in the sink's queue
	AuditGap(daemon string, n uint64)      // n records are missing from the daemon's log
}

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Kinds of sinks.
const (
	Webhook      = "webhook"
	Alertmanager = "alertmanager"
	Syslog       = "syslog"
)

// Sink is one receiver of alerts.
type Sink struct {
	Name       string // unique
	Kind       string
	URL        string        // http or https; for Syslog udp://host:port, tcp://host:port or unix:///path
	SecretFile string        // Webhook: file with the key that signs, read at every try; empty: not signed
	Window     time.Duration // how long repeats are counted before their number is sent
	Timeout    time.Duration // for one try
	Queue      int           // alerts that may wait
}

// Config is a follower's configuration. Every field but Sinks is needed.
type Config struct {
	Dir     string // inst.AuditDir(): a directory a daemon, one .jsonl file in each
	Sinks   []Sink // none: records stay in the logs
	Cursor  string // file that remembers how far each sink is
	Log     *slog.Logger
	Audit   Recorder
	Metrics Metrics
}

// Follower delivers alerts. Run it once.
type Follower struct {
	cfg    Config
	lanes  []*lane
	tail   *logtail.Tail
	fresh  map[string]int64 // log -> gaps before it were counted by a predecessor
	saved  []byte           // what the cursor file holds, where this follower wrote it
	broken map[string]bool  // logs whose trouble was told
}

// New returns a follower that goes on where the cursor file says the last one stopped. A sink that cannot work
// as it is configured, such as one whose secret cannot be read, is an error.
func New(cfg Config) (*Follower, error) {
	f := &Follower{cfg: cfg, fresh: map[string]int64{}, broken: map[string]bool{}}
	saved, err := loadCursor(cfg.Cursor)
	if err != nil {
		cfg.Log.Error("reading the alert cursor; all alerts are sent again", "error", err)
	}
	f.tail = logtail.New(cfg.Dir, saved.Read, denied, gap)
	for _, s := range cfg.Sinks {
		send, err := newSender(s)
		if err != nil {
			return nil, fmt.Errorf("preparing alerts to %s: %w", s.Name, err)
		}
		f.lanes = append(f.lanes, newLane(s, send, cfg, saved.start(s.Name)))
	}
	for log, m := range saved.Read { // reading begins where the slowest sink is
		f.fresh[log] = m.Pos
		for _, l := range f.lanes {
			m.Pos = min(m.Pos, l.start[log])
		}
		f.tail.Marks[log] = m
	}
	return f, nil
}

func newSender(s Sink) (sender, error) {
	switch s.Kind {
	case Webhook:
		return newWebhook(s)
	case Alertmanager:
		return newAlertmanager(s)
	case Syslog:
		return newSyslog(s)
	}
	return nil, errors.New("this build does not know its kind")
}

// Run delivers until ctx ends. It returns nil then.
func (f *Follower) Run(ctx context.Context) error {
	if len(f.lanes) == 0 { // the logs are followed all the same: a sink that is added later is not told of the past
		f.cfg.Log.Warn("no receiver of alerts is configured: denied attempts are only logged")
	}
	var wg sync.WaitGroup
	for _, l := range f.lanes {
		wg.Go(func() { l.run(ctx) })
	}
	err := f.follow(ctx)
	wg.Wait()
	f.save()
	return err
}

func (f *Follower) follow(ctx context.Context) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	var saved time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		f.poll(ctx)
		now := time.Now()
		for _, l := range f.lanes {
			l.tick(now)
		}
		if now.Sub(saved) >= saveEvery {
			f.save()
			saved = now
		}
	}
}

// take hands one denied attempt to every sink, and counts gaps.
func (f *Follower) take(r *audit.Record, at place) {
	if r.Event == audit.EventGap {
		if at.off >= f.fresh[at.log] {
			f.cfg.Metrics.AuditGap(r.Daemon, max(r.Count, 1))
		}
		return
	}
	now := time.Now()
	for _, l := range f.lanes {
		l.add(r, at, now)
	}
}

// moved tells every sink that a log was replaced or cut.
func (f *Follower) moved(log string, size int64, replaced bool) {
	f.fresh[log] = min(f.fresh[log], size)
	for _, l := range f.lanes {
		l.moved(log, size, replaced)
	}
}

// save writes down how far each sink is, and before that what it dropped.
func (f *Follower) save() {
	c := cursor{Version: cursorVersion, Read: f.tail.Marks, Sinks: map[string]map[string]int64{}}
	for _, l := range f.lanes {
		l.recordDrops(f.cfg.Audit)
		c.Sinks[l.sink.Name] = l.cursor(f.tail.Marks)
	}
	raw, err := json.Marshal(c)
	if err == nil && bytes.Equal(raw, f.saved) {
		return
	}
	if err == nil {
		err = replace(f.cfg.Cursor, raw)
	}
	if err != nil {
		f.cfg.Log.Error("saving the alert cursor; after a restart alerts are sent again", "error", err)
		return
	}
	f.saved = raw
}
