package proxy

import (
	"fmt"
	"io"
	"net/netip"
	"testing"
	"time"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// An answer holds for its TTL and no longer, one with a TTL of 0 for one connection, and what is remembered is
// judged like any other answer.
func TestAnswersAreRememberedForTheirTTL(t *testing.T) {
	for _, ttl := range []uint32{0, 60} {
		t.Run(fmt.Sprint("TTL ", ttl), func(t *testing.T) {
			w := newWorld(t)
			w.dns.ttl.Store(ttl)
			at := listen(t, serverAddr, 0, echo)
			r := rule(apiHost, at.Port(), policy.TCP)
			w.allow(r)
			for range 3 {
				c := w.dialName(apiHost, at.Port())
				io.WriteString(c, "x")
				_, err := io.ReadFull(c, make([]byte, 1))
				must(t, err)
			}
			if asked := w.dns.asked.Load(); ttl == 0 && asked != 3 || ttl != 0 && asked != 1 {
				t.Errorf("the resolver was asked %d times", asked)
			}
			r.Addresses = nil // a newer policy does not grant the address any more
			w.allow(r)
			c := w.dialName(apiHost, at.Port())
			io.WriteString(c, "\x00")
			wantReset(t, c)
			w.wantRefused(reason.PrivateAnswer)
		})
	}
}

func TestKnownIsBoundedAndForgets(t *testing.T) {
	var k known
	now := time.Now()
	a := answer{[]netip.Addr{serverAddr}, time.Hour}
	for i := range 3 * knownNames {
		k.put(fmt.Sprint("h", i), a, now)
	}
	if len(k.said) > knownNames {
		t.Errorf("%d names are remembered", len(k.said))
	}
	k.put("x", a, now)
	if k.get("x", now.Add(knownLife)) != nil || k.get("x", now.Add(knownLife-1)) == nil {
		t.Error("an answer of an hour is not remembered for exactly", knownLife)
	}
	k.drop("x")
	if k.get("x", now) != nil {
		t.Error("a dropped name is remembered")
	}
}
