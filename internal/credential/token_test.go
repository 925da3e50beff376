package credential

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (b *box) tokens(query string) []wire.TokenInfo {
	b.t.Helper()
	var out []wire.TokenInfo
	if err := b.call("GET", "/v1/tokens"+query, nil, &out); err != nil {
		b.t.Fatal(err)
	}
	return out
}

// TestTokensAreListedAndRevokedByWhatNamesThem: by kid, session, id and secret, each taking what it means and no more.
func TestTokensAreListedAndRevokedByWhatNamesThem(t *testing.T) {
	for _, c := range []struct {
		name string
		sel  func(kid, id string) wire.TokenSelection
		gone []string // of kid1/a, kid1/b, kid2/a
		ever bool     // kid1's session gets no token any more
	}{
		{"kid", func(kid, _ string) wire.TokenSelection { return wire.TokenSelection{Kid: kid} }, []string{"kid1/a", "kid1/b"}, true},
		{"session", func(string, string) wire.TokenSelection { return wire.TokenSelection{Session: "01KID1"} }, []string{"kid1/a", "kid1/b"}, true},
		{"id", func(_, id string) wire.TokenSelection { return wire.TokenSelection{ID: id} }, []string{"kid1/a"}, false},
		{"secret", func(string, string) wire.TokenSelection { return wire.TokenSelection{Secret: "a"} }, []string{"kid1/a", "kid2/a"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBox(t).start()
			b.put("a", testValue, "api.vendor.test:443")
			b.put("b", testValue, "api.vendor.test:443")
			tokens := map[string]string{}
			for kid, mark := range map[string]uint32{"kid1": testMark, "kid2": otherMark} {
				names := []string{"a"}
				if kid == "kid1" {
					names = append(names, "b")
				}
				var reply wire.MintReply
				if err := b.call("POST", "/v1/sessions", mintFor(kid, mark, names...), &reply); err != nil {
					t.Fatal(err)
				}
				for name, token := range reply.Tokens {
					tokens[kid+"/"+name] = token
				}
			}
			sel := c.sel("kid1", wire.TokenID(tokens["kid1/a"]))
			if all := b.tokens(""); len(all) != 3 {
				t.Fatalf("%d tokens are listed", len(all))
			}
			var reply wire.TokenRevokeReply
			if err := b.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: sel, Reason: "a test"}, &reply); err != nil {
				t.Fatal(err)
			}
			var said []string
			for _, info := range reply.Revoked {
				said = append(said, info.Kid+"/"+info.Secret)
			}
			slices.Sort(said)
			if !slices.Equal(said, c.gone) {
				t.Errorf("it says %v", said)
			}
			for name, token := range tokens {
				if active := b.introspect(token).Active; active == slices.Contains(c.gone, name) {
					t.Errorf("%s is active: %v", name, active)
				}
			}
			if left := b.tokens(""); len(left) != 3-len(c.gone) {
				t.Errorf("%d tokens are listed afterwards", len(left))
			}
			refusedWith(t, b.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: sel}, nil), 404, reason.TokenUnknown)
			recorded := 0
			for _, rec := range b.rec.find(audit.EventTokenRevoked) {
				if rec.Detail == "a test" && rec.Actor != "" {
					recorded++
				}
			}
			if recorded == 0 {
				t.Error("nothing is recorded with the reason")
			}
			_, sessions := b.svc.tokens.size()
			if b.call("DELETE", "/v1/sessions/kid1", nil, nil); sessions > 3 {
				t.Error(sessions)
			}
			if c.ever {
				refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "a"), nil), 423, reason.Stopped)
			}
		})
	}
}

func TestTokenSelectionsThatAreNone(t *testing.T) {
	b := newBox(t).start()
	for _, sel := range []wire.TokenSelection{{}, {Kid: "a", ID: "b"}} {
		refusedWith(t, b.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: sel}, nil), 400, reason.Malformed)
	}
	refusedWith(t, b.call("GET", "/v1/tokens?kid=a&id=b", nil, nil), 400, reason.Malformed)
	refusedWith(t, b.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: wire.TokenSelection{Kid: "none"}}, nil), 404, reason.TokenUnknown)
}

