package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/audit/verify"
)

// AuditConfig says what the audit logs are measured with. All fields must be set.
type AuditConfig struct {
	Work    string // a directory on a disk like the one where the logs lie; emptied again
	Out     string // directory of audit.json
	Records int    // that are written and verified
	Plain   time.Duration
	View    int // records that searches are measured on
	Runs    int // of each search
	Print   io.Writer
}

// RunAudit measures the audit logs beside an fsync for each line and beside rsyslog, prints a table and writes
// audit.json.
func RunAudit(ctx context.Context, c AuditConfig) ([]Metric, error) {
	dir, err := os.MkdirTemp(c.Work, "tagout-bench-audit-")
	if err != nil {
		return nil, fmt.Errorf("measuring the audit logs: %w", err)
	}
	metrics, err := measureAudit(ctx, c, dir)
	if err == nil {
		var view []Metric
		view, err = MeasureAuditView(ctx, AuditView{Dir: filepath.Join(dir, "view"), Records: c.View, Runs: c.Runs})
		metrics = append(metrics, view...)
	}
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		return nil, fmt.Errorf("measuring the audit logs: %w", err)
	}
	return metrics, errors.Join(Print(c.Print, metrics), Write(c.Out, "audit", metrics))
}

func measureAudit(ctx context.Context, c AuditConfig, dir string) ([]Metric, error) {
	line, err := sampleLine()
	if err != nil {
		return nil, err
	}
	plain, err := fsyncEach(ctx, filepath.Join(dir, "plain"), line, c.Plain)
	if err != nil {
		return nil, err
	}
	peer, err := rsyslogEach(ctx, filepath.Join(dir, "rsyslog"), line, c.Records/4)
	if err != nil {
		return nil, err
	}
	logs := filepath.Join(dir, "audit")
	var durable, verified float64
	var syncs uint64
	writing, err := ownTime(c.Records, func() (err error) { durable, syncs, err = durableRate(ctx, logs, c.Records); return err })
	if err != nil {
		return nil, err
	}
	reading, err := ownTime(c.Records, func() (err error) { verified, err = verifyRate(logs, c.Records); return err })
	if err != nil {
		return nil, err
	}
	appends, err := appendTimes(ctx, filepath.Join(dir, "append"), min(c.Records, 200_000))
	if err != nil {
		return nil, err
	}
	return []Metric{
		writing.limit(AtLeast(fmt.Sprintf("audit: records durable before they are acknowledged, %d waiting at once", durableWriters), durable, "records/s", 50_000).Beside("an fsync for each line, as auditd with flush=sync", plain)),
		AtLeast("audit: the same, beside rsyslog with sync=on", durable, "records/s", 0).Beside("rsyslog", peer),
		AtLeast("audit: of these, in one fsync", float64(c.Records)/float64(max(syncs, 1)), "records", 0),
		AtMost("audit: an append that waits for nothing, p50", Percentile(appends, 50)*1000, "µs", 0),
		AtMost("audit: an append that waits for nothing, p99", Percentile(appends, 99)*1000, "µs", 50),
		AtMost("audit: processor time for a durable record", writing.each, "µs", 0),
		reading.limit(AtLeast("audit: verify", verified, "records/s", 500_000)),
		AtMost("audit: processor time for a verified record", reading.each, "µs", 0),
	}, nil
}

// cost is what some work took of this process.
type cost struct {
	each  float64 // microseconds of processor time for a record
	share float64 // processors that it had on the average
}

// ownTime measures what work on so many records costs.
func ownTime(records int, work func() error) (cost, error) {
	before, begun := processTime(), time.Now()
	err := work()
	took, used := time.Since(begun), processTime()-before
	return cost{each: float64(used.Microseconds()) / float64(records), share: used.Seconds() / took.Seconds()}, err
}

// limit says of a figure that missed its target what the process had meanwhile.
func (c cost) limit(m Metric) Metric {
	if !m.Met {
		m.Limits = fmt.Sprintf("the process had %.2f of %d processors meanwhile: the rest was the disk, or others", c.share, runtime.NumCPU())
	}
	return m
}

func processTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic("reading the process's time: " + err.Error()) // never refused on Linux
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// sample is a record like those of which a box has most.
func sample(n int) audit.Record {
	return audit.Record{
		Event: audit.EventConnOpened, Session: "01K5Z7Q8Y1F3W2V4X6T8R0P2NM", Kid: fmt.Sprintf("kid-%d", n%200), Mark: 1409286144 + uint32(n%200), Card: "practice", Outcome: audit.OutcomeAllow, Rule: 12,
		Dst: &audit.Dst{Name: fmt.Sprintf("host-%d.vendor.test", n%5000), Addr: netip.AddrFrom4([4]byte{198, 18, byte(n >> 8 & 15), byte(n)}), Port: 443, Proto: "tls"}, Fields: map[string]string{"via": "transparent"},
	}
}

// sampleLine is such a record as it stands in a log.
func sampleLine() ([]byte, error) {
	r := sample(1)
	r.Version, r.ID, r.Time, r.Boot, r.BootID, r.Instance, r.Daemon = audit.Version, "01K5Z7Q8Y1F3W2V4X6T8R0P2NM", time.Now().UTC(), time.Hour, "5cbb9b9e-7f3d-4f0b-9a53-0c8f5d1d6b6e", "bench", "proxy"
	line, err := json.Marshal(&r)
	return append(line, '\n'), err
}

// fsyncEach writes lines for a while, each with an fsync of its own.
func fsyncEach(ctx context.Context, path string, line []byte, long time.Duration) (perSecond float64, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return 0, err
	}
	defer f.Close() // it was synced
	begun, n := time.Now(), 0
	for ; time.Since(begun) < long && ctx.Err() == nil; n++ {
		if _, err := f.Write(line); err != nil {
			return 0, err
		}
		if err := f.Sync(); err != nil {
			return 0, err
		}
	}
	return float64(n) / time.Since(begun).Seconds(), ctx.Err()
}

// durableWriters wait for a sync at the same time.
const durableWriters = 2048

func openBenchLog(dir string) (*audit.Logger, error) {
	if err := os.MkdirAll(filepath.Join(dir, "proxy"), 0o700); err != nil {
		return nil, err
	}
	return audit.Open(filepath.Join(dir, "proxy", "proxy.jsonl"), "bench", "proxy")
}

// durableRate has many writers each wait until its record is on disk.
func durableRate(ctx context.Context, dir string, records int) (perSecond float64, syncs uint64, err error) {
	log, err := openBenchLog(dir)
	if err != nil {
		return 0, 0, err
	}
	var next atomic.Int64
	var wg sync.WaitGroup
	errs := make(chan error, durableWriters)
	begun := time.Now()
	for range durableWriters {
		wg.Go(func() {
			for {
				n := next.Add(1)
				if n > int64(records) {
					return
				}
				if err := log.LogDurable(ctx, sample(int(n))); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	took := time.Since(begun)
	st := log.Stats()
	close(errs)
	for e := range errs {
		err = errors.Join(err, e)
	}
	if err = errors.Join(err, log.Close()); err != nil {
		return 0, 0, err
	}
	if st.Lost > 0 || st.Records != uint64(records) {
		return 0, 0, fmt.Errorf("%d records of %d were written, %d lost", st.Records, records, st.Lost)
	}
	return float64(records) / took.Seconds(), st.Syncs, nil
}

// verifyRate verifies what durableRate wrote.
func verifyRate(dir string, records int) (perSecond float64, err error) {
	begun := time.Now()
	r, err := verify.Run(dir, verify.Options{})
	if err != nil {
		return 0, err
	}
	took := time.Since(begun)
	if !r.OK || r.Logs[0].Read < uint64(records) {
		return 0, fmt.Errorf("the log that was just written does not verify: %+v", r)
	}
	return float64(r.Logs[0].Read) / took.Seconds(), nil
}

// appendTimes is how long each append took that waits for nothing, while 20,000 a second come.
func appendTimes(ctx context.Context, dir string, records int) ([]time.Duration, error) {
	log, err := openBenchLog(dir)
	if err != nil {
		return nil, err
	}
	out := make([]time.Duration, 0, records)
	const burst = 20
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for len(out) < records && ctx.Err() == nil {
		for range burst {
			r := sample(len(out))
			begun := time.Now()
			log.Log(r)
			out = append(out, time.Since(begun))
		}
		<-tick.C
	}
	lost := log.Stats().Lost
	if err := errors.Join(ctx.Err(), log.Close()); err != nil {
		return nil, err
	}
	if lost > 0 {
		return nil, fmt.Errorf("%d records were lost", lost)
	}
	return out, nil
}
