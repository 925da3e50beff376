package bench

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/testroot"
)

// TestCredentialsFiguresAreProduced runs the benchmark of credentials with tiny counts, beside Redis where it happens to be
// installed. It looks at no figure's size, and that nothing is left.
func TestCredentialsFiguresAreProduced(t *testing.T) {
	testroot.Require(t)
	t.Parallel()
	dir := t.TempDir()
	tagout := newCommand(t, "cbt")
	said := tagout.run("bench", "credentials", "--short", "--bin-dir", tagout.bin, "--out", dir)
	metrics := figures(t, filepath.Join(dir, "credentials.json"))
	redis := ""
	if _, err := exec.LookPath("redis-server"); err == nil {
		redis = peerRedis
	}
	want := map[string]string{ // -> its peer
		"inspected request with a secret, p50": "without one", "inspected request with a secret, p99": "without one",
		"memory of 100 live tokens": redis, "revoke one session of 100 at 100 uses/s, p50": redis, "revoke one session of 100 at 100 uses/s, p99": redis,
		"use of a token meanwhile, p50": redis, "revoke all of 20 sessions": redis,
		"stop of the box's credential layer, 20 sessions: order to acknowledgement": "", "the same: order to the start of the last use": "",
	}
	for prefix, peer := range want {
		found := false
		for _, m := range metrics {
			if strings.HasPrefix(m.Metric, prefix) && m.Peer == peer {
				found = true
				if m.Value <= 0 && m.Unit == "ms" && !strings.HasPrefix(prefix, "the same") {
					t.Errorf("%s took no time: %+v", prefix, m)
				}
			}
		}
		if !found {
			t.Errorf("there is no figure for %q beside %q:\n%s", prefix, peer, said)
		}
	}
	tagout.run("cleanup", "--check")
}
