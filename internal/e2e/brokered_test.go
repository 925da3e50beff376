package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// chatCard is deploy/cards/chat.yaml with a canary rule and another host that knows no secret.
func chatCard(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("../../deploy/cards/chat.yaml")
	if err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(string(raw), "filesystem:\n", "    - {host: files.vendor.test, ports: [80], protocol: http}\nfilesystem:\n", 1)
	return strings.Replace(text, "maxTime: 60s}", "maxTime: 60s, trip: [{on: canary}]}", 1)
}

// TestAVendorsClientLibrary: an ordinary program with the vendor's own library works with a placeholder for its key, over
// HTTP/1.1 and HTTP/2. The model gets the key and shows it in its answers, also cut in two between two pieces of a stream;
// the kid, its files and the logs do not have it. The control is the same program without the broker's host: pointed
// somewhere else it gets nothing, the box knows why, and the canary rule stops the kid.
func TestAVendorsClientLibrary(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	key := box.Net.Model.Key()
	entry := wire.VaultEntry{Value: key, Hosts: []string{practice.NameModel + ":443"}, Present: wire.Presentation{As: wire.AsBearer}, Methods: []string{"GET", "POST"}, Paths: []string{"/v1/*"}}
	if err := box.Client(instance.Credd).Call(t.Context(), http.MethodPut, "/v1/vault/llm_key", entry, nil); err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(box.Bin + "/chat")
	if err != nil {
		t.Fatal(err)
	}
	kid := box.Spawn(chatCard(t), map[string][]byte{"chat": program})
	masked := strings.Repeat("*", len(key))
	for i, flag := range []string{"", "--http1 "} {
		out := box.Sh(kid.Name, "echo $OPENAI_API_KEY; /workspace/chat "+flag+"'Who am I?'")
		want := "answer in 5 pieces: You asked: Who am I?. Your key is " + masked + ".\nmodel practice-1 of " + masked + "\n"
		if !strings.HasPrefix(out.Stdout, "tgo_") || !strings.HasSuffix(out.Stdout, want) || out.Exit.Code != 0 {
			t.Errorf("%s: %q %q", flag, out.Stdout, out.Stderr)
		}
		if got := box.Net.Model.Tally(); got != (practice.ModelTally{Accepted: 2 * (i + 1)}) {
			t.Errorf("%s: the model saw %+v", flag, got)
		}
	}
	rec := box.WaitRecord("a use", func(r *audit.Record) bool { return r.Event == audit.EventRequest && r.Fields["secrets"] == "llm_key" })
	if rec.Outcome != audit.OutcomeAllow || rec.Dst.Name != practice.NameModel {
		t.Errorf("record %+v", rec)
	}
	// A method and a path that the secret is not for are refused, although the card would not be.
	entry.Paths = []string{"/v1/models"}
	if err := box.Client(instance.Credd).Call(t.Context(), http.MethodPut, "/v1/vault/llm_key", entry, nil); err != nil {
		t.Fatal(err)
	}
	out := box.Sh(kid.Name, "/workspace/chat 'Who am I?'")
	if out.Exit.Code == 0 || !strings.Contains(out.Stderr, "403") || box.Net.Model.Tally().Accepted != 4 {
		t.Errorf("a path that the secret is not for: %+v", out)
	}
	tag := waitTrip(box, kid.Name)
	if !strings.HasPrefix(tag.Reason, "trip rule canary: "+practice.NameModel) {
		t.Errorf("the tag says %q", tag.Reason)
	}
	other := box.Spawn(chatCard(t), map[string][]byte{"chat": program})
	out = box.Sh(other.Name, "OPENAI_BASE_URL=http://files.vendor.test/v1 /workspace/chat 'Who am I?'")
	if out.Exit.Result == "exited" && !strings.Contains(out.Stderr, "403") {
		t.Errorf("another host: %+v", out)
	}
	if tag := waitTrip(box, other.Name); !strings.HasPrefix(tag.Reason, "trip rule canary: files.vendor.test") {
		t.Errorf("the tag says %q", tag.Reason)
	}
	box.WaitRecord("the refusal", func(r *audit.Record) bool {
		return r.Kid == other.Name && r.Outcome == audit.OutcomeDeny && r.Reason == reason.TokenScope
	})
	box.Until(soon, "both attempts are alerted", func() error {
		alerts, _ := box.Net.Webhook.Alerts()
		told := map[string]bool{}
		for _, a := range alerts {
			if a.Record.Reason == reason.TokenScope && a.Record.Outcome == audit.OutcomeDeny {
				told[a.Record.Kid] = true
			}
		}
		if !told[kid.Name] || !told[other.Name] {
			return fmt.Errorf("alerts of %v", told)
		}
		return nil
	})
	for _, daemon := range instance.Daemons() {
		raw, err := os.ReadFile(box.Inst.AuditFile(daemon))
		if err != nil || bytes.Contains(raw, []byte(key)) || bytes.Contains(raw, []byte("tgo_")) {
			t.Errorf("%s: %v, or its log holds the key or a token", daemon, err)
		}
	}
}
