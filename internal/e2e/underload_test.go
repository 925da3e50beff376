package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// busyKid fetches from an allowed host and tries a raw address, over and over, until a file appears. It prints
// a line an attempt: ok, refused (at once) or hung (5 s and more).
const busyKid = `
try() { timeout 5 /bin/bash -c "$2"; case $? in 0) echo "$1 ok";; 124) echo "$1 hung";; *) echo "$1 refused";; esac; }
while [ ! -e /workspace/enough ]; do
	try allowed "exec 3<>/dev/tcp/files.vendor.test/80 || exit 1; printf 'GET /hello.txt HTTP/1.1\r\nHost: files.vendor.test\r\nConnection: close\r\n\r\n' >&3; head -1 <&3 | grep -q ' 200 '"
	try denied "exec 3<>/dev/tcp/EVIL/80"
done 2>/dev/null`

// TestKilledUnderLoad kills proxy and dnsfilter with -9 again and again while a kid works (invariant 1): the kid
// sees refusals and no hangs, nothing of it gets out another way, and its road opens again each time.
func TestKilledUnderLoad(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid, probe := box.Spawn(card, hostile(t, box)), box.Spawn(card, hostile(t, box))
	script := strings.Replace(busyKid, "EVIL", box.Net.EvilAddr().String(), 1)
	done := make(chan testenv.Output, 1)
	go func() {
		out, err := box.TryExec(context.Background(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/bash", "-c", script}})
		if err != nil {
			out.Stdout += "broken " + err.Error()
		}
		done <- out
	}()
	for _, daemon := range []string{instance.Proxy, instance.DNSFilter, instance.Proxy, instance.DNSFilter} {
		box.Until(soon, "the road is open", func() error {
			if !reaches(box, probe.Name) {
				return fmt.Errorf("not reached")
			}
			return nil
		})
		box.Kill9(daemon)
		box.WaitHealthy(daemon)
	}
	box.Until(soon, "the road is open after the last kill", func() error {
		if !reaches(box, probe.Name) {
			return fmt.Errorf("not reached")
		}
		return nil
	})
	if out := box.Sh(kid.Name, "touch /workspace/enough"); out.Exit.Code != 0 {
		t.Fatalf("ending the load: %+v", out)
	}
	var out testenv.Output
	select {
	case out = <-done:
	case <-time.After(soon):
		t.Fatal("the load did not end")
	}
	count := func(line string) int { return strings.Count(out.Stdout, line+"\n") }
	if count("allowed ok") == 0 || count("denied refused") == 0 {
		t.Errorf("the load proves nothing: %q", out.Stdout)
	}
	if n := count("denied ok"); n > 0 {
		t.Errorf("a raw address was reached %d times", n)
	}
	if n := count("allowed hung") + count("denied hung"); n > 0 {
		t.Errorf("%d attempts hung instead of being refused", n)
	}
	if strings.Contains(out.Stdout, "broken") {
		t.Errorf("the exec broke: %q", out.Stdout)
	}
	if _, n := box.Net.Attacker.Total(); n != 0 {
		t.Errorf("%d bytes reached the attacker", n)
	}
}
