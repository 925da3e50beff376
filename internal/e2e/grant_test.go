package e2e

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// getFiles fetches from files.vendor.test over plain HTTP and prints the status line.
const getFiles = "exec 3<>/dev/tcp/files.vendor.test/80 || exit 1; printf 'GET /hello.txt HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nConnection: close\\r\\n\\r\\n' >&3; head -1 <&3"

// grant places a grant with the practice authority's signature, or in the request's own words where it names somebody.
func grant(t *testing.T, box *testenv.Box, kid string, r wire.GrantRequest) (wire.Grant, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), soon)
	defer cancel()
	var g wire.Grant
	if r.By != "" {
		err := box.Client(instance.Sandboxd).Call(ctx, http.MethodPost, "/v1/kids/"+kid+"/grants", r, &g)
		return g, err
	}
	order, err := box.Net.Sign(authority.Order{Action: authority.ActionGrant, Kid: kid, Reason: "a test",
		Door: authority.Door{Host: r.Host, Port: r.Port, Protocol: r.Protocol, For: r.For}}, practice.Authority)
	if err == nil {
		err = box.Client(instance.Sandboxd).Call(ctx, http.MethodPost, "/v1/order", order, &wire.OrderReply{Grant: &g})
	}
	return g, err
}

// setPolicy gives a kid another card with the practice authority's signature.
func setPolicy(t *testing.T, box *testenv.Box, kid, text string) (wire.PolicyReply, error) {
	t.Helper()
	sum := sha256.Sum256([]byte(text))
	order := box.Sign(authority.Order{Action: authority.ActionPolicy, Kid: kid, Card: hex.EncodeToString(sum[:])}, practice.Authority)
	order.Card = text
	var reply wire.PolicyReply
	err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodPost, "/v1/order", order, &wire.OrderReply{Policy: &reply})
	return reply, err
}

func reaches(box *testenv.Box, kid string) bool {
	return strings.Contains(box.Exec(kid, "/bin/bash", "-c", getFiles).Stdout, " 200 ")
}

