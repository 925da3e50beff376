package alert

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/alert/alerttest"
	"tagout/internal/audit"
	"tagout/internal/reason"
)

const secret = "0123456789abcdef0123456789abcdef"

func writeSecret(t *testing.T, content string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestSignature: a receiver that checks signatures takes ours, and no other; the key can be changed while the
// follower runs.
func TestSignature(t *testing.T) {
	hook := alerttest.StartHook(t, secret)
	sink := hookSink("a", hook)
	sink.SecretFile = writeSecret(t, "another key of more than 16 bytes", 0o600)
	b := newBench(t, sink)
	defer b.run()()
	b.deny("otter", 80, 0)
	until(t, "a wrong signature was refused", func() bool { _, refused := hook.Got(); return refused > 0 })
	if err := os.WriteFile(sink.SecretFile, []byte(secret+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	untilTold(t, hook, 1)
}

// TestSignatureIsOfTimeAndBody compares with a value computed by OpenSSL:
// printf '1700000000.{"a":1}' | openssl dgst -sha256 -hmac 0123456789abcdef0123456789abcdef
func TestSignatureIsOfTimeAndBody(t *testing.T) {
	const want = "t=1700000000,v1=f05f2539e3ae1c49aec5f8cfdad75ef6b06480b133973ffbb7ec9e18827af177"
	at := time.Unix(1_700_000_000, 0)
	if got := sign([]byte(secret), at, []byte(`{"a":1}`)); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for name, c := range map[string]struct {
		key, header, body string
		now               time.Time
	}{
		"body":   {secret, want, `{"a":2}`, at},
		"key":    {secret + "x", want, `{"a":1}`, at},
		"time":   {secret, strings.Replace(want, "t=17", "t=18", 1), `{"a":1}`, time.Unix(1_800_000_000, 0)},
		"old":    {secret, want, `{"a":1}`, at.Add(time.Hour)},
		"absent": {secret, "", `{"a":1}`, at},
	} {
		if alerttest.Verify([]byte(c.key), c.header, []byte(c.body), c.now) == nil {
			t.Errorf("%s: a wrong signature was taken", name)
		}
	}
	if err := alerttest.Verify([]byte(secret), want, []byte(`{"a":1}`), at); err != nil {
		t.Error(err)
	}
}

func TestUnusableSecretsStopTheStart(t *testing.T) {
	for name, path := range map[string]string{
		"missing": filepath.Join(t.TempDir(), "none"), "short": writeSecret(t, "short\n", 0o600), "anybody's": writeSecret(t, secret, 0o644),
	} {
		b := newBench(t, Sink{Name: "a", Kind: Webhook, URL: "http://127.0.0.1:1/", SecretFile: path})
		if _, err := New(b.cfg); err == nil {
			t.Errorf("%s: the follower starts", name)
		}
	}
}

// TestErrorsKeepTheURL: a webhook's URL is often a secret, and errors are logged.
func TestErrorsKeepTheURL(t *testing.T) {
	w, err := newWebhook(Sink{URL: "http://127.0.0.1:1/hunter2"})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.send(t.Context(), sample()); err == nil || strings.Contains(err.Error(), "hunter2") {
		t.Errorf("got %v", err)
	}
}

// sample is an alert as hostile as a kid can make it.
func sample() *alert {
	now := time.Date(2026, 11, 29, 12, 0, 0, 123456789, time.UTC)
	r := &audit.Record{
		ID: "01A", Time: now, Instance: "box", Daemon: "sandboxd", Kid: "otter", Session: "01S", Card: "practice", Reason: reason.Metadata,
		Dst:     &audit.Dst{Addr: netip.MustParseAddr("169.254.169.254"), Port: 80, Proto: "tcp"},
		Process: &audit.Process{PID: 7, Comm: "a\"]\\ b\n<34>1 é\xff", Exe: "/" + strings.Repeat("é\\", 400)},
	}
	a := newAlert(key{r.Kid, destination(r), r.Reason}, r, place{"log", 0}, false)
	a.add(r, place{"log", 10})
	return a
}

func TestSyslogMessageIsStrict(t *testing.T) {
	raw := message(sample(), "host")
	m, err := alerttest.ParseMessage(raw)
	if err != nil {
		t.Fatalf("%v: %q", err, raw)
	}
	if m.Facility != 10 || m.Severity != 2 || m.Host != "host" || m.App != "tagout" || m.MsgID != "denied" || m.StructuredID != "tagout@32473" {
		t.Errorf("header %+v", m)
	}
	if got := m.Time.Format(time.RFC3339Nano); got != "2026-11-29T12:00:00.123456Z" {
		t.Errorf("time %s", got)
	}
	for name, want := range map[string]string{
		"kid": "otter", "destination": "169.254.169.254:80", "reason": "metadata-address", "severity": "critical", "count": "2",
		"session": "01S", "pid": "7", "proto": "tcp", "comm": "a\"]\\ b\uFFFD<34>1 é\uFFFD",
	} {
		if m.Params[name] != want {
			t.Errorf("%s is %q, want %q", name, m.Params[name], want)
		}
	}
	if len(raw) > 2048 || bytes.ContainsAny(raw, "\n\r\x00") {
		t.Errorf("%d bytes, %q", len(raw), raw)
	}
}

// TestTheStrictReaderIsStrict: messages that are nearly right are refused, or the tests above prove nothing.
func TestTheStrictReaderIsStrict(t *testing.T) {
	good := string(message(sample(), "host"))
	for name, bad := range map[string]string{
		"version": strings.Replace(good, ">1 ", ">2 ", 1), "priority": strings.Replace(good, "<82>", "<082>", 1),
		"quote": strings.Replace(good, `\"`, `"`, 1), "bracket": strings.Replace(good, `\]`, `]`, 1),
		"line": good + "\n", "no host": strings.Replace(good, " host ", "  ", 1), "cut": good[:200],
	} {
		if _, err := alerttest.ParseMessage([]byte(bad)); err == nil {
			t.Errorf("%s: %q was taken", name, bad)
		}
	}
}

func TestHeaderField(t *testing.T) {
	for in, want := range map[string]string{"": "-", "a b\n": "ab", "é": "-", strings.Repeat("x", 300): strings.Repeat("x", 255)} {
		if got := headerField(in, 255); got != want {
			t.Errorf("%q: got %q", in, got)
		}
	}
}

func TestSyslogTransports(t *testing.T) {
	for _, kind := range []string{"udp", "tcp", "unix"} {
		t.Run(kind, func(t *testing.T) {
			server := alerttest.StartSyslog(t, kind, "")
			b := newBench(t, Sink{Name: "s", Kind: Syslog, URL: server.URL})
			defer b.run()()
			for port := range 50 {
				b.deny("otter", 1000+port, 0)
			}
			until(t, "50 messages arrived", func() bool { return len(server.Messages()) == 50 })
			for i, m := range server.Messages() {
				if m.Params["destination"] != fmt.Sprintf("203.0.113.7:%d", 1000+i) || m.Params["count"] != "1" || m.Severity != 4 {
					t.Errorf("message %d is %+v", i, m)
				}
			}
		})
	}
}

// TestSyslogReceiverRestarts: over TCP and a unix socket, what is sent while nobody listens arrives later.
func TestSyslogReceiverRestarts(t *testing.T) {
	for _, kind := range []string{"tcp", "unix"} {
		t.Run(kind, func(t *testing.T) {
			server := alerttest.StartSyslog(t, kind, "")
			_, address, _ := strings.Cut(server.URL, "://")
			b := newBench(t, Sink{Name: "s", Kind: Syslog, URL: server.URL})
			defer b.run()()
			b.deny("otter", 80, 0)
			until(t, "the first arrived", func() bool { return len(server.Messages()) == 1 })
			server.Stop()
			if kind == "unix" {
				if err := os.Remove(address); err != nil {
					t.Fatal(err)
				}
			}
			b.deny("otter", 81, 0)
			until(t, "a failure is counted", func() bool { _, failed, _ := b.numbers.of("s"); return failed > 0 })
			again := alerttest.StartSyslog(t, kind, address)
			until(t, "the second arrived", func() bool { return len(again.Messages()) > 0 })
			if m := again.Messages()[0]; m.Params["destination"] != "203.0.113.7:81" {
				t.Errorf("message %+v", m)
			}
		})
	}
}

// TestSyslogOverTCPWaitsForTheReceiver: a write into the void is no delivery.
func TestSyslogOverTCPWaitsForTheReceiver(t *testing.T) {
	server := alerttest.StartSyslog(t, "tcp", "")
	s, err := newSyslog(Sink{URL: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if err := s.send(t.Context(), sample()); err != nil {
		t.Fatal(err)
	}
	until(t, "it arrived", func() bool { return len(server.Messages()) == 1 })
	server.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := s.send(ctx, sample()); err == nil {
		t.Error("a message to a closed connection counts as sent")
	}
}

// TestRealAlertmanager: labels, times and counts as Debian's prometheus-alertmanager takes them.
func TestRealAlertmanager(t *testing.T) {
	am := alerttest.StartAlertmanager(t)
	b := newBench(t, Sink{Name: "am", Kind: Alertmanager, URL: am.URL + "/"})
	defer b.run()()
	b.deny("otter", 80, 0)
	b.log.Log(audit.Record{Event: audit.EventLookup, Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed,
		Dst: &audit.Dst{Name: "évil \"quoted\".test"}})
	until(t, "both alerts fire", func() bool { return len(am.Alerts()) == 2 })
	find := func(code string) alerttest.Firing {
		for _, a := range am.Alerts() {
			if a.Labels["reason"] == code {
				return a
			}
		}
		t.Fatalf("no alert for %s: %+v", code, am.Alerts())
		return alerttest.Firing{}
	}
	a := find("raw-address")
	for name, want := range map[string]string{
		"alertname": "TagoutDenied", "kid": "otter", "destination": "203.0.113.7:80", "instance": "test", "severity": "warning",
	} {
		if a.Labels[name] != want {
			t.Errorf("label %s is %q, want %q", name, a.Labels[name], want)
		}
	}
	if age := time.Since(a.StartsAt); a.Status.State != "active" || age < 0 || age > time.Minute || time.Until(a.EndsAt) < time.Minute || a.Annotations["count"] != "1" {
		t.Errorf("alert %+v", a)
	}
	if other := find("name-not-allowed"); other.Labels["kid"] != "-" || other.Labels["destination"] != "évil \"quoted\".test" {
		t.Errorf("alert %+v", other)
	}
	b.deny("otter", 80, 20) // one record, so that no window's end can part them
	until(t, "the repeats have updated it", func() bool { return find("raw-address").Annotations["count"] == "20" })
	if again := find("raw-address"); len(am.Alerts()) != 2 || !again.StartsAt.Equal(a.StartsAt) {
		t.Errorf("the repeats made another alert: %+v", am.Alerts())
	}
}
