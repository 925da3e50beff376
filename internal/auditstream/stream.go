// Package auditstream sends audit records, as they are written, to other systems: OTLP logs, syslog (RFC 5424), webhooks.
//
// Each sink follows the logs on its own, with a queue, a deadline and a count of what it lost, so that one which hangs
// slows nothing, neither another sink nor a daemon. The logs are the queue on disk: over a restart a sink goes on where
// it was, and gets each record at least once. A sink that is slow is waited for; one that has taken nothing for Patience
// loses what does not fit into its queue, and a record says how many. A sink that is new is not told of the past.
package auditstream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"tagout/internal/alert"
	"tagout/internal/atomicfile"
	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/logtail"
)

// Kinds of sinks.
const (
	OTLP    = "otlp"
	Syslog  = "syslog"
	Webhook = "webhook"
)

// Sink is one receiver of records.
type Sink struct {
	Name       string // unique
	Kind       string
	URL        string        // http or https; for Syslog udp://host:port, tcp://host:port or unix:///path
	SecretFile string        // Webhook: signs; OTLP: holds the value of the Authorization header; empty: neither
	Timeout    time.Duration // for one try
	Patience   time.Duration // how long a sink may take nothing before it loses records
	Queue      int           // records that may wait in memory
}

// Metrics is what streams report to. It must not block.
type Metrics interface {
	StreamSent(sink string, n int)       // n records arrived
	StreamFailed(sink string)            // one try failed
	StreamDropped(sink string, n uint64) // n records will never arrive
	StreamWaiting(sink string, n int)    // records in the queue
}

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Config is what streams work with. All fields but Sinks are needed.
type Config struct {
	Dir     string // inst.AuditDir()
	State   string // directory that remembers how far each sink is
	Sinks   []Sink
	Version string // Tagout's
	Log     *slog.Logger
	Audit   Recorder
	Metrics Metrics
}

const (
	pollEvery  = 100 * time.Millisecond
	saveEvery  = time.Second
	tellEvery  = 10 * time.Second // between two records about what one sink lost
	batchMost  = 512              // records
	batchBytes = 1 << 20
	retryFirst = 250 * time.Millisecond
	retryMost  = 5 * time.Second
	lastTry    = 2 * time.Second
)

// Streams sends records. Run it once.
type Streams struct{ all []*stream }

// New prepares the sinks. One that cannot work as it is configured is an error.
func New(cfg Config) (*Streams, error) {
	s := &Streams{}
	for _, sink := range cfg.Sinks {
		send, err := newSender(sink, cfg.Version)
		if err != nil {
			return nil, fmt.Errorf("preparing the stream of records to %s: %w", sink.Name, err)
		}
		st := &stream{sink: sink, cfg: cfg, send: send, log: cfg.Log.With("sink", sink.Name), queue: make(chan item, sink.Queue), file: filepath.Join(cfg.State, "stream-"+sink.Name+".json")}
		cfg.Metrics.StreamDropped(sink.Name, 0) // so that the numbers are there before they grow
		cfg.Metrics.StreamWaiting(sink.Name, 0)
		s.all = append(s.all, st)
	}
	return s, nil
}

// Run sends until ctx ends. It returns nil then.
func (s *Streams) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, st := range s.all {
		wg.Go(func() { st.run(ctx) })
	}
	wg.Wait()
	return nil
}

// item is one record that waits, and where its log goes on after it.
type item struct {
	line auditview.Line
	log  string
	next logtail.Mark
}

// sender sends records to a receiver. Only one goroutine uses it.
type sender interface {
	// send returns how many of the records the receiver took and will not keep; the error says that none arrived.
	send(ctx context.Context, batch []item) (refused int, err error)
	close()
}

// stream is one sink with everything that is its own.
type stream struct {
	sink  Sink
	cfg   Config
	send  sender
	log   *slog.Logger
	file  string
	queue chan item

	failing atomic.Int64  // since when it has taken nothing, on the process's clock; 0: it takes what it gets
	dropped atomic.Uint64 // that no record tells of yet

	mu   sync.Mutex
	done map[string]logtail.Mark // up to where everything arrived or is lost; guarded by mu
}

var start = time.Now() // the zero of failing: monotonic

func (s *stream) run(ctx context.Context) {
	defer s.send.close()
	marks, err := s.load()
	if err != nil {
		s.log.Error("reading how far a stream of records is; it goes on with what is written from now on", "error", err)
	}
	if marks == nil {
		marks = logtail.Ends(s.cfg.Dir)
	}
	s.done = marks
	s.save()
	tail := logtail.New(s.cfg.Dir, marks, []byte(`"event":`))
	var wg sync.WaitGroup
	wg.Go(func() { s.deliver(ctx) })
	wg.Go(func() { s.keep(ctx) })
	s.follow(ctx, tail)
	wg.Wait()
	s.save()
}

