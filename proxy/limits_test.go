package proxy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// counting starts a server that counts what each connection brings until it breaks or ends, and sends down
// bytes first.
func counting(t testing.TB, down int64) (at netip.AddrPort, up chan int64) {
	up = make(chan int64, 16)
	at = listen(t, serverAddr, 0, func(c net.Conn) {
		go io.CopyN(c, zeros{}, down)
		n, _ := io.Copy(io.Discard, c)
		up <- n
	})
	return at, up
}

func (w *world) closed(t testing.TB, match func(audit.Record) bool) audit.Record {
	t.Helper()
	return w.records.wait(t, "the end", func(r audit.Record) bool { return r.Event == audit.EventConnClosed && match(r) })
}

// A limit cuts at its very byte, up and down, over all connections of the rule, and the record counts the same.
// The same transfer passes whole where the rule has no limit.
func TestByteLimitsAreExact(t *testing.T) {
	const limit, more = 1<<20 + 12345, 3 << 20
	for _, limited := range []bool{true, false} {
		t.Run(fmt.Sprintf("up, limited %v", limited), func(t *testing.T) {
			w := newWorld(t)
			at, up := counting(t, 0)
			r := rule(apiHost, at.Port(), policy.TCP)
			if limited {
				r.MaxUp = limit
			}
			w.allow(r)
			first := w.dialName(apiHost, at.Port())
			io.CopyN(first, zeros{}, 1000)
			first.CloseWrite()
			got := <-up
			c := w.dialName(apiHost, at.Port())
			io.CopyN(c, zeros{}, more)
			c.CloseWrite()
			got += <-up
			want := int64(1000 + more)
			if limited {
				want = limit
			}
			if got != want {
				t.Errorf("the server got %d bytes, want %d", got, want)
			}
			if !limited {
				return
			}
			rec := w.closed(t, func(r audit.Record) bool { return r.Reason == reason.ByteLimit })
			if rec.Bytes.Up != limit-1000 {
				t.Errorf("recorded %d bytes", rec.Bytes.Up)
			}
			if c, err := w.tryDial(kidAddr, w.transparent); err == nil {
				w.going.Store(c.LocalAddr().String(), netip.AddrPortFrom(w.virtual(apiHost), at.Port()))
				io.WriteString(c, "\x00")
				wantReset(t, c)
			}
			w.wantRefused(reason.ByteLimit)
		})
		t.Run(fmt.Sprintf("down, limited %v", limited), func(t *testing.T) {
			w := newWorld(t)
			at, _ := counting(t, more)
			r := rule(apiHost, at.Port(), policy.TCP)
			want := int64(more)
			if limited {
				r.MaxDown, want = limit, limit
			}
			w.allow(r)
			c := w.dialName(apiHost, at.Port())
			n, err := io.CopyN(io.Discard, c, more)
			if n != want || limited && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("got %d bytes and %v, want %d", n, err, want)
			}
			if limited {
				rec := w.closed(t, func(r audit.Record) bool { return r.Reason == reason.ByteLimit })
				if rec.Bytes.Down != limit {
					t.Errorf("recorded %d bytes", rec.Bytes.Down)
				}
			}
		})
	}
}

// A limit that comes with a newer policy holds for connections that are open, and counts what they have moved.
func TestByteLimitOfANewerPolicy(t *testing.T) {
	w := newWorld(t)
	at, up := counting(t, 0)
	r := rule(apiHost, at.Port(), policy.TCP)
	w.allow(r)
	c := w.dialName(apiHost, at.Port())
	io.CopyN(c, zeros{}, 5000)
	waitUntil(t, "the bytes pass", func() bool {
		live := w.proxy.sessions.find(kidAddr).live() // none before the connection is taken
		return len(live) > 0 && live[0].up.Load() == 5000
	})
	r.MaxUp = 8000
	w.allow(r)
	io.CopyN(c, zeros{}, 1<<20)
	if got := <-up; got != 8000 {
		t.Errorf("the server got %d bytes", got)
	}
}

