package api

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/logtail"
	"tagout/internal/reason"
)

// Bounds of following events.
const (
	maxFollowers = 64
	pollEvery    = 200 * time.Millisecond
	beatEvery    = 15 * time.Second // a comment, so that a dead connection is noticed
)

func (s *server) eventRoutes() {
	last := huma.Param{Name: "Last-Event-ID", In: "header", Description: "Go on after this event, as EventSource does by itself. Without it the events from now on are sent.", Schema: &huma.Schema{Type: huma.TypeString}}
	addStream(s, route{id: "kid-events", method: http.MethodGet, path: "/v1/kids/{kid}/events", summary: "A kid's audit records as server-sent events, until it is destroyed; audit.gap where some are lost", role: RoleRead},
		stream{kind: "text/event-stream", out: audit.Record{}, params: append(kidParam(), &last)}, s.events)
}

// events follows the audit logs: they are the buffer, so whoever reads slowly loses nothing and costs no memory.
func (s *server) events(w http.ResponseWriter, r *http.Request) {
	if n := s.followers.Add(1); n > maxFollowers {
		s.followers.Add(-1)
		control.Refuse(w, http.StatusInsufficientStorage, reason.Capacity, fmt.Sprintf("%d clients follow events already", maxFollowers))
		return
	}
	defer s.followers.Add(-1)
	kid, err := s.kids.Get(r.Context(), r.PathValue("kid"))
	if err != nil {
		refuse(w, err)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	f := &follower{w: w, conn: http.NewResponseController(w), end: cancel, logs: s.logs, kid: kid.Name, session: kid.Session}
	marks, lost := startAt(s.logs, r.Header.Get("Last-Event-ID"))
	f.tail = logtail.New(s.logs, marks, fmt.Appendf(nil, `"kid":%q`, kid.Name))
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	f.beat()
	for _, daemon := range lost {
		f.gap(daemon, "where to go on is not known: what came before is left out")
	}
	f.run(ctx, s.ending)
}

// follower sends one client a kid's events. Only one goroutine uses it.
type follower struct {
	w            http.ResponseWriter
	conn         *http.ResponseController
	end          func() // ends following
	tail         *logtail.Tail
	logs         string // directory
	kid, session string
}

func (f *follower) run(ctx context.Context, ending <-chan struct{}) {
	poll, beat := time.NewTicker(pollEvery), time.NewTicker(beatEvery)
	defer poll.Stop()
	defer beat.Stop()
	for ctx.Err() == nil {
		f.tail.Poll(ctx, logtail.Handler{Line: f.line, Moved: f.moved, Gone: f.gone}) // a log that cannot be read is tried again
		select {
		case <-ctx.Done():
		case <-ending:
			return
		case <-beat.C:
			f.beat()
		case <-poll.C:
		}
	}
}

// line sends a record of the kid; that of its destruction is the last.
func (f *follower) line(line []byte, log string, off int64) {
	var r audit.Record
	if json.Unmarshal(line, &r) != nil || r.Kid != f.kid || r.Session != "" && r.Session != f.session {
		return
	}
	at := f.tail.Marks[log]
	at.Pos = off + int64(len(line)) + 1
	f.send(r.Event, line, f.id(log, at))
	if r.Event == audit.EventKidDestroyed && r.Outcome == audit.OutcomeOK {
		f.end()
	}
}

func (f *follower) moved(log string, size int64, _ bool) {
	f.gap(daemonOf(log), fmt.Sprintf("the log was cut or replaced: it is read on from byte %d", size))
}

func (f *follower) gone(log string) { f.gap(daemonOf(log), "the log is gone") }

// gap tells that records of one daemon may be missing.
func (f *follower) gap(daemon, detail string) {
	raw, err := json.Marshal(audit.Record{Version: audit.Version, Time: time.Now().UTC(), Daemon: daemon, Event: audit.EventGap, Kid: f.kid, Session: f.session, Detail: detail})
	if err == nil {
		f.send(audit.EventGap, raw, f.id("", logtail.Mark{}))
	}
}

// send writes one event. A client that takes nothing for long, or is gone, is left: it can go on where it was.
func (f *follower) send(event string, data []byte, id string) {
	f.write(fmt.Appendf(nil, "id: %s\nevent: %s\ndata: %s\n\n", id, event, bytes.TrimSpace(data)))
}

func (f *follower) beat() { f.write([]byte(":\n\n")) }

func (f *follower) write(p []byte) {
	f.conn.SetWriteDeadline(time.Now().Add(patience)) // a connection without deadlines is a test's
	if _, err := f.w.Write(p); err != nil {
		f.end()
		return
	}
	if err := f.conn.Flush(); err != nil {
		f.end()
	}
}

// id says how far every log was read, with at for one of them: that is all that it takes to go on.
func (f *follower) id(log string, at logtail.Mark) string {
	places := map[string]logtail.Mark{}
	for path, m := range f.tail.Marks {
		places[daemonOf(path)] = m
	}
	if log != "" {
		places[daemonOf(log)] = at
	}
	raw, err := json.Marshal(places)
	if err != nil {
		return "" // EventSource then keeps the one before
	}
	return base64.RawURLEncoding.EncodeToString(raw)
}

func daemonOf(log string) string { return filepath.Base(filepath.Dir(log)) }

// startAt returns where to begin reading the logs in dir: where the event with that id left off, else at their ends.
// lost names the daemons whose place in it cannot be right.
func startAt(dir, id string) (marks map[string]logtail.Mark, lost []string) {
	ends := logtail.Ends(dir)
	if id == "" {
		return ends, nil
	}
	places := map[string]logtail.Mark{}
	raw, err := base64.RawURLEncoding.DecodeString(id)
	if err == nil {
		err = json.Unmarshal(raw, &places)
	}
	for _, daemon := range instance.Daemons() {
		log := filepath.Join(dir, daemon, daemon+".jsonl")
		m, ok := places[daemon]
		switch {
		case err == nil && ok && beginsLine(log, m, ends[log]):
			ends[log] = m
		case err != nil || ok:
			lost = append(lost, daemon)
		}
	}
	return ends, lost
}

// beginsLine says whether a line of the log begins at m. What another file or a shorter one means is logtail's business.
func beginsLine(log string, m, end logtail.Mark) bool {
	if m.Pos < 0 {
		return false
	}
	if m.Pos == 0 || m.Inode != end.Inode || m.Pos > end.Pos {
		return true
	}
	f, err := os.Open(log)
	if err != nil {
		return false
	}
	defer f.Close() // only read
	var before [1]byte
	_, err = f.ReadAt(before[:], m.Pos-1)
	return err == nil && before[0] == '\n'
}