// TestAGrantOpensOneDoorForAWhile: nothing before, one host and port while it holds, nothing after.
func TestAGrantOpensOneDoorForAWhile(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil)
	if reaches(box, kid.Name) {
		t.Fatal("reached without a grant")
	}
	g, err := grant(t, box, kid.Name, wire.GrantRequest{Host: "files.vendor.test", Port: 80, For: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	if !reaches(box, kid.Name) {
		t.Error("not reached with a grant")
	}
	box.WaitRecord("the grant", func(r *audit.Record) bool {
		return r.Event == audit.EventGrantPlaced && r.Kid == kid.Name && r.Fields["grant"] == g.ID && r.Fields["by"] == practice.Authority
	})
	q := url.Values{"by": {practice.Authority}, "reason": {"done"}}
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodDelete, "/v1/kids/"+kid.Name+"/grants/"+g.ID+"?"+q.Encode(), nil, nil); err != nil {
		t.Fatal(err)
	}
	if reaches(box, kid.Name) {
		t.Error("reached after the grant was taken back")
	}
	short, err := grant(t, box, kid.Name, wire.GrantRequest{Host: "files.vendor.test", Port: 80, For: 1500 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if !reaches(box, kid.Name) {
		t.Error("not reached with a short grant")
	}
	box.WaitRecord("the grant's end", func(r *audit.Record) bool {
		return r.Event == audit.EventGrantEnded && r.Fields["grant"] == short.ID
	})
	if reaches(box, kid.Name) {
		t.Error("reached after the grant ran out")
	}
}

func TestWhatAGrantCannotDo(t *testing.T) {
	t.Parallel()
	box := start(t)
	denying := strings.Replace(bareCard, "image: host\n", "image: host\negress:\n  deny:\n    - host: files.vendor.test\n", 1)
	kid := box.Spawn(denying, nil)
	for name, r := range map[string]wire.GrantRequest{
		"a deny rule":      {Host: "files.vendor.test", Port: 80, For: time.Minute},
		"metadata":         {Host: "169.254.169.254", Port: 80, For: time.Minute},
		"an address":       {Host: box.Net.EvilAddr().String(), Port: 80, For: time.Minute},
		"a wildcard":       {Host: "*.vendor.test", Port: 443, For: time.Minute},
		"DNS":              {Host: "ns.vendor.test", Port: 53, For: time.Minute},
		"for ever":         {Host: "api.vendor.test", Port: 443, For: 1000 * time.Hour},
		"no time":          {Host: "api.vendor.test", Port: 443},
		"an odd protocol":  {Host: "api.vendor.test", Port: 443, Protocol: "quic", For: time.Minute},
		"by somebody else": {Host: "api.vendor.test", Port: 443, For: time.Minute, By: "Mallory", Reason: "please"},
	} {
		if _, err := grant(t, box, kid.Name, r); control.Status(err) < 400 || control.Status(err) >= 500 {
			t.Errorf("%s: %v", name, err)
		}
	}
	if reaches(box, kid.Name) {
		t.Error("a denied host was reached")
	}
}

// TestANewPolicyCutsWhatItNoLongerAllows (S10), and only that; a bad one changes nothing.
func TestANewPolicyCutsWhatItNoLongerAllows(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	done := running(t, box, kid.Name, "/bin/bash", "-c", "exec 3<>/dev/tcp/ticks.vendor.test/7000; echo ticks e2e >&3; i=0; while echo $((i++)) >&3; do sleep 0.01; done")
	alive := func(after time.Duration) error {
		if box.Net.Sink.LastByte("e2e") <= after {
			return errors.New("no new tick")
		}
		return nil
	}
	box.Until(soon, "ticks flow", func() error { return alive(0) })
	set := func(text string) (wire.PolicyReply, error) { return setPolicy(t, box, kid.Name, text) }
	if _, err := set(strings.Replace(card, "protocol: tcp", "protocol: tpc", 1)); control.Status(err) != http.StatusUnprocessableEntity {
		t.Errorf("a bad card: %v", err)
	}
	box.WaitRecord("the refused policy", func(r *audit.Record) bool {
		return r.Kid == kid.Name && r.Event == audit.EventPolicyChanged && r.Outcome == audit.OutcomeFail && strings.Contains(r.Detail, "the old policy stays")
	})
	noFiles := strings.Replace(card, "    - host: files.vendor.test\n      ports: [80]\n      protocol: http\n", "", 1)
	if reply, err := set(noFiles); err != nil || reply.Cut != 0 || reply.Generation != 2 {
		t.Fatalf("taking a host away that nobody uses: %+v, %v", reply, err)
	}
	if reaches(box, kid.Name) {
		t.Error("the host that was taken away is still reached")
	}
	seen := practice.Now()
	box.Until(soon, "the allowed connection goes on", func() error { return alive(seen) })
	noTicks := strings.Replace(noFiles, "    - host: ticks.vendor.test\n      ports: [7000]\n      protocol: tcp\n", "", 1)
	reply, err := set(noTicks)
	if err != nil || reply.Cut != 1 {
		t.Fatalf("taking the used host away: %+v, %v", reply, err)
	}
	wait(t, "the command whose connection was cut", done)
	rec := box.WaitRecord("the cut", func(r *audit.Record) bool {
		return r.Kid == kid.Name && r.Event == audit.EventConnClosed && r.Dst != nil && r.Dst.Name == "ticks.vendor.test"
	})
	if rec.Bytes == nil || rec.Bytes.Up == 0 {
		t.Errorf("the cut connection's record: %+v", rec)
	}
	if fmt.Sprint(rec.Reason) == "ok" {
		t.Errorf("the record does not say why it was cut: %+v", rec)
	}
}
