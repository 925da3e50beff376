package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// TestASuggestionOpensNothingUntilItIsApplied: refused, suggested, reviewed, applied, reached. Until somebody
// applies it the kid reaches as little as before.
func TestASuggestionOpensNothingUntilItIsApplied(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(bareCard, nil).Name
	found := func() bool { return box.Sh(kid, "getent hosts api.vendor.test").Exit.Code == 0 }
	if found() {
		t.Fatal("a name that is on no card was found")
	}
	box.Exec(kid, "/bin/bash", "-c", "exec 3<>/dev/tcp/169.254.169.254/80")
	box.WaitRecord("the refused lookup", func(r *audit.Record) bool {
		return r.Kid == kid && r.Event == audit.EventLookup && r.Outcome == audit.OutcomeDeny && r.Dst.Name == "api.vendor.test"
	})
	box.WaitRecord("the refused connection", func(r *audit.Record) bool {
		return r.Kid == kid && r.Event == audit.EventConnectDenied && r.Dst != nil && r.Dst.Port == 80
	})
	file := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(file, []byte(bareCard), 0o600); err != nil {
		t.Fatal(err)
	}
	diff := box.Must("card", "suggest", kid)
	if !strings.Contains(diff, "#   169.254.169.254 port 80, refused") || strings.Contains(diff, "\n+    - host: 169") {
		t.Errorf("the metadata address:\n%s", diff)
	}
	apply := exec.CommandContext(t.Context(), "git", "apply", "-p0", "-")
	apply.Dir, apply.Stdin = filepath.Dir(file), strings.NewReader(diff)
	if out, err := apply.CombinedOutput(); err != nil {
		t.Fatalf("applying the suggestion: %v: %s\n%s", err, out, diff)
	}
	if found() {
		t.Error("the suggestion opened something")
	}
	if r := box.Tagout("policy", "explain", "--kid", kid, "api.vendor.test:443"); r.Code != 3 {
		t.Errorf("explained before: %+v", r)
	}
	box.Must("policy", "set", kid, "--card", file, "--key", box.KeyFile(practice.Authority), "--reason", "reviewed")
	if !found() {
		t.Error("the applied suggestion opened nothing")
	}
	if r := box.Tagout("policy", "explain", "--kid", kid, "--card", file, "api.vendor.test:443"); r.Code != 0 || !strings.Contains(r.Stdout, file+" line ") || strings.Contains(r.Stderr, "is not the card") {
		t.Errorf("explained after: %+v", r)
	}
}

// TestARuleRunsOut: what a card opens for a while is open until then and no longer, and the refusal says so.
// A rule without an end stays.
func TestARuleRunsOut(t *testing.T) {
	t.Parallel()
	box := start(t)
	short := strings.Replace(bareCard, "image: host\n", `image: host
egress:
  allow:
    - {host: files.vendor.test, ports: [80], protocol: http, expires: 8s}
    - {host: api.vendor.test, ports: [443], protocol: tls}
`, 1)
	kid := box.Spawn(short, nil).Name
	if !reaches(box, kid) {
		t.Fatal("not reached while the rule holds")
	}
	box.Until(soon, "the rule runs out", func() error {
		if reaches(box, kid) {
			return errors.New("still reached")
		}
		return nil
	})
	box.WaitRecord("the refusal", func(r *audit.Record) bool {
		return r.Kid == kid && r.Outcome == audit.OutcomeDeny && r.Reason == reason.Expired && r.Dst != nil && r.Dst.Name == "files.vendor.test"
	})
	if r := box.Tagout("policy", "explain", "--kid", kid, "files.vendor.test:80"); r.Code != 3 || !strings.Contains(r.Stdout, "reason: expired") {
		t.Errorf("explained: %+v", r)
	}
	if r := box.Tagout("policy", "explain", "--kid", kid, "api.vendor.test:443"); r.Code != 0 {
		t.Errorf("the rule without an end: %+v", r)
	}
}

// TestGetHerePostThere: several rules for one host and port, told apart by the real proxy.
func TestGetHerePostThere(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(strings.Replace(bareCard, "image: host\n", `image: host
egress:
  allow:
    - {host: files.vendor.test, ports: [80], protocol: http, methods: [GET]}
    - {host: files.vendor.test, ports: [80], protocol: http, methods: [POST], paths: ["/upload"]}
`, 1), nil).Name
	ask := func(method, path string) string {
		return box.Exec(kid, "/bin/bash", "-c", "exec 3<>/dev/tcp/files.vendor.test/80 || exit 1; printf '"+method+" "+path+
			" HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n' >&3; cat <&3").Stdout
	}
	for _, c := range []struct {
		method, path, refusal string // a word of the refusal; empty where the request passes
	}{{"GET", "/hello.txt", ""}, {"POST", "/upload", ""}, {"POST", "/hello.txt", "path-not-allowed"}, {"DELETE", "/upload", "method-not-allowed"}} {
		got := ask(c.method, c.path)
		if refused := strings.Contains(got, "application/problem+json"); got == "" || refused != (c.refusal != "") || !strings.Contains(got, c.refusal) {
			t.Errorf("%s %s: %q, want %q", c.method, c.path, got, c.refusal)
		}
	}
}
