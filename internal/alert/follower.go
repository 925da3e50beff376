// Package alert tells people about every denied attempt: it follows the audit logs of all daemons of an
// instance and posts each record whose outcome is deny to a webhook, as one JSON body a record. The logs are
// the queue: a webhook that is slow or down delays alerts and never a decision, and what was not delivered
// when sandboxd died is delivered when it comes back.
package alert

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"tagout/internal/audit"
)

const (
	pollEvery  = 50 * time.Millisecond // how often the logs are looked at; alerts leave within 1 s
	retryAfter = 500 * time.Millisecond
	postLimit  = 3 * time.Second
	readChunk  = 1 << 20
)

// Metrics is what the follower reports to.
type Metrics interface {
	AlertSent()
	AlertFailed()
}

// Config is a follower's configuration.
type Config struct {
	Dir     string // inst.AuditDir(): a directory a daemon, one .jsonl file in each
	URL     string // where to post; empty: nothing is posted, records stay in the logs
	Cursor  string // file that remembers how far each log was delivered
	Log     *slog.Logger
	Metrics Metrics
}

// Follower delivers alerts. One goroutine may run it.
type Follower struct {
	cfg    Config
	client *http.Client
	pos    map[string]int64 // log file -> bytes delivered
}

// NewFollower returns a follower that goes on where the cursor file says the last one stopped.
func NewFollower(cfg Config) *Follower {
	f := &Follower{cfg: cfg, client: &http.Client{Timeout: postLimit}, pos: map[string]int64{}}
	raw, err := os.ReadFile(cfg.Cursor)
	if err == nil {
		err = json.Unmarshal(raw, &f.pos)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		cfg.Log.Error("reading the alert cursor; all alerts are sent again", "error", err)
		f.pos = map[string]int64{}
	}
	return f
}

// Run delivers until ctx ends. It returns nil then.
func (f *Follower) Run(ctx context.Context) error {
	if f.cfg.URL == "" {
		f.cfg.Log.Warn("no alert webhook is configured: denied attempts are only logged")
		<-ctx.Done()
		return nil
	}
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		logs, err := filepath.Glob(filepath.Join(f.cfg.Dir, "*", "*.jsonl"))
		if err != nil {
			return fmt.Errorf("following the audit logs: %w", err)
		}
		for _, log := range logs {
			f.follow(ctx, log)
		}
	}
}

// follow delivers what was added to one log. A failing webhook leaves the rest for the next round.
func (f *Follower) follow(ctx context.Context, log string) {
	chunk, err := f.readNew(log)
	if err != nil {
		f.cfg.Log.Error("following an audit log", "log", log, "error", err)
		return
	}
	moved := false
	for {
		line, rest, whole := bytes.Cut(chunk, []byte{'\n'})
		if !whole {
			break
		}
		if err := f.deliver(ctx, line); err != nil {
			if ctx.Err() == nil {
				f.cfg.Log.Error("sending an alert; trying again", "url", f.cfg.URL, "error", err)
				f.cfg.Metrics.AlertFailed()
			}
			pause(ctx, retryAfter)
			break
		}
		f.pos[log] += int64(len(line)) + 1
		chunk, moved = rest, true
	}
	if moved {
		f.saveCursor()
	}
}

// readNew returns what lies behind the log's cursor, at most readChunk bytes. A log that got shorter was
// replaced and is read from its start.
func (f *Follower) readNew(log string) ([]byte, error) {
	file, err := os.Open(log)
	if err != nil {
		return nil, err
	}
	defer file.Close() // only read
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() < f.pos[log] {
		f.pos[log] = 0
	}
	chunk := make([]byte, min(info.Size()-f.pos[log], readChunk))
	n, err := file.ReadAt(chunk, f.pos[log])
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return chunk[:n], err
}

// deliver posts the line if it is a denied attempt; other lines, and lines that are no record, pass.
func (f *Follower) deliver(ctx context.Context, line []byte) error {
	var rec audit.Record
	if json.Unmarshal(line, &rec) != nil || rec.Outcome != audit.OutcomeDeny {
		return nil
	}
	// A request that has begun is let finish (postLimit bounds it): cut short, it would be sent twice.
	req, err := http.NewRequestWithContext(context.WithoutCancel(ctx), http.MethodPost, f.cfg.URL, bytes.NewReader(append(line[:len(line):len(line)], '\n')))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Tagout-Event-Id", rec.ID)
	resp, err := f.client.Do(req)
	if err != nil {
		return err
	}
	io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // lets the connection be used again
	resp.Body.Close()                                      // as above
	if resp.StatusCode/100 != 2 {
		return errors.New("the webhook answered " + strconv.Itoa(resp.StatusCode))
	}
	f.cfg.Metrics.AlertSent()
	return nil
}

// saveCursor notes what was delivered. After a crash before it, alerts are sent twice: the event id tells.
func (f *Follower) saveCursor() {
	raw, err := json.Marshal(f.pos)
	if err == nil {
		tmp := f.cfg.Cursor + ".new"
		if err = os.WriteFile(tmp, raw, 0o600); err == nil {
			err = os.Rename(tmp, f.cfg.Cursor)
		}
	}
	if err != nil {
		f.cfg.Log.Error("saving the alert cursor", "error", err)
	}
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
