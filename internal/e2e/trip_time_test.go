package e2e

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestTripsComeWithinASecond: from the moment at which a kid breaks a rule until its tag hangs. A busy machine may be
// late once, and is given three tries; a watch that is too slow by its nature is late in each.
func TestTripsComeWithinASecond(t *testing.T) {
	t.Parallel()
	box := start(t)
	for name, c := range map[string]struct{ rule, do string }{
		"an event":        {"{on: exec, paths: [/usr/bin/tac]}", "tac </dev/null; sleep 1000"},
		"a record":        {"{on: canary, names: [vault.corp.test]}", "getent hosts vault.corp.test; sleep 1000"},
		"denials":         {"{on: denied, over: 5, within: 1m}", "for i in $(seq 6); do (exec 3<>/dev/tcp/203.0.113.200/81) 2>/dev/null; done; sleep 1000"},
		"a counter":       {"{on: processes, over: 20}", "for i in $(seq 30); do sleep 1000 & done; wait"},
		"bytes":           {"{on: bytesOut, over: 1MiB}", "exec 3<>/dev/tcp/ticks.vendor.test/7000; echo bulk trip >&3; head -c 2000000 /dev/zero | tr '\\0' 'x' >&3; sleep 1000"},
		"a write outside": {"{on: writeOutside}", "echo a >/dev/shm/x; sleep 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			box := box.For(t)
			var late time.Duration
			for range 3 {
				kid := box.Spawn(strings.Replace(card, "maxTime: 60s}", "maxTime: 60s, trip: ["+c.rule+"]}", 1), hostile(t, box))
				running(t, box, kid.Name, "/bin/bash", "-c", "date +%s%N >/workspace/at; "+c.do)
				tag := waitTrip(box, kid.Name)
				raw, err := os.ReadFile(filepath.Join(box.Inst.KidDir(kid.Name), "workspace", "at"))
				if err != nil {
					t.Fatal(err)
				}
				at, err := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
				if err != nil {
					t.Fatal(err)
				}
				late = tag.Placed.Sub(time.Unix(0, at))
				t.Logf("tagged %v after it broke the rule", late)
				box.Destroy(kid.Name)
				if late < time.Second {
					return
				}
			}
			t.Errorf("the last of three tags came %v after the rule was broken", late)
		})
	}
}
