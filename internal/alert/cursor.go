package alert

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"tagout/internal/logtail"
)

const cursorVersion = 2

// cursor is what is kept across restarts.
type cursor struct {
	Version int                         `json:"v"`
	Read    map[string]logtail.Mark     `json:"read"`  // log -> how far it was read
	Sinks   map[string]map[string]int64 `json:"sinks"` // sink -> log -> everything before it was delivered or dropped
}

// loadCursor returns an empty cursor where there is no file or where it cannot be used, the latter with an
// error.
func loadCursor(path string) (cursor, error) {
	none := cursor{Read: map[string]logtail.Mark{}}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	var c cursor
	if err := json.Unmarshal(raw, &c); err == nil && c.Version == cursorVersion && c.Read != nil {
		return c, nil
	}
	var first map[string]int64 // version 1: one webhook's positions
	if err := json.Unmarshal(raw, &first); err != nil {
		return none, fmt.Errorf("%s is no cursor: %w", path, err)
	}
	for log, pos := range first {
		none.Read[log] = logtail.Mark{Pos: pos}
	}
	return none, nil
}

// start returns where a sink begins. One that is new begins where the others have read to, not with the past.
func (c cursor) start(sink string) map[string]int64 {
	out := map[string]int64{}
	for log, m := range c.Read {
		out[log] = m.Pos
	}
	for log, pos := range c.Sinks[sink] {
		out[log] = pos
	}
	return out
}

// replace writes the file so that a crash leaves the old or the new one.
func replace(path string, content []byte) error {
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
