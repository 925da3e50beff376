// Package events turns the kernel's denials into audit records. Every denied attempt is in exactly one of them:
// in one of its own, in one that counts repeats, or in one that sums up a flood by destination and reason. The
// kernel's counters are the truth that the records are made to agree with, also across a restart. What is lost
// in a flood is detail, and an audit.gap record says so where it was the reader who was too slow.
package events

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/tally"
	"tagout/internal/wire"
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

// Flood is a number of denials towards one destination that were not handed over one by one. PID and Comm are
// those of the first of them.
type Flood struct {
	Denial
	Count uint64
}

// Attempts is how many attempts the kernel denied, by mark and reason, since the session was added. Mark 0
// stands for those of no known session.
type Attempts map[uint32]map[reason.Code]uint64

// Source is where denials come from.
type Source interface {
	// Denials calls fn for each denial until ctx ends, and returns nil then.
	Denials(ctx context.Context, fn func(Denial)) error
	// Drain returns nil when every denial from before the call that can be handed over has been.
	Drain(ctx context.Context) error
	// Attempts returns the truth: whatever was denied is in it, handed over or not, and before it is.
	Attempts() (Attempts, error)
	// Floods returns, and forgets, what was not handed over one by one.
	Floods() ([]Flood, error)
	// Lost returns how many denials found nobody to take them over since the maps were made.
	Lost() (uint64, error)
	// Unsaid returns how many denials were not handed over one by one since the maps were made, the lost ones among
	// them. It is cheap.
	Unsaid() (uint64, error)
}

// Sessions says whose mark it is.
type Sessions interface {
	SessionOf(mark uint32) (kid, id, card string, ok bool)
}

// Recorder is the audit log. Log must not block.
type Recorder interface{ Log(audit.Record) }

// Metrics is what the reader reports to.
type Metrics interface {
	Denied(code reason.Code, n uint64)
	DenialsLost(n uint64)
}

// Config of a Reader. Every field is needed.
type Config struct {
	Cursor   string // file that keeps how many losses were told, so that a restart tells those in between
	Told     string // the audit log that the records go to: what a predecessor told is read from it
	Source   Source
	Sessions Sessions
	Audit    Recorder
	Metrics  Metrics
	Log      *slog.Logger
}

const (
	// records a session may cause in a second before they are summed up without their destinations; more than the
	// kernel hands over in a second, where two of its windows meet, too
	linesPerWindow = 300
	glanceEvery    = 200 * time.Millisecond // an alert leaves within a second of what it is about
	glances        = 5                      // the last of so many is a settlement
	drainLimit     = 2 * time.Second
)

// Reader records denials. Make one with New and run it once.
type Reader struct {
	cfg   Config
	tally *tally.Tally
	every time.Duration // glanceEvery, but in tests
	lost  uint64        // reported so far; owned by the goroutine of watch

	glanced uint64 // unsaid denials at the last glance; owned by the goroutine of watch
	again   bool   // it found new ones; owned by the goroutine of watch

	ledger *ledger

	settling sync.Mutex // one settlement at a time
	loaded   bool       // the ledger knows what a predecessor told; guarded by settling
}

// New returns a reader.
func New(cfg Config) *Reader {
	return &Reader{cfg: cfg, tally: tally.New(cfg.Audit, linesPerWindow), every: glanceEvery, ledger: newLedger()}
}

// Run records until ctx ends and returns nil then. Any other end is an error: without a reader denials still
// deny, but nobody hears of them.
func (r *Reader) Run(ctx context.Context) error {
	r.settling.Lock()
	r.load()
	r.settling.Unlock()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{}, 2)
	go func() { r.tally.Run(ctx, tally.Window); done <- struct{}{} }()
	go func() { r.watch(ctx); done <- struct{}{} }()
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
	if !r.ledger.told(d.Mark, d.Reason) {
		return // its number was told when its session ended
	}
	r.count(d.Mark, d.Reason, 1)
	group := strconv.FormatUint(uint64(d.Mark), 16)
	key := fmt.Sprint(d.PID, d.Comm, d.Hook, d.Reason, d.Proto, d.Dst)
	r.tally.Add(group, key, func() audit.Record { return r.record(d) })
}

// count counts what somebody tried; a proof's own packets are nobody's attempt.
func (r *Reader) count(mark uint32, code reason.Code, n uint64) {
	if kid, _, _, _ := r.session(mark); !wire.IsProofKid(kid) {
		r.cfg.Metrics.Denied(code, n)
	}
}

func (r *Reader) record(d Denial) audit.Record {
	rec := audit.Record{
		Event: audit.EventConnectDenied, Mark: d.Mark, Outcome: audit.OutcomeDeny, Reason: d.Reason, Actor: "kid",
		Fields: map[string]string{"hook": d.Hook},
	}
	rec.Kid, rec.Session, rec.Card, _ = r.session(d.Mark)
	if wire.IsProofKid(rec.Kid) {
		rec.Outcome, rec.Detail = audit.OutcomeOK, "a proof of the network layer"
	}
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

// watch makes the records agree with the kernel's counters, again and again.
func (r *Reader) watch(ctx context.Context) {
	r.lost = r.loadCursor()
	r.checkLost()
	tick := time.NewTicker(r.every)
	defer tick.Stop()
	for n := 1; ; n++ {
		look := r.glance
		if n%glances == 0 {
			look = r.settle
		}
		select {
		case <-ctx.Done():
			r.checkLost()
			return
		case <-tick.C:
			if err := look(ctx); err != nil && ctx.Err() == nil {
				r.cfg.Log.Error("counting what the kernel denied; trying again", "error", err)
			}
			if n%glances == 0 {
				r.checkLost()
			}
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
		Detail: "denials that the kernel could not hand over one by one; they are counted in the records of a flood",
		Fields: map[string]string{audit.FieldCounted: "flood"}})
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
