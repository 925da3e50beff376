package e2e

import (
	"testing"

	"tagout/internal/audit"
)

// twoFromOnePort opens two connections from one source port to two allowed names and says hello on each.
const twoFromOnePort = `
import socket
for port, host in ((80, "files.vendor.test"), (7000, "ticks.vendor.test"), (443, "api.vendor.test")):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", 45000))
    s.connect((host, port))
    s.send(b"hello\r\n\r\n")
    globals()[host] = s  # stays open
`

// TestOneSourcePortManyNames (invariant 7): connections from one source port to several virtual addresses meet at
// the proxy's one address, where the firewall has to give all but the first another source port. Each record
// still names the process.
func TestOneSourcePortManyNames(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	if out := box.Exec(kid.Name, "/usr/bin/python3", "-c", twoFromOnePort); out.Exit.Code != 0 {
		t.Fatalf("%+v", out)
	}
	translated := 0
	for _, host := range []string{"files.vendor.test", "ticks.vendor.test", "api.vendor.test"} {
		rec := box.WaitRecord("the connection to "+host, func(r *audit.Record) bool {
			return r.Kid == kid.Name && r.Event == audit.EventConnOpened && r.Dst != nil && r.Dst.Name == host
		})
		if rec.Process == nil || rec.Process.PID == 0 || rec.Process.Comm != "python3" {
			t.Errorf("%s from %s: nobody is named: %+v", host, rec.Fields["from"], rec.Process)
		}
		if rec.Fields["from"] != kid.Addr.String()+":45000" {
			translated++
		}
	}
	if translated == 0 {
		t.Error("no connection got another source port: the test shows nothing")
	}
}