// TestLifetime: the shorter of what is asked for and what the box allows, by CLOCK_BOOTTIME; what has expired is refused
// at once, and taken away, recorded and told to the proxy.
func TestLifetime(t *testing.T) {
	for _, c := range []struct{ box, ask, want time.Duration }{
		{0, 0, 0}, {0, time.Hour, time.Hour}, {time.Hour, 0, time.Hour}, {time.Hour, time.Minute, time.Minute}, {time.Minute, time.Hour, time.Minute},
	} {
		b := newBox(t).start(func(cfg *Config) { cfg.Lifetime = c.box })
		b.put("a", testValue, "api.vendor.test:443")
		req := mintFor("kid1", testMark, "a")
		req.TTL = c.ask
		var reply wire.MintReply
		if err := b.call("POST", "/v1/sessions", req, &reply); err != nil {
			t.Fatal(err)
		}
		if got := b.tokens("")[0].Left; got != c.want {
			t.Errorf("box %v, asked for %v: %v are left", c.box, c.ask, got)
		}
		token := reply.Tokens["a"]
		b.now.Store(int64(max(c.want, 1) - 1))
		if !b.introspect(token).Active {
			t.Errorf("box %v, asked for %v: expired early", c.box, c.ask)
		}
		b.now.Store(int64(c.want))
		if c.want == 0 {
			b.now.Store(int64(10_000 * time.Hour))
		}
		if b.introspect(token).Active != (c.want == 0) {
			t.Errorf("box %v, asked for %v: wrong at its end", c.box, c.ask)
		}
		from, end := b.svc.tokens.listen()
		b.svc.takeExpired()
		b.svc.takeExpired() // once is enough
		end()
		if want := min(1, int(c.want)); len(from) != want || len(b.rec.find(audit.EventTokenExpired)) != want || len(b.tokens("")) != 1-want {
			t.Errorf("box %v, asked for %v: told %d times, %d records, %d listed", c.box, c.ask, len(from), len(b.rec.find(audit.EventTokenExpired)), len(b.tokens("")))
		}
		// An expired session can still be revoked for good.
		if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
			t.Error(err)
		}
		b.stop()
	}
}

// TestALeaseEndsWithItsToken: revoked by secret or by id, or expired, while the session and its other leases go on.
func TestALeaseEndsWithItsToken(t *testing.T) {
	l := &lender{}
	var now atomic.Int64 // CLOCK_BOOTTIME
	b := newBox(t).start(withLender(l), func(c *Config) { c.Boottime = func() time.Duration { return time.Duration(now.Load()) } })
	b.put("lender_key", "the-key-of-the-lender", "lender.test:443")
	b.putLeased("db", wire.Presentation{})
	b.putLeased("queue", wire.Presentation{})
	req := mintFor("kid1", testMark, "db", "queue")
	req.TTL = time.Hour
	var reply wire.MintReply
	if err := b.call("POST", "/v1/sessions", req, &reply); err != nil {
		t.Fatal(err)
	}
	if err := b.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: wire.TokenSelection{Secret: "db"}}, nil); err != nil {
		t.Fatal(err)
	}
	b.wait("the lease of the token to be revoked", func() bool { return l.revoked.Load() == 1 })
	if _, err := b.resolve(testMark, reply.Tokens["queue"], "api.vendor.test", 443); err != nil || l.live.Load() != 1 {
		t.Errorf("the session's other lease: %v, %d live", err, l.live.Load())
	}
	now.Store(int64(2 * time.Hour))
	b.svc.takeExpired()
	b.wait("the lease of the expired token to be revoked", func() bool { return l.revoked.Load() == 2 })
}

