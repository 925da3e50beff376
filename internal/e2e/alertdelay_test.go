package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// alertLimit is how long after a denied attempt its first alert has left.
const alertLimit = time.Second

// tryPy tries destinations one after the other and says when, on the clock that the webhook has, too. In between it
// makes as many other denied attempts as it can, where it is to flood.
const tryPy = `
import errno, json, os, socket, sys, time
addr, first, count, flood = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "flood"
def attempt(port):
    s = socket.socket()
    try:
        s.connect((addr, port))
    except OSError as e:
        return errno.errorcode[e.errno]
    finally:
        s.close()
def lookup(name):
    try:
        socket.getaddrinfo(name, 80)
    except socket.gaierror:
        return "refused"
def now(): # a kid's monotonic clock starts with the kid
    return time.clock_gettime(time.CLOCK_BOOTTIME)
out, made = [], 0
for i in range(count):
    until = time.monotonic() + 0.35
    while time.monotonic() < until:
        if not flood:
            time.sleep(0.01)
            continue
        for port in range(20000, 20060):
            attempt(port)
            made += 1
        lookup("loop.evil.test")
    at = now()
    result = attempt(first + i)
    out.append({"to": "%s:%d" % (addr, first + i), "at": at, "result": result})
    if i % 3 == 0:
        name = "n%d.evil.test" % (first + i)
        at = now()
        out.append({"to": name, "at": at, "result": lookup(name)})
print(json.dumps({"tries": out, "flood": made}))
`

type tried struct {
	Tries []struct {
		To     string  `json:"to"`
		At     float64 `json:"at"` // CLOCK_BOOTTIME, seconds
		Result string  `json:"result"`
	} `json:"tries"`
	Flood int `json:"flood"`
}

// tryPorts runs tryPy in the kid.
func tryPorts(box *testenv.Box, kid wire.Kid, first, count int, how string) (tried, error) {
	var out tried
	got, err := box.TryExec(context.Background(), kid.Name, wire.ExecRequest{Argv: []string{
		"/usr/bin/python3", "-c", tryPy, box.Net.EvilAddr().String(), fmt.Sprint(first), fmt.Sprint(count), how}})
	if err != nil {
		return out, err
	}
	if err := json.Unmarshal([]byte(got.Stdout), &out); err != nil {
		return out, fmt.Errorf("%w: %q %q", err, got.Stdout, got.Stderr)
	}
	return out, nil
}

// firstAlert returns when the webhook had its first alert of the kid's towards the destination.
func firstAlert(box *testenv.Box, kid wire.Kid, to string) time.Duration {
	box.T.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	a, err := box.Net.Webhook.Wait(ctx, "an alert of "+kid.Name+" towards "+to, func(r audit.Record) bool {
		if r.Kid != kid.Name || r.Outcome != audit.OutcomeDeny || r.Dst == nil {
			return false
		}
		return r.Dst.Name == to || r.Dst.Addr.IsValid() && netip.AddrPortFrom(r.Dst.Addr, r.Dst.Port).String() == to
	})
	if err != nil {
		box.T.Error(err)
		return 0
	}
	return a.At
}

// wantInTime checks that each attempt was denied, and alerted by its destination in time.
func wantInTime(box *testenv.Box, kid wire.Kid, what string, got tried) {
	box.T.Helper()
	slowest := time.Duration(0)
	for _, try := range got.Tries {
		if want := "EPERM"; try.Result != want && (strings.Contains(try.To, ":") || try.Result != "refused") {
			box.T.Errorf("%s: %s ended with %q", what, try.To, try.Result)
		}
		took := firstAlert(box, kid, try.To) - time.Duration(try.At*float64(time.Second))
		if took > alertLimit {
			box.T.Errorf("%s: %s was alerted after %v, want %v at most", what, try.To, took, alertLimit)
		}
		slowest = max(slowest, took)
	}
	box.T.Logf("%s: %d attempts beside %d others, the slowest alert after %v", what, len(got.Tries), got.Flood, slowest)
}

// TestAlertsLeaveWithinASecond: from a kid's denied connect or lookup to the webhook, for each new destination of a kid
// that does little else, of the same beside another one's flood, and of the flooding kid itself.
func TestAlertsLeaveWithinASecond(t *testing.T) {
	t.Parallel()
	box := start(t)
	calm, loud := box.Spawn(bareCard, nil), box.Spawn(bareCard, nil)
	got, err := tryPorts(box, calm, 1000, 4, "calm")
	if err != nil {
		t.Fatal(err)
	}
	wantInTime(box, calm, "alone", got)

	flood := make(chan tried, 1)
	go func() {
		got, err := tryPorts(box, loud, 3000, 12, "flood")
		if err != nil {
			t.Error(err)
		}
		flood <- got
	}()
	got, err = tryPorts(box, calm, 2000, 10, "calm")
	if err != nil {
		t.Error(err)
	}
	wantInTime(box, calm, "beside a flood", got)
	if got = <-flood; got.Flood < 20_000 {
		t.Errorf("%d attempts are no flood", got.Flood)
	}
	wantInTime(box, loud, "in its own flood", got)
}
