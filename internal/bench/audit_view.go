package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/auditindex"
	"tagout/internal/auditview"
	"tagout/internal/instance"
)

// AuditView says what searches of the audit logs are measured with. All fields must be set.
type AuditView struct {
	Dir     string // for the logs and the index, on a disk like the one where the real ones lie; emptied again
	Records int    // the documentation says 10,000,000
	Runs    int    // of each search
}

// viewKids is how many kids the generated logs tell of. The one whose timeline is told has one record of so many in each.
const viewKids = 2000

// MeasureAuditView writes logs as daemons would have, makes the index of them, and tells the timeline of one kid through
// the index and, beside it, by reading the logs through.
func MeasureAuditView(ctx context.Context, c AuditView) (metrics []Metric, err error) {
	logs, index := filepath.Join(c.Dir, "audit"), filepath.Join(c.Dir, "audit-index")
	defer func() { err = errors.Join(err, os.RemoveAll(logs), os.RemoveAll(index)) }()
	if err := writeAuditLogs(ctx, logs, c.Records); err != nil {
		return nil, fmt.Errorf("writing logs to search in: %w", err)
	}
	built, err := auditindex.Rebuild(ctx, index, logs)
	if err != nil {
		return nil, err
	}
	if built.Lines != int64(c.Records) {
		return nil, fmt.Errorf("indexing: %d records of %d", built.Lines, c.Records)
	}
	through := auditview.Scanner{Dir: logs}
	var trouble error
	indexed := auditindex.Index{Dir: index, Scanner: through, Trouble: func(err error) { trouble = err }}
	var fast, slow []time.Duration
	told := 0
	for range c.Runs {
		n, took, err := tellOnce(ctx, indexed)
		if err = errors.Join(err, trouble); err != nil {
			return nil, err
		}
		told, fast = n, append(fast, took)
	}
	n, took, err := tellOnce(ctx, through)
	if err != nil {
		return nil, err
	}
	if n != told || n == 0 {
		return nil, fmt.Errorf("the index tells %d records of the kid, the logs %d", told, n)
	}
	slow = append(slow, took)
	rate := float64(built.Lines) / built.Took.Seconds()
	return []Metric{
		{Metric: "audit: index build", Value: rate, Unit: "records/s", Target: 100_000, Met: rate >= 100_000},
		AtMost(fmt.Sprintf("audit: timeline of %d records among %d, p99", told, c.Records), Percentile(fast, 99), "ms", 1000).
			Beside("reading all logs through", Percentile(slow, 50)),
	}, nil
}

// tellOnce tells the timeline of one kid, rendered to its last line.
func tellOnce(ctx context.Context, f auditview.Finder) (records int, took time.Duration, err error) {
	began := time.Now()
	story, err := auditview.Tell(ctx, f, "kid-7")
	if err != nil {
		return 0, 0, err
	}
	if story == nil {
		return 0, 0, errors.New("the kid has no records")
	}
	out, w := bufio.NewWriter(io.Discard), auditview.Writer{Colour: true}
	for i := range story.Lines {
		fmt.Fprintln(out, w.Line(&story.Lines[i])) // goes nowhere
	}
	return len(story.Lines), time.Since(began), nil
}

// writeAuditLogs writes so many records of viewKids kids into the logs of four daemons, in the form that daemons give
// them: some 350 bytes each.
func writeAuditLogs(ctx context.Context, dir string, records int) error {
	daemons := []string{instance.Sandboxd, instance.Proxy, instance.DNSFilter, instance.Credd}
	began := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	for d, daemon := range daemons {
		if err := os.MkdirAll(filepath.Join(dir, daemon), 0o700); err != nil {
			return err
		}
		f, err := os.Create(filepath.Join(dir, daemon, daemon+".jsonl"))
		if err != nil {
			return err
		}
		w := bufio.NewWriterSize(f, 1<<20)
		for n := d; n < records; n += len(daemons) {
			if n&0xffff == d && ctx.Err() != nil {
				break
			}
			kid := (n / len(daemons)) % viewKids
			at := began.Add(time.Duration(n) * time.Millisecond)
			fmt.Fprintf(w, `{"v":1,"id":"01J%023d","time":%q,"boot_ns":%d,"boot_id":"5cbb9b9e-7f3d-4f0b-9a53-0c8f5d1d6b6e","instance":"bench","daemon":%q,`, n, at.Format(time.RFC3339Nano), int64(n)*1e6, daemon)
			fmt.Fprintf(w, `"event":%q,"session":"01K%023d","kid":"kid-%d","mark":%d,"card":"practice"`, viewEvents[d][n/len(daemons)%2], kid, kid, 1409286144+kid)
			fmt.Fprintf(w, `,"outcome":%q,"dst":{"name":"host-%d.vendor.test","addr":"198.18.%d.%d","port":443,"proto":"tls"},"fields":{"via":"transparent"}}`+"\n",
				[]string{"allow", "deny"}[n/7%2], n%5000, n>>8&15, n&255) // written by Flush
		}
		if err := errors.Join(ctx.Err(), w.Flush(), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// viewEvents are two events of each daemon.
var viewEvents = [][2]string{{"connect.denied", "tool.called"}, {"conn.opened", "conn.closed"}, {"dns.lookup", "dns.lookup"}, {"token.used", "token.refused"}}
