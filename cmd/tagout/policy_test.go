package main

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/instance"
	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/testroot"
)

// living makes an instance with one session document, as sandboxd leaves it, and no daemon.
func living(t *testing.T, name string, egress policy.Spec) instance.Instance {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, dir := range []string{inst.RunDir(), inst.StateDir()} {
			if err := os.RemoveAll(dir); err != nil {
				t.Error(err)
			}
		}
		if err := inst.Release(); err != nil {
			t.Error(err)
		}
	})
	if err := os.MkdirAll(inst.SessionDir(), 0o750); err != nil {
		t.Fatal(err)
	}
	s := &session.Session{
		Version: session.Version, ID: "01JLIVING", Kid: "ada", Card: "tidy", Mark: 7, Addr: netip.MustParseAddr("198.19.0.3"), HostAddr: netip.MustParseAddr("198.19.0.2"),
		Cgroup: "/c", CgroupID: 5, Generation: 2, Egress: egress, Stop: session.Stop{Authority: "Ada", MaxTime: time.Second}, Created: time.Now().UTC(),
	}
	if err := session.NewStore(inst.SessionDir()).Put(s, inst.GroupID()); err != nil {
		t.Fatal(err)
	}
	return inst
}

// TestExplainAsksTheLivingPolicy: with --kid grants count, whatever the card says.
func TestExplainAsksTheLivingPolicy(t *testing.T) {
	now := int64(bootclock.Now())
	living(t, "tcliexpl", policy.Spec{Allow: []policy.Rule{
		{Host: "granted.test", Ports: []uint16{443}, Protocol: policy.TLS, Grant: "01JGRANT", Expires: now + int64(15*time.Minute)},
		{Host: "over.test", Ports: []uint16{443}, Protocol: policy.TLS, Grant: "01JOVER", Expires: now - 1},
	}})
	card := writeCard(t, "egress: {allow: [{host: carded.test, ports: [443], protocol: tls}]}")
	for _, c := range []struct {
		args []string
		code int
		out  string
	}{
		{[]string{"--kid", "ada", "granted.test:443"}, 0, "runs out in 15m0s, by grant 01JGRANT"},
		{[]string{"--kid", "ada", "over.test:443"}, 3, "reason: expired"},
		{[]string{"--kid", "ada", "carded.test:443"}, 3, "reason: name-not-allowed"},
		{[]string{"--kid", "ada", "--card", card, "carded.test:443"}, 3, "reason: name-not-allowed"},
		{[]string{"--card", card, "carded.test:443"}, 0, "allowed: carded.test:443"},
		{[]string{"--card", card, "granted.test:443"}, 3, "reason: name-not-allowed"},
		{[]string{"--kid", "nobody", "granted.test:443"}, 2, ""},
		{[]string{"--kid", "../ada", "granted.test:443"}, 2, ""},
	} {
		code, out, errOut := tagout(append([]string{"--instance", "tcliexpl", "policy", "explain"}, c.args...)...)
		if code != c.code || !strings.Contains(out, c.out) {
			t.Errorf("%v: %d, %q, %q; want %d, %q", c.args, code, out, errOut, c.code, c.out)
		}
		if both := c.args[0] == "--kid" && c.args[2] == "--card"; both != strings.Contains(errOut, "is not the card that kid ada runs on") {
			t.Errorf("%v: %q", c.args, errOut)
		}
	}
}

func writeCard(t *testing.T, extra string) string {
	t.Helper()
	file := t.TempDir() + "/card.yaml"
	text := "apiVersion: tagout/v1\nkind: Card\nname: tidy\ntask: Tidy up.\nimage: host\nstop: {authority: Ada, maxTime: 1s}\n" + extra + "\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
