package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// claims answers what the proxy asks before it resolves a wildcard name.
type claims struct {
	*fakeNames
	claim func(ctx context.Context, mark uint32, name string) error
}

func (c claims) Claim(ctx context.Context, mark uint32, name string) error {
	return c.claim(ctx, mark, name)
}

// Claim fails a test that did not say how dnsfilter answers: names that rules spell out are never claimed.
func (f *fakeNames) Claim(context.Context, uint32, string) error {
	panic("unexpected claim of a name")
}

// TestWildcardNamesAreClaimedBeforeTheyAreResolved: by way of the explicit proxy dnsfilter never saw the name,
// and a query for it would carry what the kid wrote into it out of the box.
func TestWildcardNamesAreClaimedBeforeTheyAreResolved(t *testing.T) {
	asked := 0
	answer := func(context.Context, uint32, string) error { return nil }
	w := newWorld(t, func(c *Config) {
		c.Limits.Names = 50 * time.Millisecond
		c.Names = claims{c.Names.(*fakeNames), func(ctx context.Context, mark uint32, name string) error {
			if asked++; mark != kidMark || !strings.HasSuffix(name, ".vendor.test") {
				t.Errorf("claimed %q for %#x", name, mark)
			}
			return answer(ctx, mark, name)
		}}
	})
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule("*.vendor.test", at.Port(), policy.TCP), rule(apiHost, at.Port(), policy.TCP))
	ask := func(name string) string {
		c, head := w.connect(fmt.Sprintf("%s:%d", name, at.Port()))
		defer c.Close()
		if strings.Contains(head, " 200 ") {
			_, err := io.WriteString(c, "x")
			must(t, err)
			_, err = io.ReadFull(c, make([]byte, 1))
			must(t, err)
		}
		return head
	}
	for range 2 {
		if head := ask(fileHost); !strings.Contains(head, " 200 ") {
			t.Fatal(head)
		}
	}
	if ask(apiHost); asked != 1 {
		t.Errorf("claimed %d times, want once for the wildcard's name and never for the exact one", asked)
	}
	full := &control.Error{Problem: wire.Problem{Status: http.StatusForbidden, Reason: reason.WildcardLimit, Detail: "too many"}}
	for name, tc := range map[string]struct {
		answer func(context.Context, uint32, string) error
		want   reason.Code
	}{
		"stolen1": {func(context.Context, uint32, string) error { return full }, reason.WildcardLimit},
		"stolen2": {func(context.Context, uint32, string) error { return errors.New("nobody listens") }, reason.Internal},
		"stolen3": {func(ctx context.Context, _ uint32, _ string) error { <-ctx.Done(); return ctx.Err() }, reason.Internal},
	} {
		answer = tc.answer
		w.dns.set(name+".vendor.test", serverAddr)
		before := w.dns.asked.Load()
		if head := ask(name + ".vendor.test"); strings.Contains(head, " 200 ") {
			t.Errorf("%s: %s", name, head)
		}
		w.wantRefused(tc.want)
		if n := w.dns.asked.Load() - before; n != 0 {
			t.Errorf("%s: %d queries left the box", name, n)
		}
	}
}
