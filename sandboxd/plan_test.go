package sandboxd

import (
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/policy"
	"tagout/internal/wire"
)

func practiceCard(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("../deploy/cards/practice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func TestPlanFollowsFromTheCard(t *testing.T) {
	p, err := PlanFromCard(wire.SpawnRequest{Card: practiceCard(t), InputDir: "/srv/job"})
	if err != nil {
		t.Fatal(err)
	}
	if p.Image != "host" || p.Card != "practice" || len(p.CardHash) != 64 || p.Workspace <= 0 || p.Tmp <= 0 || p.Limits.PIDs <= 0 || p.Stop.Authority == "" {
		t.Errorf("plan %+v", p)
	}
	for _, rule := range p.Egress.Allow {
		for _, port := range rule.Ports {
			if !slices.Contains(p.Ports, port) {
				t.Errorf("port %d of %s is not in %v", port, rule.Host, p.Ports)
			}
		}
	}
	for _, in := range p.Inputs {
		if in.Dir != "/srv/job" || strings.HasPrefix(in.To, "/") {
			t.Errorf("input %+v", in)
		}
	}
}

// TestRulesExpireByTheBootClock: a duration counts from the spawn, and a time becomes the same instant.
func TestRulesExpireByTheBootClock(t *testing.T) {
	card := strings.Replace(practiceCard(t), "      ports: [80]\n", "      ports: [80]\n      expires: "+time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano)+"\n", 1)
	card = strings.Replace(card, "      ports: [443]\n", "      ports: [443]\n      expires: 2h\n", 1)
	before := bootclock.Now()
	p, err := PlanFromCard(wire.SpawnRequest{Card: card, InputDir: "/srv/job"})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]time.Duration{"api.vendor.test": 2 * time.Hour, "files.vendor.test": time.Hour} {
		i := slices.IndexFunc(p.Egress.Allow, func(r policy.Rule) bool { return r.Host == host })
		if got := time.Duration(p.Egress.Allow[i].Expires) - before; got < want-time.Minute || got > want+time.Minute {
			t.Errorf("%s expires in %v, want %v", host, got, want)
		}
	}
	late := strings.Replace(card, "expires: 2h", "expires: 2020-01-01T00:00:00Z", 1)
	if _, err := PlanFromCard(wire.SpawnRequest{Card: late, InputDir: "/srv/job"}); err == nil || !strings.Contains(err.Error(), "is past") {
		t.Errorf("a rule that ran out before the spawn: %v", err)
	}
}

func TestBadCardNamesLineAndColumn(t *testing.T) {
	_, err := PlanFromCard(wire.SpawnRequest{Card: practiceCard(t) + "\nsurprise: true\n", CardFile: "job.yaml"})
	if err == nil || !strings.Contains(err.Error(), "job.yaml:") || !strings.Contains(err.Error(), "surprise") {
		t.Errorf("unknown key: %v, want file, line and key", err)
	}
}

func TestInputsNeedADirectory(t *testing.T) {
	card := practiceCard(t)
	if !strings.Contains(card, "\nfilesystem:") {
		t.Fatal("the practice card has no filesystem section: the test needs another card")
	}
	if !strings.Contains(card, "inputs:") {
		card = strings.Replace(card, "\nfilesystem:", "\nfilesystem:\n  inputs:\n    - from: run.sh\n      to: /workspace/run.sh", 1)
	}
	for _, dir := range []string{"", "relative"} {
		if _, err := PlanFromCard(wire.SpawnRequest{Card: card, InputDir: dir}); err == nil {
			t.Errorf("inputs with directory %q: no error", dir)
		}
	}
}

// TestNoReachCoversTheBoxItself: whatever the card says, no kid calls one of Tagout's own servers.
func TestNoReachCoversTheBoxItself(t *testing.T) {
	t.Parallel()
	const head = "apiVersion: tagout/v1\nkind: Card\nname: near\ntask: Look.\nimage: host\nnetwork: host\nstop: {authority: Ada, maxTime: 1s}\n"
	for name, c := range map[string]struct {
		served string
		reach  string
		ok     bool
	}{
		"elsewhere":        {"127.0.0.1:8470", `{addresses: ["10.0.0.5"], ports: [8470]}`, true},
		"another port":     {"127.0.0.1:8470", `{addresses: ["127.0.0.1"], ports: [8471]}`, true},
		"the API":          {"127.0.0.1:8470", `{addresses: ["127.0.0.1"], ports: [8470]}`, false},
		"the API in range": {"127.0.0.1:8470", `{addresses: ["127.0.0.0/16"], ports: [80, 8470]}`, false},
		"everywhere":       {"0.0.0.0:8470", `{addresses: ["10.0.0.5"], ports: [8470]}`, false},
		"everywhere, IPv6": {"[::]:8470", `{addresses: ["10.0.0.5"], ports: [8470]}`, false},
	} {
		p, err := planner([]netip.AddrPort{netip.MustParseAddrPort(c.served)})(wire.SpawnRequest{Card: head + "reach: [" + c.reach + "]\n"})
		if (err == nil) != c.ok || err == nil && len(p.Reach) == 0 {
			t.Errorf("%s: %+v, %v", name, p.Reach, err)
		}
	}
}
