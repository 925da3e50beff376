package proxy

import (
	"strconv"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// ipprotoTCP is TCP's number, as the BPF programs note it.
const ipprotoTCP = 6

// How often and how long the process is looked for: the BPF program notes it before the SYN leaves the kid,
// so it is nearly always there at once.
const (
	processTries = 3
	processPause = time.Millisecond
)

// who returns the process at the other end, nil where it is not known. Looked up once.
func (c *conn) who() *audit.Process {
	if c.p.cfg.Processes == nil {
		return nil
	}
	c.askOnce.Do(func() {
		for try := range processTries {
			if try > 0 {
				time.Sleep(processPause)
			}
			if proc, ok := c.p.cfg.Processes.Process(c.kid, ipprotoTCP); ok {
				c.process = &proc
				return
			}
		}
	})
	return c.process
}

// record begins a record about this connection.
func (c *conn) record(event, outcome string, code reason.Code, detail string) audit.Record {
	r := audit.Record{
		Event: event, Outcome: outcome, Reason: code, Detail: detail,
		Actor: "kid", Conn: c.id, Process: c.who(), Fields: map[string]string{"via": c.via},
	}
	if c.sess != nil {
		s := c.sess.doc
		r.Session, r.Kid, r.Mark, r.Card = s.ID, s.Kid, s.Mark, s.Card
		if rules := c.sess.current(); rules != nil {
			r.Generation = rules.generation
		}
	}
	r.Fields["from"] = c.kid.String()
	c.mu.Lock()
	defer c.mu.Unlock()
	r.Dst = &audit.Dst{Name: c.target.name, Addr: c.orig.Addr(), Real: c.real, Port: c.target.port}
	if r.Dst.Port == 0 {
		r.Dst.Port = c.orig.Port()
	}
	if c.rule != nil {
		r.Rule = c.rule.Line
		r.Dst.Proto = string(c.rule.Protocol)
	}
	return r
}

// recordOpened writes that the connection may go on; once.
func (c *conn) recordOpened(detail string) {
	c.mu.Lock()
	again := c.opened
	c.opened = true
	c.mu.Unlock()
	if again {
		return
	}
	c.p.cfg.Metrics.Connection(c.via, audit.OutcomeAllow, reason.OK)
	c.p.cfg.Audit.Log(c.record(audit.EventConnOpened, audit.OutcomeAllow, reason.OK, detail))
}

// recordRefused writes that the connection goes nowhere. Where it was cut, that is the reason, and not what
// came of it.
func (c *conn) recordRefused(x refusal) {
	c.mu.Lock()
	if c.wasCut {
		x.code, x.detail = c.cutCode, c.cutDetail
	}
	c.mu.Unlock()
	c.p.cfg.Metrics.Connection(c.via, x.outcome(), x.code)
	c.p.cfg.Audit.Log(c.record(audit.EventConnOpened, x.outcome(), x.code, x.detail))
}

// recordUnjudged writes that n requests of an inspected connection were refused before they could be judged.
// Where the connection was cut, that is the reason.
func (c *conn) recordUnjudged(x refusal, n int64) {
	c.mu.Lock()
	if c.wasCut {
		x.code, x.detail = c.cutCode, c.cutDetail
	}
	c.mu.Unlock()
	for range n {
		c.p.cfg.Metrics.Request(x.outcome(), x.code)
	}
	r := c.record(audit.EventRequest, x.outcome(), x.code, x.detail)
	if n > 1 {
		r.Count = uint64(n)
	}
	c.p.cfg.Audit.Log(r)
}

// recordClosed writes the end of a connection that was opened.
func (c *conn) recordClosed() {
	c.mu.Lock()
	opened, code, detail := c.opened, c.cutCode, c.cutDetail
	if detail == "" {
		detail = c.note
	}
	if code == reason.OK {
		code = c.noteCode
	}
	c.mu.Unlock()
	if !opened {
		return
	}
	r := c.record(audit.EventConnClosed, audit.OutcomeOK, code, detail)
	r.Bytes = &audit.Bytes{Up: c.up.Load(), Down: c.down.Load()}
	r.Fields["duration_ms"] = millis(time.Since(c.start))
	c.p.cfg.Audit.Log(r)
}

// recordStray writes that a token was found in a connection that was let pass; nothing where why is about anything else.
func (c *conn) recordStray(why refusal) {
	switch why.code {
	case reason.TokenScope, reason.TokenUnknown, reason.Canary, reason.Tagged:
		c.p.cfg.Audit.Log(c.record(audit.EventTokenRefused, why.outcome(), why.code, why.detail))
	}
}

// recordPolicy writes that a session's policy was taken over or taken away.
func (p *Proxy) recordPolicy(event string, e *entry, outcome string, code reason.Code, detail string, cut int) {
	r := audit.Record{
		Event: event, Outcome: outcome, Reason: code, Detail: detail, Count: uint64(cut), // not negative
		Session: e.doc.ID, Kid: e.doc.Kid, Mark: e.doc.Mark, Card: e.doc.Card,
	}
	if rules := e.current(); rules != nil {
		r.Generation = rules.generation
	}
	p.cfg.Audit.Log(r)
}

func millis(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// refusal is a denial or a failure on its way to the kid and to the log.
type refusal struct {
	code   reason.Code
	detail string
	rule   *policy.Rule // where one decided
}

func (x refusal) Error() string { return x.code.String() + ": " + x.detail }

// outcome tells what Tagout refused from what the world did not give. An upstream that cannot prove its name
// counts as refused.
func (x refusal) outcome() string {
	switch x.code {
	case reason.ResolveFailed, reason.DialFailed, reason.Internal:
		return audit.OutcomeFail
	}
	return audit.OutcomeDeny
}

func refuseBy(d policy.Decision) refusal { return refusal{d.Reason, d.Detail, d.Rule} }
