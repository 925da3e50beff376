package e2e

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// lonelyCard has no network, and a secret all the same.
const lonelyCard = `apiVersion: tagout/v1
kind: Card
name: lonely
task: Compute.
image: host
network: none
identity:
  scope:
    - {secret: vendor_api, env: VENDOR_API_KEY}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// TestKidWithoutANetworkIsStopped: every stop layer fires and is observed, with and without the others.
func TestKidWithoutANetworkIsStopped(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(lonelyCard, nil)
	if out := box.Sh(kid.Name, "cat /proc/net/dev"); strings.Contains(out.Stdout, "eth0") || !strings.Contains(out.Stdout, "lo:") {
		t.Errorf("its interfaces: %+v", out)
	}
	for _, to := range []string{"169.254.169.254/80", box.Inst.Gateway().String() + "/53"} {
		if out := box.Exec(kid.Name, "/bin/bash", "-c", "exec 3<>/dev/tcp/"+to); out.Exit.Code == 0 {
			t.Errorf("connecting to %s: %+v", to, out)
		}
	}
	if line := box.Must("list"); !strings.Contains(line, kid.Name) || strings.Contains(line, "invalid") {
		t.Errorf("list: %s", line)
	}
	g, err := grant(t, box, kid.Name, wire.GrantRequest{Host: "files.vendor.test", Port: 80, For: time.Minute})
	if err == nil || !strings.Contains(err.Error(), "has no network") {
		t.Errorf("a grant: %+v, %v, want it refused", g, err)
	}
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
	var kids []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &kids); err != nil || len(kids) != 1 || kids[0].State != wire.KidRunning {
		t.Fatalf("after sandboxd was killed: %+v, %v", kids, err)
	}
	for _, layers := range [][]wire.Layer{{wire.LayerNetwork}, {wire.LayerCredential}, wire.AllLayers()} {
		report := box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, Layers: layers})
		if report.State != wire.StateObserved {
			t.Errorf("stop of %v: %+v", layers, report)
		}
		box.Release(report.Stop)
	}
	if out := box.Tagout("exec", kid.Name, "--", "/bin/true"); out.Code == 0 {
		t.Errorf("it lives: %+v", out)
	}
	box.Destroy(kid.Name)
}