// follow reads what the logs get and queues it.
func (s *stream) follow(ctx context.Context, tail *logtail.Tail) {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		tail.Poll(ctx, logtail.Handler{Line: func(raw []byte, log string, off int64) {
			l, ok := auditview.Decode(raw)
			if ok && ctx.Err() == nil {
				s.put(ctx, item{l, log, logtail.Mark{Inode: tail.Marks[log].Inode, Pos: off + int64(len(raw)) + 1}})
			}
		}})
		s.cfg.Metrics.StreamWaiting(s.sink.Name, len(s.queue))
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// put queues a record. Where there is no room it waits for a sink that takes what it gets, and loses the record of one
// that has not for too long.
func (s *stream) put(ctx context.Context, it item) {
	select {
	case s.queue <- it:
		return
	default:
	}
	look := time.NewTicker(pollEvery)
	defer look.Stop()
	for {
		if since := s.failing.Load(); since != 0 && time.Since(start)-time.Duration(since) > s.sink.Patience {
			s.lose(1)
			return
		}
		select {
		case s.queue <- it:
			return
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

func (s *stream) lose(n uint64) {
	s.dropped.Add(n)
	s.cfg.Metrics.StreamDropped(s.sink.Name, n)
}

// keep writes down how far the sink is, and what it lost.
func (s *stream) keep(ctx context.Context) {
	save, tell := time.NewTicker(saveEvery), time.NewTicker(tellEvery)
	defer save.Stop()
	defer tell.Stop()
	defer s.tell()
	for first := true; ; {
		select {
		case <-ctx.Done():
			return
		case <-save.C:
			s.save()
			if first && s.dropped.Load() > 0 { // the first loss is told at once
				s.tell()
				first = false
			}
		case <-tell.C:
			s.tell()
		}
	}
}

func (s *stream) tell() {
	if n := s.dropped.Swap(0); n > 0 {
		s.cfg.Audit.Log(audit.Record{Event: audit.EventStreamDropped, Outcome: audit.OutcomeFail, Count: n, Fields: map[string]string{"sink": s.sink.Name},
			Detail: "records that this receiver will not get: its queue was full and it took nothing, or it refused them for good"})
	}
}

// deliver sends what is queued, in order, until ctx ends. What is left then stays before the cursor.
func (s *stream) deliver(ctx context.Context) {
	for {
		batch := s.next(ctx)
		if batch == nil {
			return
		}
		if !s.try(ctx, batch) {
			return
		}
		s.mu.Lock()
		for _, it := range batch {
			s.done[it.log] = it.next
		}
		s.mu.Unlock()
	}
}

// next waits for a record and takes what is there beside it.
func (s *stream) next(ctx context.Context) []item {
	var batch []item
	select {
	case <-ctx.Done():
		return nil
	case it := <-s.queue:
		batch = append(batch, it)
	}
	for size := len(batch[0].line.Raw); len(batch) < batchMost && size < batchBytes; {
		select {
		case it := <-s.queue:
			batch = append(batch, it)
			size += len(it.line.Raw)
			continue
		default:
		}
		break
	}
	return batch
}

// try sends a batch until it arrives or is refused for good; false: ctx ended first.
func (s *stream) try(ctx context.Context, batch []item) bool {
	for wait := retryFirst; ; wait = min(2*wait, retryMost) {
		refused, err := s.once(ctx, batch)
		switch {
		case err == nil:
			if s.failing.Swap(0) != 0 {
				s.log.Info("records arrive again")
			}
			s.cfg.Metrics.StreamSent(s.sink.Name, len(batch)-refused)
			if refused > 0 {
				s.lose(uint64(refused))
			}
			return true
		case errors.Is(err, alert.ErrRefused):
			s.failing.Store(0)
			s.log.Error("giving records up", "error", err, "records", len(batch), "first", batch[0].line.ID)
			s.lose(uint64(len(batch)))
			return true
		}
		s.cfg.Metrics.StreamFailed(s.sink.Name)
		if s.failing.CompareAndSwap(0, int64(time.Since(start))) {
			s.log.Error("sending records; trying again until they arrive", "error", err)
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return false
		case <-t.C:
		}
	}
}

// once sends within the sink's deadline. A try that has begun is let finish when ctx ends, for a short while: cut short,
// its records would often be sent twice.
func (s *stream) once(ctx context.Context, batch []item) (refused int, err error) {
	limited, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.sink.Timeout)
	defer cancel()
	defer context.AfterFunc(ctx, func() { time.AfterFunc(lastTry, cancel) })()
	return s.send.send(limited, batch)
}

const cursorVersion = 1

type cursor struct {
	Version int                     `json:"v"`
	Read    map[string]logtail.Mark `json:"read"`
}

// load returns nil where nothing is known.
func (s *stream) load() (map[string]logtail.Mark, error) {
	raw, err := os.ReadFile(s.file)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var c cursor
	if err := json.Unmarshal(raw, &c); err != nil || c.Version != cursorVersion || c.Read == nil {
		return nil, fmt.Errorf("%s is no cursor", s.file)
	}
	return c.Read, nil
}

func (s *stream) save() {
	s.mu.Lock()
	raw, err := json.Marshal(cursor{cursorVersion, s.done})
	s.mu.Unlock()
	if old, readErr := os.ReadFile(s.file); readErr == nil && string(old) == string(raw) {
		return
	}
	if err == nil {
		err = atomicfile.Write(s.file, raw, 0o600, -1, -1)
	}
	if err != nil {
		s.log.Error("noting how far a stream of records is; after a restart records are sent again", "error", err)
	}
}