// TestTheProxyHearsOfEveryRevocation in the order in which they happen, and of the end of the stream.
func TestTheProxyHearsOfEveryRevocation(t *testing.T) {
	b := newBox(t).start()
	b.put("a", testValue, "api.vendor.test:443")
	heard := make(chan wire.Revoked, 16)
	ended := make(chan error, 1)
	go func() {
		client := control.NewClient(b.path)
		defer client.CloseIdle()
		ended <- client.Each(context.Background(), http.MethodGet, "/v1/revocations", nil, func(raw json.RawMessage) error {
			var r wire.Revoked
			err := json.Unmarshal(raw, &r)
			heard <- r
			return err
		})
	}()
	next := func() wire.Revoked {
		select {
		case r := <-heard:
			return r
		case <-time.After(10 * time.Second):
			t.Fatal("nothing was heard")
			return wire.Revoked{}
		}
	}
	if first := next(); first.All || first.Marks != nil || first.Tokens != nil {
		t.Fatalf("it begins with %+v", first)
	}
	token := b.mint("kid1", testMark, "a")
	b.mint("kid2", testMark+1, "a")
	b.mint("kid3", testMark+2, "a")
	if err := b.call("POST", "/v1/tokens/revoke", wire.TokenRevokeRequest{TokenSelection: wire.TokenSelection{ID: wire.TokenID(token)}}, nil); err != nil {
		t.Fatal(err)
	}
	if r := next(); !slices.Equal(r.Tokens, []string{wire.TokenID(token)}) {
		t.Errorf("heard %+v", r)
	}
	if err := b.call("DELETE", "/v1/sessions/kid2", nil, nil); err != nil {
		t.Fatal(err)
	}
	if r := next(); !slices.Equal(r.Marks, []uint32{testMark + 1}) {
		t.Errorf("heard %+v", r)
	}
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{otherMark, testMark + 2}}, nil); err != nil {
		t.Fatal(err)
	}
	if r := next(); !slices.Equal(r.Marks, []uint32{otherMark, testMark + 2}) {
		t.Errorf("heard %+v", r)
	}
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{All: true}, nil); err != nil {
		t.Fatal(err)
	}
	if r := next(); !r.All {
		t.Errorf("heard %+v", r)
	}
	b.stop()
	if err := <-ended; err != nil {
		t.Errorf("the stream ended with %v", err)
	}
}

// TestASlowListenerIsLetGo: a revocation waits for nobody, and nobody misses one without noticing.
func TestASlowListenerIsLetGo(t *testing.T) {
	b := newBox(t).start()
	from, end := b.svc.tokens.listen()
	defer end()
	for i := range mostUnread + 1 {
		b.svc.tokens.revokeMarks([]uint32{uint32(testMark + i)}, "")
	}
	n := 0
	for range from {
		n++
	}
	if n != mostUnread {
		t.Errorf("%d were heard before the end", n)
	}
}

// TestRevokingWhileMintingAndUsing: whatever comes together, nothing of a revoked session is found, and nothing is left
// behind.
func TestRevokingWhileMintingAndUsing(t *testing.T) {
	b := newBox(t).start()
	b.put("a", testValue, "api.vendor.test:443")
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			client := control.NewClient(b.path)
			defer client.CloseIdle()
			for i := range 30 {
				mark, kid := uint32(testMark+w*100+i), fmt.Sprintf("kid%d-%d", w, i)
				var reply wire.MintReply
				err := client.Call(context.Background(), "POST", "/v1/sessions", mintFor(kid, mark, "a"), &reply)
				var refused *control.Error
				if err != nil && !errors.As(err, &refused) { // refused where everything was revoked meanwhile
					t.Error(err)
				}
				if i%10 == 9 {
					err = client.Call(context.Background(), "POST", "/v1/revoke", wire.RevokeRequest{All: true}, nil)
				} else {
					err = client.Call(context.Background(), "POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{mark}}, nil)
				}
				if err != nil {
					t.Error(err)
				}
				if _, _, ok := b.svc.tokens.find(reply.Tokens["a"]); ok {
					t.Errorf("%s is accepted after it was revoked", kid)
				}
			}
		})
	}
	wg.Wait()
	b.wait("everything to be cleared away", func() bool { s, n := b.svc.tokens.size(); return s == 0 && n == 0 })
}