// Judged requests: the answer breaks off at the limit, HTTP/1.1 and HTTP/2.
func TestByteLimitOfRequests(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("h2 %v", h2), func(t *testing.T) {
			w := newWorld(t)
			at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.CopyN(rw, zeros{}, 4<<20) }))
			w.allowInspected(at, func(r *policy.Rule) { r.MaxDown = 1 << 20 })
			c := w.h2client(at)
			if !h2 {
				c.Transport.(*http.Transport).Protocols.SetHTTP1(true)
				c.Transport.(*http.Transport).Protocols.SetHTTP2(false)
			}
			resp, err := c.Get(urlOf(at, "/"))
			must(t, err)
			if n, err := io.Copy(io.Discard, resp.Body); err == nil || n >= 1<<20 {
				t.Errorf("got %d bytes, %v", n, err)
			}
			rec := w.records.wait(t, "the cut", func(r audit.Record) bool { return r.Event == audit.EventRequest && r.Reason == reason.ByteLimit })
			if rec.Outcome != audit.OutcomeDeny {
				t.Errorf("outcome %s", rec.Outcome)
			}
			conn := w.proxy.sessions.find(kidAddr)
			if _, down := conn.usage.quota(&conn.current().spec.Allow[0], at.Port()).sum(); down != 1<<20 {
				t.Errorf("%d bytes came down", down)
			}
		})
	}
}

// Once a limit is spent the next request is refused in words: on the same connection with HTTP/2, on the next one
// with HTTP/1.1, whose connection the broken answer ended. Without the limit the same requests pass.
func TestRequestsBehindASpentLimit(t *testing.T) {
	const size = 1 << 20
	for _, limit := range []int64{size / 2, 0} {
		t.Run(fmt.Sprintf("h2, limit %d", limit), func(t *testing.T) {
			w := newWorld(t)
			at := w.h2web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.CopyN(rw, zeros{}, size) }))
			w.allowInspected(at, func(r *policy.Rule) { r.MaxDown = limit })
			c := w.h2client(at)
			for i := range 2 {
				resp, err := c.Get(urlOf(at, "/"))
				must(t, err)
				if i == 1 && limit != 0 {
					if p := problemOf(t, resp); resp.StatusCode != 403 || p.Reason != reason.ByteLimit || p.Hint == "" {
						t.Errorf("%d %+v", resp.StatusCode, p)
					}
					continue
				}
				if n, err := io.Copy(io.Discard, resp.Body); (n == size && err == nil) != (limit == 0) {
					t.Errorf("answer %d: %d bytes, %v", i, n, err)
				}
				resp.Body.Close()
			}
		})
		t.Run(fmt.Sprintf("h1, limit %d", limit), func(t *testing.T) {
			w := newWorld(t)
			at := w.web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.CopyN(rw, zeros{}, size) }))
			r := rule(apiHost, at.Port(), policy.HTTP)
			r.MaxDown = limit
			w.allow(r)
			first := w.dialName(apiHost, at.Port())
			io.WriteString(first, "GET / HTTP/1.1\r\nHost: "+apiHost+"\r\nConnection: close\r\n\r\n")
			if n, _ := io.Copy(io.Discard, first); (n > size) != (limit == 0) {
				t.Errorf("%d bytes", n)
			}
			want := []reason.Code{reason.OK}
			if limit != 0 {
				want[0] = reason.ByteLimit
			}
			resps := ask(t, w.dialName(apiHost, at.Port()), get(apiHost, "/"), 1)
			if got := codes(t, resps); got[0] != want[0] || limit != 0 && resps[0].StatusCode != 403 {
				t.Errorf("%s %v, want %v", resps[0].Status, got, want)
			}
		})
	}
}

// Connections and requests each have a rate of their own. Without it the same ones all pass.
func TestRateOfARule(t *testing.T) {
	for _, limited := range []bool{true, false} {
		t.Run(fmt.Sprintf("limited %v", limited), func(t *testing.T) { testRateOfARule(t, limited) })
	}
}

func testRateOfARule(t *testing.T, limited bool) {
	w := newWorld(t)
	at := w.web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "ok") }))
	tcp := listen(t, serverAddr, 0, echo)
	r, raw := rule(apiHost, at.Port(), policy.HTTP), rule(fileHost, tcp.Port(), policy.TCP)
	if limited {
		r.Rate, raw.Rate = 2, 1
	}
	w.allow(r, raw)
	c := w.dialName(apiHost, at.Port())
	resps := ask(t, c, strings.Repeat(get(apiHost, "/"), 3), 3)
	got := codes(t, resps)
	if got[0] != reason.OK || (got[2] == reason.RateLimit && resps[2].StatusCode == 403) != limited {
		t.Errorf("reasons %v", got)
	}
	refused := 0
	for range 3 {
		c := w.dialName(fileHost, tcp.Port())
		io.WriteString(c, "\x00")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			refused++
		}
	}
	if (refused > 0) != limited {
		t.Errorf("%d connections were refused", refused)
	}
	if limited {
		w.wantRefused(reason.RateLimit)
	}
}

