package events

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/sandboxd/sockwatch"
)

// Forget tells everything about a session that is about to be forgotten by the kernel, counters and all. Call
// it when nothing can use the session any more, and before its counters go.
func (r *Reader) Forget(mark uint32) {
	ctx, cancel := context.WithTimeout(context.Background(), drainLimit)
	defer cancel()
	if r.settle(ctx) == nil {
		return
	}
	// Nobody reads what the kernel handed over, or not in time: the session's name is known now, and not later.
	if err := r.close(mark); err != nil {
		r.cfg.Log.Error("counting what the kernel denied a session that ends", "mark", mark, "error", err)
	}
}

// settle makes the records agree with what the kernel has counted up to now.
func (r *Reader) settle(ctx context.Context) error { return r.reconcile(ctx, r.ledger.settle) }

// glance records the destinations of a flood that no alert can have told of yet. It costs next to nothing where
// there is no flood. The kernel counts the denial before it keeps the destination, so one more look follows the last.
func (r *Reader) glance(ctx context.Context) error {
	n, err := r.cfg.Source.Unsaid()
	again := err != nil || n != r.glanced
	if !again && !r.again {
		return nil
	}
	r.glanced, r.again = n, again
	return r.reconcile(ctx, r.ledger.glance)
}

// reconcile records what due makes of the kernel's numbers. The order matters: what the counters have is either
// told when Drain returns or among the floods, unless it was lost.
func (r *Reader) reconcile(ctx context.Context, due func(Attempts, []Flood) []Flood) error {
	r.settling.Lock()
	defer r.settling.Unlock()
	counted, err := r.cfg.Source.Attempts()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, drainLimit)
	defer cancel()
	if err := r.cfg.Source.Drain(ctx); err != nil {
		return err
	}
	floods, err := r.cfg.Source.Floods()
	if err != nil {
		r.cfg.Log.Error("reading the destinations of a flood; only its number is recorded", "error", err)
	}
	r.logFloods(due(counted, floods))
	return nil
}

func (r *Reader) close(mark uint32) error {
	r.settling.Lock()
	defer r.settling.Unlock()
	r.load()
	counted, err := r.cfg.Source.Attempts()
	if err != nil {
		return err
	}
	floods, err := r.cfg.Source.Floods()
	r.logFloods(r.ledger.close(mark, counted[mark], floods))
	return err
}

func (r *Reader) logFloods(floods []Flood) {
	for _, f := range floods {
		r.count(f.Mark, f.Reason, f.Count)
		rec := r.record(f.Denial)
		rec.Count = f.Count
		if rec.Detail == "" {
			rec.Detail = "a flood of attempts, counted by destination; the process is that of the first"
		}
		if f.Hook == "" {
			rec.Fields, rec.Detail = nil, "a flood of attempts, counted by reason: their destinations were too many to keep"
		}
		r.cfg.Audit.Log(rec)
	}
}

// load reads what a predecessor recorded about the sessions that are still there, once. Where that cannot be
// read it is told again, rather than not at all. It is called with settling held.
func (r *Reader) load() {
	if r.loaded {
		return
	}
	r.loaded = true
	counted, err := r.cfg.Source.Attempts()
	if err != nil {
		r.cfg.Log.Error("reading what the kernel has denied so far", "error", err)
		return
	}
	if !anyDenied(counted) {
		return
	}
	told, err := readTold(r.cfg.Told)
	if err != nil {
		r.cfg.Log.Error("reading what was recorded before the restart; it may be recorded twice", "error", err)
	}
	r.ledger.load(told, counted)
}

func anyDenied(counted Attempts) bool {
	for _, codes := range counted {
		if len(codes) > 0 {
			return true
		}
	}
	return false
}

// readTold sums up the denials of this boot that an audit log has, by mark and reason. A log that is not there
// has none.
func readTold(path string) (Attempts, error) {
	told := Attempts{}
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return told, nil
	}
	if err != nil {
		return told, fmt.Errorf("opening the audit log: %w", err)
	}
	defer file.Close() // only read
	boot, err := bootclock.Boot()
	if err != nil {
		return told, fmt.Errorf("finding out which boot this is: %w", err)
	}
	lines := bufio.NewReaderSize(file, 1<<20)
	for {
		line, err := lines.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) { // no record of ours
			continue
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return told, fmt.Errorf("reading the audit log: %w", err)
		}
		told.read(line, boot)
		if err != nil {
			return told, nil
		}
	}
}

// read adds the line's denials, if it is a record of some in this boot that the kernel counts.
func (a Attempts) read(line []byte, boot string) {
	var rec audit.Record
	if !bytes.Contains(line, []byte(audit.EventConnectDenied)) || json.Unmarshal(line, &rec) != nil {
		return
	}
	if rec.Event != audit.EventConnectDenied || rec.BootID != boot || rec.Fields["hook"] == sockwatch.Hook {
		return
	}
	if a[rec.Mark] == nil {
		a[rec.Mark] = map[reason.Code]uint64{}
	}
	a[rec.Mark][rec.Reason] += max(rec.Count, 1)
}
