// Package dnsfilter is the only resolver that a kid can reach. It resolves nothing: a name that the session's
// policy allows gets a virtual address that stands for (session, name), every other name is refused with the
// reason, and no query ever leaves the box.
//
// What it promises:
//   - a query from an address that no loaded session owns is refused, and so is everything until the sessions
//     are loaded;
//   - an address that was given out keeps its name for the session's life, across restarts;
//   - every answer and every refusal is recorded; floods are folded, with exact counts (package tally);
//   - whatever bytes arrive, the filter goes on serving.
//
// What it does not promise: that a name exists. The proxy finds that out when the kid connects.
package dnsfilter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/tally"
)

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Processes names the process that sent a query from a kid's address and port; proto is 6 or 17 (IANA).
type Processes interface {
	Process(kid netip.AddrPort, proto uint8) (audit.Process, bool)
}

// Metrics is what the filter counts.
type Metrics interface {
	// Answered adds one message that was answered; reason.OK means that the lookup was allowed.
	Answered(proto string, code reason.Code)
	// Dropped adds one message that was not answered: too short, or an answer itself.
	Dropped(proto string)
	// Sessions sets how many sessions are loaded.
	Sessions(n int)
}

// Config is what a Filter needs. Nothing may be nil or zero unless it says so.
type Config struct {
	Listen    netip.AddrPort // need not be on any interface yet; port 0 takes a free one, for tests
	Virtual   netip.Prefix   // of the instance
	StateDir  string         // where the addresses of wildcard names are kept; must exist
	Load      func() ([]*session.Session, error)
	Check     func(*session.Session) error // whether the document belongs to this instance
	Processes Processes                    // nil: records name no process
	Audit     Recorder
	Metrics   Metrics
	Log       *slog.Logger
	Sandboxd  int     // uid that may load and remove sessions
	Proxy     int     // uid that may ask for names
	Sockets   int     // UDP sockets, one goroutine each
	Rate      float64 // queries a second that one session may send
	Burst     float64 // and how many of them at once
}

// Limits that fit a kid: a resolver library asks a few times a second, a build tool some hundreds.
const (
	DefaultRate  = 500
	DefaultBurst = 1000
)

// auditLines bounds how many allowed and how many refused lookups a session writes one by one in a second.
const auditLines = 64

// Filter answers queries. Safe for concurrent use.
type Filter struct {
	cfg      Config
	sessions sessions
	tally    *tally.Tally
	conns    connSet
	tcp      *net.TCPListener
	udp      []*net.UDPConn
}

// New binds the sockets and loads the sessions there are. Sessions that cannot be loaded stay denied and are
// reported; sockets that cannot be bound are an error. Run must follow.
func New(ctx context.Context, cfg Config) (*Filter, error) {
	f := &Filter{cfg: cfg, tally: tally.New(cfg.Audit, auditLines)}
	f.conns.open = map[netip.Addr]map[net.Conn]struct{}{}
	f.sessions.init()
	f.loadAll()
	if err := f.listen(ctx); err != nil {
		return nil, err
	}
	return f, nil
}

// Addr is where the filter listens.
func (f *Filter) Addr() netip.AddrPort { return f.udp[0].LocalAddr().(*net.UDPAddr).AddrPort() } // bound as UDP

// Run answers queries until ctx ends, closes everything and returns nil. A socket that fails is an error.
func (f *Filter) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	for _, c := range f.udp {
		wg.Go(func() { cancel(f.serveUDP(ctx, c)) })
	}
	wg.Go(func() { cancel(f.serveTCP(ctx)) })
	wg.Go(func() { f.tally.Run(ctx, tally.Window) })
	<-ctx.Done()
	f.closeSockets()
	f.conns.closeAll()
	wg.Wait()
	f.tally.Flush() // what the sockets took after the last window
	f.sessions.closeAll()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return fmt.Errorf("answering queries on %s: %w", f.cfg.Listen, err)
	}
	return nil
}

func (f *Filter) closeSockets() {
	f.tcp.Close() // nothing is buffered
	for _, c := range f.udp {
		c.Close() // nothing is buffered
	}
}

// record writes one answered or refused lookup down.
func (f *Filter) record(q *query, a *answer) {
	proto := q.proto()
	f.cfg.Metrics.Answered(proto, a.code)
	outcome, key, add := audit.OutcomeAllow, lookupKey(a.qtype, a.name), f.tally.Add
	if a.code != reason.OK { // repeats of what is refused are shown one by one while there is room
		outcome, key, add = audit.OutcomeDeny, a.code.String()+" "+key, f.tally.AddEach
	}
	group := "unknown " + outcome
	if q.kid != nil {
		group = q.kid.group(outcome)
	}
	if a.code == reason.Canary || a.code == reason.TokenScope { // whatever else is refused at the same time: killswitchd waits for it
		group, key, add = group+" canary", a.name, f.tally.Add
	}
	add(group, key, func() audit.Record {
		r := audit.Record{Event: audit.EventLookup, Outcome: outcome, Reason: a.code, Rule: a.rule, Detail: a.detail, Actor: "kid",
			Dst: &audit.Dst{Name: a.name, Addr: a.addr, Proto: proto}}
		if a.qtype != "" {
			r.Fields = map[string]string{"type": a.qtype}
		}
		f.identify(&r, q)
		return r
	})
}

// drop records a message that gets no answer.
func (f *Filter) drop(q *query, why string) {
	f.cfg.Metrics.Dropped(q.proto())
	f.tally.Add("dropped "+q.src.Addr().String(), "", func() audit.Record {
		r := audit.Record{Event: audit.EventLookup, Outcome: audit.OutcomeDeny, Reason: reason.Malformed, Detail: "dropped: " + why, Actor: "kid",
			Dst: &audit.Dst{Proto: q.proto()}}
		f.identify(&r, q)
		return r
	})
}

// identify fills in who asked.
func (f *Filter) identify(r *audit.Record, q *query) {
	if q.kid != nil {
		d := q.kid.doc
		r.Session, r.Kid, r.Mark, r.Card, r.Generation = d.ID, d.Kid, d.Mark, d.Card, d.Generation
	} else {
		r.Fields = withField(r.Fields, "source", q.src.String())
	}
	if f.cfg.Processes == nil {
		return
	}
	proto := uint8(17)
	if q.tcp {
		proto = 6
	}
	if p, ok := f.cfg.Processes.Process(q.src, proto); ok {
		r.Process = &p
	}
}

func withField(fields map[string]string, key, value string) map[string]string {
	if fields == nil {
		fields = map[string]string{}
	}
	fields[key] = value
	return fields
}

// limiter is a token bucket; the zero value is not usable.
type limiter struct {
	mu          sync.Mutex
	rate, burst float64
	tokens      float64
	last        time.Time
}

func newLimiter(rate, burst float64) *limiter {
	return &limiter{rate: rate, burst: burst, tokens: burst, last: time.Now()}
}

// allow takes one token at the time now.
func (l *limiter) allow(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if d := now.Sub(l.last).Seconds(); d > 0 {
		l.tokens = min(l.burst, l.tokens+d*l.rate)
		l.last = now
	}
	if l.tokens < 1 {
		return false
	}
	l.tokens--
	return true
}