// A bucket never lets more pass than its burst and its rate, and fills again.
func TestBucket(t *testing.T) {
	var b bucket
	now := time.Now()
	pass := func(tries int) (n int) {
		for range tries {
			if b.take(now, 10, 20) {
				n++
			}
		}
		return n
	}
	if n := pass(100); n != 20 {
		t.Errorf("%d at once", n)
	}
	now = now.Add(time.Second / 2)
	if n := pass(100); n != 5 {
		t.Errorf("%d after half a second", n)
	}
	now = now.Add(time.Hour)
	if n := pass(100); n != 20 {
		t.Errorf("%d after an hour", n)
	}
}

// A rule ends at its deadline: what lives on it is cut, by itself, and new connections are told why. What other
// rules allow is left alone.
func TestRulesRunOut(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	short, long := rule(apiHost, at.Port(), policy.TCP), rule(fileHost, at.Port(), policy.TCP)
	short.Grant = "01GRANT"
	short.Expires = int64(bootclock.Now() + 300*time.Millisecond)
	long.Expires = int64(bootclock.Now() + time.Hour)
	w.allow(short, long)
	doomed, kept := w.dialName(apiHost, at.Port()), w.dialName(fileHost, at.Port())
	for _, c := range []net.Conn{doomed, kept} {
		io.WriteString(c, "x")
		_, err := io.ReadFull(c, make([]byte, 1))
		must(t, err)
	}
	wantCut(t, doomed)
	w.closed(t, func(r audit.Record) bool { return r.Reason == reason.Expired && r.Dst.Name == apiHost })
	io.WriteString(kept, "y")
	_, err := io.ReadFull(kept, make([]byte, 1))
	must(t, err)
	c, head := w.connect(fmt.Sprintf("%s:%d", apiHost, at.Port()))
	body := make([]byte, 4096)
	n, _ := c.Read(body)
	if !strings.Contains(head, " 403 ") || !strings.Contains(string(body[:n]), `"reason":"expired"`) ||
		!strings.Contains(string(body[:n]), fmt.Sprintf(`"grant":"tagout grant kid1 %s:%d --for`, apiHost, at.Port())) {
		t.Errorf("refusal %s%s", head, body[:n])
	}
	if e := w.proxy.sessions.find(kidAddr); e.current().until == 0 {
		t.Error("the next deadline is forgotten")
	}
}

// The control of TestRulesRunOut: without a deadline what lived on the rule goes on living past that time, and
// new connections pass.
func TestRulesWithoutADeadlineGoOn(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	short, endless := rule(fileHost, at.Port(), policy.TCP), rule(apiHost, at.Port(), policy.TCP)
	short.Expires = int64(bootclock.Now() + 100*time.Millisecond)
	w.allow(short, endless)
	c := w.dialName(apiHost, at.Port())
	doomed := w.dialName(fileHost, at.Port())
	wantCut(t, doomed) // the deadline is over, and the alarm has rung
	for _, c := range []net.Conn{c, w.dialName(apiHost, at.Port())} {
		io.WriteString(c, "x")
		_, err := io.ReadFull(c, make([]byte, 1))
		must(t, err)
	}
}

// Nobody has to ask: where the alarm did not ring, the rule is gone all the same.
func TestDeadlineHoldsWithoutTheAlarm(t *testing.T) {
	w := newWorld(t)
	r := rule(apiHost, 443, policy.TCP)
	r.Expires = int64(bootclock.Now() + 50*time.Millisecond)
	w.allow(r)
	e := w.proxy.sessions.find(kidAddr)
	e.mu.Lock()
	e.alarm.Stop()
	e.mu.Unlock()
	waitUntil(t, "the deadline", func() bool { return e.current().connect(target{apiHost, 443}).Reason == reason.Expired })
}

