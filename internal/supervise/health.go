package supervise

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// waitHealthy waits until the daemon answers its health check. It fails with the daemon's own last words
// where it ends before, and with its last health report where it takes too long.
func (k *keeper) waitHealthy(ctx context.Context, c *child) error {
	ctx, cancel := context.WithTimeout(ctx, k.cfg.Start)
	defer cancel()
	client := control.NewClient(k.spec.Socket)
	defer client.CloseIdle()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		err := client.Call(ctx, "GET", "/healthz", nil, nil)
		if err == nil {
			k.warn(ctx, client)
			return k.same(c)
		}
		select {
		case <-c.exited:
			if words := c.lastWords(k.spec.LogFile); words != "" {
				return fmt.Errorf("%s (log: %s)", words, k.spec.LogFile)
			}
			return fmt.Errorf("it ended at once with %s (log: %s)", exitText(c.err), k.spec.LogFile)
		case <-ctx.Done():
			return fmt.Errorf("it is not healthy after %s: %w (log: %s)", k.cfg.Start, err, k.spec.LogFile)
		case <-tick.C:
		}
	}
}

// warn passes on what is wrong with a daemon that serves.
func (k *keeper) warn(ctx context.Context, client *control.Client) {
	var health wire.Health
	if err := client.Call(ctx, "GET", "/healthz", nil, &health); err == nil && health.Warning != "" {
		k.cfg.Log.Warn("the daemon serves, but not as it should", "daemon", k.spec.Name, "warning", health.Warning)
	}
}

// same makes sure that the answer came from this run and not from somebody else's socket.
func (k *keeper) same(c *child) error {
	select {
	case <-c.exited:
		return fmt.Errorf("it ended with %s, but another process answers on %s", exitText(c.err), k.spec.Socket)
	default:
		return nil
	}
}

// lastWords returns what this run wrote last to its log, on one line; "" where it wrote nothing. A JSON log
// line is reduced to its message and error.
func (c *child) lastWords(file string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close() // only read
	end, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return ""
	}
	from := max(c.logEnd, end-8192)
	raw := make([]byte, end-from)
	if _, err := f.ReadAt(raw, from); err != nil && err != io.EOF {
		return ""
	}
	lines := bytes.Split(bytes.TrimSpace(raw), []byte("\n"))
	for _, l := range lines { // a crash's first line says what happened, its last one does not
		if bytes.HasPrefix(l, []byte("panic: ")) || bytes.HasPrefix(l, []byte("fatal error: ")) {
			return string(l)
		}
	}
	last := lines[len(lines)-1]
	var rec map[string]any
	if json.Unmarshal(last, &rec) != nil {
		return string(last)
	}
	var words []string
	for _, key := range []string{"msg", "err", "error"} {
		if v, ok := rec[key].(string); ok && v != "" {
			words = append(words, v)
		}
	}
	return strings.Join(words, ": ")
}
