// Package events turns the kernel's denials into audit records. It promises a record, or a count in one, for
// every denial that the kernel could hand over, and a gap record for every one that it could not.
package events

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/tally"
)

// Denial is one denial as the kernel reported it.
type Denial struct {
	Mark   uint32 // 0 where no session is known
	PID    int    // in the host's pid namespace; 0 where unknown
	Comm   string
	Hook   string
	Reason reason.Code
	Family string // "ipv4", "ipv6" or what a socket was asked for
	Proto  uint8  // IP protocol
	Src    netip.AddrPort
	Dst    netip.AddrPort
}

// Source is where denials come from.
type Source interface {
	// Denials calls fn for each denial until ctx ends, and returns nil then.
	Denials(ctx context.Context, fn func(Denial)) error
	// Lost returns how many denials could not be handed over since the maps were made.
	Lost() (uint64, error)
}

// Sessions says whose mark it is.
type Sessions interface {
	SessionOf(mark uint32) (kid, id, card string, ok bool)
}

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Metrics is what the reader reports to.
type Metrics interface {
	Denied(code reason.Code)
	DenialsLost(n uint64)
}

// Config of a Reader. Every field is needed.
type Config struct {
	Cursor   string // file that keeps how many losses were told, so that a restart tells those in between
	Source   Source
	Sessions Sessions
	Audit    Recorder
	Metrics  Metrics
	Log      *slog.Logger
}

const (
	linesPerWindow = 200 // records a session may cause in a second before they are summed up
	lostEvery      = time.Second
)

// Reader records denials. Make one with New and run it once.
type Reader struct {
	cfg   Config
	tally *tally.Tally
	lost  uint64 // reported so far; owned by the goroutine of watchLost
}

// New returns a reader.
func New(cfg Config) *Reader {
	return &Reader{cfg: cfg, tally: tally.New(cfg.Audit, linesPerWindow)}
}

// Run records until ctx ends and returns nil then. Any other end is an error: without a reader denials still
// deny, but nobody hears of them.
func (r *Reader) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{}, 2)
	go func() { r.tally.Run(ctx, tally.Window); done <- struct{}{} }()
	go func() { r.watchLost(ctx); done <- struct{}{} }()
	err := r.cfg.Source.Denials(ctx, r.note)
	cancel()
	<-done
	<-done
	if err != nil {
		return fmt.Errorf("reading the kernel's denials: %w", err)
	}
	return nil
}

// note records one denial. The path of the executable is looked up at once, while the process may still be
// there.
func (r *Reader) note(d Denial) {
	r.cfg.Metrics.Denied(d.Reason)
	group := strconv.FormatUint(uint64(d.Mark), 16)
	key := fmt.Sprint(d.PID, d.Comm, d.Hook, d.Reason, d.Proto, d.Dst)
	r.tally.Add(group, key, func() audit.Record { return r.record(d) })
}

func (r *Reader) record(d Denial) audit.Record {
	rec := audit.Record{
		Event: audit.EventConnectDenied, Mark: d.Mark, Outcome: audit.OutcomeDeny, Reason: d.Reason, Actor: "kid",
		Fields: map[string]string{"hook": d.Hook},
	}
	rec.Kid, rec.Session, rec.Card, _ = r.session(d.Mark)
	if d.PID > 0 {
		rec.Process = &audit.Process{PID: d.PID, Comm: d.Comm, Exe: executable(d.PID)}
	}
	if d.Dst.IsValid() {
		rec.Dst = &audit.Dst{Addr: d.Dst.Addr(), Port: d.Dst.Port(), Proto: protocol(d.Proto)}
	}
	if d.Src.IsValid() && d.Src.Addr().IsValid() && !d.Src.Addr().IsUnspecified() {
		rec.Fields["src"] = d.Src.String()
	}
	if d.Family != "" {
		rec.Fields["family"] = d.Family
	}
	return rec
}

func (r *Reader) session(mark uint32) (kid, id, card string, ok bool) {
	if mark == 0 {
		return "", "", "", false
	}
	return r.cfg.Sessions.SessionOf(mark)
}

// executable returns the path that the process runs, as it is called inside its kid, or nothing where the
// process is gone.
func executable(pid int) string {
	path, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/exe")
	if err != nil {
		return ""
	}
	return path
}

// protocol names an IP protocol (IANA's registry).
func protocol(n uint8) string {
	switch n {
	case 1:
		return "icmp"
	case 6:
		return "tcp"
	case 17:
		return "udp"
	case 58:
		return "icmpv6"
	}
	return strconv.Itoa(int(n))
}

// watchLost writes a gap record whenever the kernel's loss counter grew.
func (r *Reader) watchLost(ctx context.Context) {
	r.lost = r.loadCursor()
	r.checkLost()
	tick := time.NewTicker(lostEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			r.checkLost()
			return
		case <-tick.C:
			r.checkLost()
		}
	}
}

func (r *Reader) checkLost() {
	n, err := r.cfg.Source.Lost()
	if err != nil {
		r.cfg.Log.Error("reading how many denials were lost", "error", err)
		return
	}
	if n < r.lost {
		r.lost = 0 // the maps were made anew
	}
	if n == r.lost {
		return
	}
	r.cfg.Metrics.DenialsLost(n - r.lost)
	r.cfg.Audit.Log(audit.Record{Event: audit.EventGap, Count: n - r.lost,
		Detail: "denials that the kernel could not hand over; they were denied all the same"})
	r.lost = n
	if err := os.WriteFile(r.cfg.Cursor, strconv.AppendUint(nil, n, 10), 0o600); err != nil {
		r.cfg.Log.Error("noting how many losses were told; they may be told twice", "error", err)
	}
}

// loadCursor returns 0 where no number can be read: then losses are told twice rather than not at all.
func (r *Reader) loadCursor() uint64 {
	raw, err := os.ReadFile(r.cfg.Cursor)
	if err != nil {
		return 0
	}
	n, err := strconv.ParseUint(string(raw), 10, 64)
	if err != nil {
		return 0
	}
	return n
}
