package provider

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// maxAnswer bounds a provider's answer, in bytes.
const maxAnswer = 256 << 10

// maxWait bounds how long a provider can ask to be left alone.
const maxWait = 5 * time.Minute

// Call carries the requests of one provider. Safe for concurrent use.
type Call struct {
	HTTP    *http.Client  // NewHTTP's; it follows no redirect
	Timeout time.Duration // of one request with its answer; more than 0
}

// ask is one request.
type ask struct {
	what   string // for messages: "logging in"
	method string
	url    string
	header http.Header // owned by the request
	body   []byte      // wiped when the call is over
	sign   func(*http.Request) error
}

// answer is what came back. The caller wipes body.
type answer struct {
	status int
	body   []byte
	at     time.Time // when it was made, by the provider's clock; ours where it does not say
}

// do carries a out once. The error is an *Error: Unreachable only where no byte of the request was sent.
func (c Call) do(ctx context.Context, a ask) (answer, error) {
	defer clear(a.body)
	ctx, cancel := context.WithTimeout(ctx, c.Timeout)
	defer cancel()
	var sent atomic.Bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { sent.Store(true) }})
	req, err := http.NewRequestWithContext(ctx, a.method, a.url, bytes.NewReader(a.body))
	if err != nil {
		return answer{}, fail(Refused, "%s: the address cannot be read", a.what)
	}
	if a.header != nil {
		req.Header = a.header
	}
	req.GetBody = nil // net/http never sends it a second time by itself
	req.Header.Set("User-Agent", "tagout-credd")
	if a.sign != nil {
		if err := a.sign(req); err != nil {
			return answer{}, fail(Refused, "%s: the request cannot be signed", a.what)
		}
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return answer{}, silence(a.what, sent.Load(), err)
	}
	defer resp.Body.Close() // read as far as it counts
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	switch {
	case err != nil:
		clear(raw)
		return answer{}, fail(Unsure, "%s: its answer broke off", a.what)
	case len(raw) > maxAnswer:
		clear(raw)
		return answer{}, fail(Malformed, "%s: its answer is longer than %d bytes", a.what, maxAnswer)
	}
	out := answer{status: resp.StatusCode, body: raw, at: time.Now()}
	if at, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		out.at = at
	}
	if err := judge(a.what, resp); err != nil {
		clear(raw)
		return answer{}, err
	}
	return out, nil
}

// judge is nil for answers that mean what their body says: success, and refusals whose code the body names.
func judge(what string, resp *http.Response) error {
	switch s := resp.StatusCode; {
	case s >= 200 && s < 300, s >= 400 && s < 500 && s != http.StatusTooManyRequests && s != http.StatusRequestTimeout:
		return nil
	case s >= 300 && s < 400:
		return fail(Malformed, "%s: it answered with a redirect (%d), and none is followed: write the address that it redirects to", what, s)
	case s == http.StatusTooManyRequests, s == http.StatusServiceUnavailable: // both say: not now
		e := fail(Unreachable, "%s: it asks to be asked later (%d)", what, s)
		e.Wait = retryAfter(resp.Header.Get("Retry-After"))
		return e
	default:
		return fail(Unsure, "%s: it failed (%d)", what, s)
	}
}

// silence words an error of net/http, which names addresses and nothing that was sent but may quote what came.
func silence(what string, sent bool, err error) error {
	kind := Unsure
	if !sent {
		kind = Unreachable
	}
	var refused *addressError
	switch {
	case errors.As(err, &refused):
		return fail(Unreachable, "%s: %v", what, refused)
	case errors.Is(err, context.DeadlineExceeded):
		return fail(kind, "%s: no answer in time", what)
	case errors.Is(err, context.Canceled):
		return fail(kind, "%s: given up", what)
	case isTLS(err):
		return fail(kind, "%s: its certificate is not trusted: see ca in the box's configuration", what)
	}
	return fail(kind, "%s: it cannot be reached", what)
}

func retryAfter(s string) time.Duration {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil {
		return 0
	}
	return min(time.Duration(n)*time.Second, maxWait)
}

// read decodes the whole of a JSON answer into out. The decoder's own words are left out: they may quote a secret.
func (a answer) read(what string, out any) error {
	dec := json.NewDecoder(bytes.NewReader(a.body))
	if err := dec.Decode(out); err != nil {
		return fail(Malformed, "%s: its answer cannot be read", what)
	}
	if dec.More() {
		return fail(Malformed, "%s: its answer holds more than one document", what)
	}
	return nil
}

// no is the error for an answer that is not a success. code is the provider's own word for why; it is shown only
// where it looks like one.
func (a answer) no(what, code string) error {
	if code == "" || len(code) > 64 || strings.Trim(code, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") != "" {
		return fail(Refused, "%s: it refuses (%d)", what, a.status)
	}
	return fail(Refused, "%s: it refuses (%d %s)", what, a.status, code)
}

func (a answer) ok() bool { return a.status >= 200 && a.status < 300 }

// jsonAsk is an ask with a JSON body; in is plain data, which always encodes.
func jsonAsk(what, method, url string, header http.Header, in any) ask {
	if header == nil {
		header = http.Header{}
	}
	a := ask{what: what, method: method, url: url, header: header}
	if in != nil {
		a.body, _ = json.Marshal(in) // strings, numbers and lists of them
		header.Set("Content-Type", "application/json")
	}
	return a
}

func formAsk(what, url string, header http.Header, form url.Values) ask {
	if header == nil {
		header = http.Header{}
	}
	header.Set("Content-Type", "application/x-www-form-urlencoded")
	return ask{what: what, method: http.MethodPost, url: url, header: header, body: []byte(form.Encode())}
}
