package kids

import (
	"fmt"
	"os"
	"strings"
	"testing"
)

// TestEveryNamespaceIsItsOwn: none is the machine's and none a neighbour's, and the cgroup namespace hides where the kid is.
func TestEveryNamespaceIsItsOwn(t *testing.T) {
	b := newBox(t, "tsbnames")
	kinds := []string{"cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"}
	seen := map[string]string{} // namespace -> whose
	for _, kind := range kinds {
		ns, err := os.Readlink("/proc/self/ns/" + kind)
		if err != nil {
			t.Fatal(err)
		}
		seen[ns] = "the machine"
	}
	for kid, p := range map[string]Plan{"k1": plan(), "k2": plan(), "k3": writablePlan()} {
		b.spawn(kid, p)
		r := b.sh(kid, "cd /proc/self/ns && readlink "+strings.Join(kinds, " "))
		own := strings.Fields(r.stdout.String())
		if len(own) != len(kinds) {
			t.Fatalf("%s: %q %q", kid, own, r.stderr.String())
		}
		for _, ns := range own {
			if whose := seen[ns]; whose != "" {
				t.Errorf("%s has %s, which is that of %s", kid, ns, whose)
			}
			seen[ns] = kid
		}
		if inside := b.sh(kid, "cat /proc/self/cgroup").stdout.String(); inside == "" || strings.Contains(inside, b.inst.Name()) {
			t.Errorf("%s sees its place in the machine's cgroups: %q", kid, inside)
		}
		if is, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/time", b.Manager.kids[kid].pid)); err != nil || seen[is] != kid {
			t.Errorf("%s: kid-init's time namespace is %s, %v; its commands have another", kid, is, err)
		}
		offsets := strings.Fields(b.sh(kid, "cat /proc/self/timens_offsets").stdout.String())
		if len(offsets) != 6 || offsets[0] != "monotonic" || !strings.HasPrefix(offsets[1], "-") || offsets[3] != "boottime" || offsets[4] != "0" {
			t.Errorf("%s: its clocks are set off by %q", kid, offsets)
		}
		outside, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", b.Manager.kids[kid].pid)) // the control
		if err != nil || !strings.Contains(string(outside), b.inst.Name()) {
			t.Errorf("from outside %s is in %q, %v: the test shows nothing", kid, outside, err)
		}
	}
}
