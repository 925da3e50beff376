package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/alert/alerttest"
	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
)

// alertTo makes the box send alerts to these receivers too.
func alertTo(t *testing.T, box *testenv.Box, sinks ...config.Sink) {
	t.Helper()
	cfg, err := config.Load(box.Inst.BoxConfig())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sinks {
		s.Window, s.Timeout, s.Queue = time.Second, config.DefaultTimeout, config.DefaultQueue
		cfg.Alerts = append(cfg.Alerts, s)
	}
	raw, err := cfg.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "box.yaml")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	box.Must("setup", "--config", file)
	box.Kill9(instance.Sandboxd)
	box.WaitHealthy(instance.Sandboxd)
}

// TestEveryReceiverIsAlerted: one denied attempt reaches the plain webhook, a signed one, Alertmanager and syslog
// in a second; a flood reaches them as counts that add up; a dead receiver and a restart cost nothing.
func TestEveryReceiverIsAlerted(t *testing.T) {
	t.Parallel()
	box := start(t)
	const key = "an end-to-end test's signing key"
	keyFile := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(keyFile, []byte(key), 0o600); err != nil {
		t.Fatal(err)
	}
	signed, am, siem := alerttest.StartHook(t, key), alerttest.StartAlertmanager(t), alerttest.StartSyslog(t, "tcp", "")
	alertTo(t, box,
		config.Sink{Name: "dead", Kind: config.SinkWebhook, URL: "http://127.0.0.1:1/"},
		config.Sink{Name: "signed", Kind: config.SinkWebhook, URL: signed.URL, SecretFile: keyFile},
		config.Sink{Name: "am", Kind: config.SinkAlertmanager, URL: am.URL},
		config.Sink{Name: "siem", Kind: config.SinkSyslog, URL: siem.URL})

	kid := box.Spawn(bareCard, nil)
	destination := fmt.Sprintf("%v:%d", box.Net.EvilAddr(), 9999)
	box.Exec(kid.Name, "/bin/bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%v/9999", box.Net.EvilAddr()))
	rec := box.WaitRecord("the attempt", func(r *audit.Record) bool { return r.Kid == kid.Name && r.Reason == reason.RawAddress })
	box.WaitAlert(rec.ID)
	box.Until(10*time.Second, "every receiver has the alert", func() error {
		taken, refused := signed.Got()
		inHook, inAM, inSyslog := false, false, false
		for _, p := range taken {
			inHook = inHook || p.ID == rec.ID && p.Kid == kid.Name && p.Alert.Destination == destination
		}
		for _, a := range am.Alerts() {
			inAM = inAM || a.Labels["kid"] == kid.Name && a.Labels["destination"] == destination && a.Labels["reason"] == "raw-address"
		}
		for _, m := range siem.Messages() {
			inSyslog = inSyslog || m.Params["event"] == rec.ID && m.Params["destination"] == destination && m.Params["pid"] != ""
		}
		if !inHook || !inAM || !inSyslog || refused != 0 {
			return fmt.Errorf("webhook %v (%d refused), Alertmanager %v, syslog %v", inHook, refused, inAM, inSyslog)
		}
		return nil
	})

	box.Exec(kid.Name, "/bin/bash", "-c", floodLine(box.Net.EvilAddr(), 300))
	waitTold(box, kid, 3001)
	box.Until(15*time.Second, "the counts add up at the signed webhook", func() error {
		taken, _ := signed.Got()
		alerts, sum := 0, uint64(0)
		for _, p := range taken {
			if p.Kid == kid.Name && p.Reason == "raw-address" {
				alerts++
				sum += p.Alert.Count
			}
		}
		switch {
		case sum < 3001:
			return fmt.Errorf("%d attempts so far", sum)
		case sum > 3001 || alerts > 300:
			t.Fatalf("%d attempts in %d alerts, want 3001 in few", sum, alerts)
		}
		return nil
	})
}
