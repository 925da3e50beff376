package alert

import (
	"context"
	"encoding/json"

	"tagout/internal/audit"
	"tagout/internal/logtail"
)

// One of these is in every line that matters: the logger writes no spaces, and quotes within a text are escaped.
var (
	denied = []byte(`"outcome":"` + audit.OutcomeDeny + `"`)
	gap    = []byte(`"event":"` + audit.EventGap + `"`)
)

// poll takes what was added to the logs. A log that cannot be read is told of once and tried again the next time.
func (f *Follower) poll(ctx context.Context) {
	failed := f.tail.Poll(ctx, logtail.Handler{Line: f.line, Moved: f.moved, Rolled: func(log string) { f.moved(log, 0, true) }})
	for log, err := range failed {
		if !f.broken[log] {
			f.cfg.Log.Error("following an audit log; trying again", "log", log, "error", err)
		}
	}
	clear(f.broken)
	for log := range failed {
		f.broken[log] = true
	}
}

func (f *Follower) line(line []byte, log string, off int64) {
	var r audit.Record
	if json.Unmarshal(line, &r) == nil && (r.Outcome == audit.OutcomeDeny || r.Event == audit.EventGap) {
		f.take(&r, place{log, off})
	}
}