// E25: one kid that opens as fast as it can is refused beyond its share, by number, while another one's
// connections all pass.
func TestOneKidCannotStarveAnother(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.ConnsPerSession, c.Limits.NewConnsPerSecond = 40, 20 })
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	other := w.session(rule(apiHost, at.Port(), policy.TCP))
	otherAddr := netip.MustParseAddr("127.0.1.9")
	other.ID, other.Kid, other.Addr = "01QUIET", "quiet", otherAddr
	_, err := w.proxy.Put(other)
	must(t, err)
	stop := make(chan struct{})
	var noisy sync.WaitGroup
	var opened atomic.Int64
	for range 4 {
		noisy.Go(func() {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: kidAddr.AsSlice()}}
			for {
				select {
				case <-stop:
					return
				default:
				}
				opened.Add(1)
				c, err := d.Dial("tcp4", w.transparent.String()) // the reset may come before Dial is done
				if err == nil {
					w.going.Store(c.LocalAddr().String(), netip.AddrPortFrom(w.virtual(apiHost), at.Port()))
					c.Close()
				}
			}
		})
	}
	ask := func() {
		c, err := w.tryDial(otherAddr, w.transparent)
		must(t, err)
		w.going.Store(c.LocalAddr().String(), netip.AddrPortFrom(w.virtual(apiHost), at.Port()))
		io.WriteString(c, "x")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatalf("the quiet kid: %v", err)
		}
		c.Close()
	}
	for range 30 {
		ask()
	}
	waitUntil(t, "a flood", func() bool { return opened.Load() > 200 })
	close(stop)
	noisy.Wait()
	ask()    // connections are taken in order: all of the noisy kid's are
	w.stop() // tells what is not told yet
	var recorded, records uint64
	for _, r := range w.records.all() {
		if r.Event == audit.EventConnOpened && r.Kid == "kid1" {
			recorded += max(r.Count, 1)
			records++
		}
	}
	if recorded != uint64(opened.Load()) {
		t.Errorf("%d connections are recorded of %d", recorded, opened.Load())
	}
	if records > uint64(opened.Load())/2 {
		t.Errorf("%d records for %d connections", records, opened.Load())
	}
}

// The control of the three caps: where they are far away, the same kid opens and keeps what they refuse.
func TestWithoutCapsAKidTakesWhatItWants(t *testing.T) {
	const far = 1 << 30
	w := newWorld(t, func(c *Config) {
		c.Limits.ConnsPerSession, c.Limits.NewConnsPerSecond, c.Limits.BufferPerSession = far, far, far
	})
	at, secure := listen(t, serverAddr, 0, echo), w.tlsServer(echo, apiHost)
	w.allow(rule(apiHost, at.Port(), policy.TCP), rule(apiHost, secure.Port(), policy.TLS))
	for range 60 { // more than 40 at once and more than 20 a second, as in TestOneKidCannotStarveAnother
		c := w.dialName(apiHost, at.Port())
		io.WriteString(c, "x")
		_, err := io.ReadFull(c, make([]byte, 1))
		must(t, err)
	}
	c := w.dialName(apiHost, secure.Port())
	_, err := c.Write(inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x0304}, keyShare: 1800, extensions: true}.message(), 1))
	must(t, err)
	w.records.wait(t, "the connection that TestBufferedBytesAreCapped refuses", func(r audit.Record) bool {
		return r.Event == audit.EventConnOpened && r.Outcome == audit.OutcomeAllow && r.Dst.Proto == string(policy.TLS)
	})
	for _, r := range w.records.all() {
		if r.Reason != reason.OK {
			t.Errorf("%s %s %v", r.Event, r.Outcome, r.Reason)
		}
	}
}

// A kid that makes the proxy keep more than its share is refused, and gets its share back.
func TestBufferedBytesAreCapped(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.BufferPerSession = 1000 })
	at := w.tlsServer(echo, apiHost)
	w.allow(rule(apiHost, at.Port(), policy.TLS))
	c := w.dialName(apiHost, at.Port())
	_, err := c.Write(inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x0304}, keyShare: 1800, extensions: true}.message(), 1))
	must(t, err)
	wantAlert(t, c, alertInternal)
	w.wantRefused(reason.Capacity)
	e := w.proxy.sessions.find(kidAddr)
	waitUntil(t, "the share is given back", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.buffered == 0
	})
}
