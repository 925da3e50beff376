package credential

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// TestNoAcceptanceAfterTheAcknowledgement is stop case S11: eight goroutines use and introspect a token as
// fast as they can while it is revoked. Nothing that starts after the acknowledgement is accepted, nothing is
// decided after the revocation, and whatever was accepted before was in the caller's hands by then.
func TestNoAcceptanceAfterTheAcknowledgement(t *testing.T) {
	b := newBox(t).start()
	b.put("vendor_api", testValue, "api.vendor.test:443")
	for round := range 20 {
		mark := uint32(testMark + round)
		token := b.mint(fmt.Sprintf("kid%d", round), mark, "vendor_api")
		h := hammer(b, mark, token)
		b.wait("500 acceptances", func() bool { return h.accepted.Load() >= 500 })
		if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{mark}}, nil); err != nil {
			t.Fatal(err)
		}
		acked := time.Now()
		b.wait("refusals after the acknowledgement", func() bool { return h.refused.Load() >= 100 })
		h.stop()
		if late := h.lastStart.Load(); late > acked.UnixNano() {
			t.Fatalf("round %d: a use that started %v after the acknowledgement was accepted", round, time.Duration(late-acked.UnixNano()))
		}
	}
}

// TestAcknowledgementWaitsForDeliveries takes the ordering apart: with an acceptance decided and its answer
// still under way, the revocation is in force at once but is acknowledged only when the answer is delivered.
func TestAcknowledgementWaitsForDeliveries(t *testing.T) {
	b := newBox(t).start()
	b.put("vendor_api", testValue, "api.vendor.test:443")
	token := b.mint("kid1", testMark, "vendor_api")
	req := &wire.ResolveRequest{Mark: testMark, Token: token, Host: "api.vendor.test", Port: 443}

	b.svc.tokens.delivering.RLock()
	if _, _, no := b.svc.use(req); no != nil {
		t.Fatal(no)
	}
	acked := make(chan struct{})
	go func() {
		defer close(acked)
		b.svc.tokens.revokeMarks([]uint32{testMark}, "")
	}()
	b.wait("the token to be forgotten", func() bool { _, _, ok := b.svc.tokens.find(token); return !ok })
	select {
	case <-acked:
		t.Error("acknowledged while an acceptance was under way")
	default:
	}
	b.svc.tokens.delivering.RUnlock()
	<-acked
}

// TestASlowCallerCannotHoldARevocation fills the socket of a caller that never reads.
func TestASlowCallerCannotHoldARevocation(t *testing.T) {
	b := newBox(t).start()
	b.put("vendor_api", testValue, "api.vendor.test:443")
	token := b.mint("kid1", testMark, "vendor_api")
	var stuck sync.WaitGroup
	for range 8 {
		c, err := net.Dial("unix", b.path)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // given up on purpose
		body := url.Values{"token": {token}}.Encode()
		one := fmt.Sprintf("POST /introspect HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-www-form-urlencoded\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
		stuck.Go(func() { // writes until the server gives the connection up
			for {
				if _, err := c.Write([]byte(one)); err != nil {
					return
				}
			}
		})
	}
	start := time.Now()
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("the revocation took %v", took)
	}
	stuck.Wait()
}

type hammering struct {
	accepted, refused atomic.Int64
	lastStart         atomic.Int64 // when the accepted use that started last started, wall nanoseconds
	stop              func()
}

// hammer starts four goroutines that resolve and four that introspect.
func hammer(b *box, mark uint32, token string) *hammering {
	h := &hammering{}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			client := control.NewClient(b.path)
			defer client.CloseIdle()
			form := formClient(b.path)
			defer form.CloseIdleConnections()
			for ctx.Err() == nil {
				start := time.Now().UnixNano()
				ok := false
				if i%2 == 0 {
					ok = client.Call(context.Background(), "POST", "/v1/resolve",
						wire.ResolveRequest{Mark: mark, Token: token, Host: "api.vendor.test", Port: 443}, nil) == nil
				} else {
					got, err := introspect(form, token)
					ok = err == nil && got.Active
				}
				if !ok {
					h.refused.Add(1)
					continue
				}
				h.accepted.Add(1)
				for old := h.lastStart.Load(); start > old && !h.lastStart.CompareAndSwap(old, start); old = h.lastStart.Load() {
				}
			}
		})
	}
	h.stop = func() { cancel(); wg.Wait() }
	return h
}

func BenchmarkResolve(b *testing.B) {
	box := newBox(b).start()
	box.put("vendor_api", testValue, "api.vendor.test:443")
	token := box.mint("kid1", testMark, "vendor_api")
	b.RunParallel(func(pb *testing.PB) {
		client := control.NewClient(box.path)
		defer client.CloseIdle()
		for pb.Next() {
			if err := client.Call(context.Background(), "POST", "/v1/resolve",
				wire.ResolveRequest{Mark: testMark, Token: token, Host: "api.vendor.test", Port: 443}, nil); err != nil {
				b.Error(err)
				return
			}
		}
	})
}

// BenchmarkRevokeUnderLoad measures the acknowledgement while eight goroutines use tokens.
func BenchmarkRevokeUnderLoad(b *testing.B) {
	box := newBox(b).start()
	box.put("vendor_api", testValue, "api.vendor.test:443")
	h := hammer(box, otherMark, box.mint("other", otherMark, "vendor_api"))
	defer h.stop()
	var took []time.Duration
	n := uint32(0)
	for b.Loop() {
		n++
		mark := otherMark + n
		b.StopTimer()
		box.mint(fmt.Sprintf("kid%d", n), mark, "vendor_api")
		b.StartTimer()
		start := time.Now()
		if err := box.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{mark}}, nil); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
}
