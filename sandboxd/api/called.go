package api

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/audit"
	"tagout/internal/tally"
)

// Call is what a call was made with, for its record.
type Call struct {
	args   string // the body, as far as it is recorded
	length int    // of the whole
	sum    [sha256.Size]byte
	kid    string
}

// keptBody is how much of a body a record is made of, in bytes. The log redacts and then cuts it to less.
const keptBody = 64 << 10

type callKey struct{}

// WithCall returns a context whose request's arguments are noted in the Call.
func WithCall(ctx context.Context) (context.Context, *Call) {
	c := &Call{}
	return context.WithValue(ctx, callKey{}, c), c
}

// noteCall notes the body of the call, and which kid it is about.
func noteCall(r *http.Request, body []byte) {
	c, _ := r.Context().Value(callKey{}).(*Call)
	if c == nil {
		return
	}
	c.length, c.sum = len(body), sha256.Sum256(body)
	c.args = arguments(body)
}

// noteKid notes which kid a call is about.
func noteKid(r *http.Request) {
	if c, _ := r.Context().Value(callKey{}).(*Call); c != nil {
		c.kid = r.PathValue("kid")
	}
}

// Record is the record of a call that was answered with status, 0: it was broken off before.
func (c *Call) Record(actor string, r *http.Request, status int, took time.Duration) audit.Record {
	rec := audit.Record{Event: audit.EventAPICalled, Actor: actor, Outcome: audit.OutcomeOK, Fields: map[string]string{
		"method": r.Method, "path": shorten(r.URL.Path), "from": r.RemoteAddr, "status": fmt.Sprint(status), "took": took.Round(time.Microsecond).String(),
	}}
	switch {
	case status == http.StatusForbidden || status == http.StatusTooManyRequests:
		rec.Outcome = audit.OutcomeDeny
	case status >= http.StatusBadRequest || status == 0:
		rec.Outcome = audit.OutcomeFail
	}
	if r.Method != http.MethodGet {
		rec.Kid = shorten(c.kid) // reading is nothing that is done to it
	}
	if r.URL.RawQuery != "" {
		rec.Fields["query"] = r.URL.RawQuery
	}
	if c.length > 0 {
		rec.Fields["arguments"] = c.args
		rec.Fields["arguments_sha256"], rec.Fields["arguments_bytes"] = hex.EncodeToString(c.sum[:]), fmt.Sprint(c.length)
	}
	return rec
}

func shorten(s string) string {
	const most = 4 << 10
	return s[:min(len(s), most)]
}

// arguments is a body as it is recorded: without what is likely to be secret, and no record's business, the values of
// environment variables and what a command is given to read. What is no JSON document is recorded as it is.
func arguments(body []byte) string {
	out := body
	var doc any
	if json.Unmarshal(body, &doc) == nil {
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(false)
		if enc.Encode(withoutValues(doc)) == nil { // it was JSON
			out = bytes.TrimSuffix(b.Bytes(), []byte("\n"))
		}
	}
	return string(out[:min(len(out), keptBody)])
}

func withoutValues(doc any) any {
	switch d := doc.(type) {
	case []any:
		for i := range d {
			d[i] = withoutValues(d[i])
		}
	case map[string]any:
		for key, value := range d {
			switch env, isMap := value.(map[string]any); {
			case key == "env" && isMap:
				for name := range env {
					env[name] = audit.Redacted
				}
			case key == "stdin":
				d[key] = audit.Redacted
			default:
				d[key] = withoutValues(value)
			}
		}
	}
	return doc
}

// unixLines is how many calls over the unix socket are recorded one by one in a second, of those that change nothing.
const unixLines = 50

// recorded has every call of h recorded: whoever is root asks over the unix socket as whoever has a key does over TCP.
// Repeated questions within a second are counted.
func recorded(h http.Handler, log Recorder, questions *tally.Tally) http.Handler {
	if log == nil {
		return h
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		began := time.Now()
		ctx, call := WithCall(r.Context())
		answer := &Status{ResponseWriter: w}
		defer func() {
			record := func() audit.Record {
				rec := call.Record(actor(ctx), r, answer.Code, time.Since(began))
				rec.Fields["from"] = "unix"
				return rec
			}
			if r.Method == http.MethodGet && answer.Code < http.StatusBadRequest {
				questions.Add("unix", actor(ctx)+" "+r.URL.Path, record)
				return
			}
			log.Log(record())
		}()
		h.ServeHTTP(answer, r.WithContext(ctx))
		if answer.Code == 0 {
			answer.Code = http.StatusOK
		}
	})
}

// Status is a ResponseWriter that notes what was answered.
type Status struct {
	http.ResponseWriter
	Code int // 0: nothing yet
}

func (s *Status) WriteHeader(code int) {
	if s.Code == 0 && (code >= http.StatusOK || code == http.StatusSwitchingProtocols) {
		s.Code = code
	}
	s.ResponseWriter.WriteHeader(code)
}

func (s *Status) Write(p []byte) (int, error) {
	if s.Code == 0 {
		s.Code = http.StatusOK
	}
	return s.ResponseWriter.Write(p)
}

// Unwrap lets http.ResponseController flush and set deadlines.
func (s *Status) Unwrap() http.ResponseWriter { return s.ResponseWriter }
