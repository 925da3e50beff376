package e2e

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// TestADeniedSecretIsGrantedOnNoRoute: what the box's denySecrets names is given to no kid by card, command line, API, AI
// agent, policy change or grant; the control is a card with another name, on the same box.
func TestADeniedSecretIsGrantedOnNoRoute(t *testing.T) {
	t.Parallel()
	box := testenv.StartWith(t, func(b *config.Box) { b.DenySecrets = []string{"Root_*"} })
	box.SetSecret(secret, box.Net.Secret(), "api.vendor.test:443")
	box.SetSecret("root_key", "root-value-0123456789", "api.vendor.test:443", "files.vendor.test:80")
	box.SetSecret("payment_key", "payment-value-0123456789", "files.vendor.test:80")
	withScope := func(name string) string {
		return strings.Replace(bareCard, "stop:", "identity:\n  scope:\n    - {secret: "+name+", env: KEY}\nstop:", 1)
	}
	onDisk := func(text string) string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "card.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	helper := agent(t, &sdk.CommandTransport{Command: exec.CommandContext(context.Background(), box.Bin+"/tagout", "--instance", box.Inst.Name(), "mcp", "--agent", "helper")})
	for _, name := range []string{"root_key", "payment_key", "Root_key", "root_key ", "ｒoot_key", "PAYMENT_KEY"} {
		quoted, err := json.Marshal(name) // YAML reads it too
		if err != nil {
			t.Fatal(err)
		}
		text := withScope(string(quoted))
		if _, err := box.TrySpawn("", text, nil); err == nil {
			t.Errorf("%q over the API", name)
		}
		if r := box.Tagout("spawn", onDisk(text), "--purpose", "test"); r.Code == 0 {
			t.Errorf("%q by spawn: %+v", name, r)
		}
		if r := box.Tagout("run", onDisk(text), "--purpose", "test", "--", "/usr/bin/env"); r.Code == 0 || strings.Contains(r.Stdout, "KEY=") {
			t.Errorf("%q by run: %+v", name, r)
		}
		if why := use(t, helper, "kid_spawn", map[string]any{"purpose": "test", "card": text}, nil); why == "" {
			t.Errorf("%q by an AI agent", name)
		}
		mint := wire.MintRequest{Kid: "x", Session: "01JX", Card: "x", Mark: box.Inst.SessionMark(999), Secrets: []wire.MintSecret{{Name: name}}}
		if err := box.Client(instance.Credd).Call(t.Context(), http.MethodPost, "/v1/sessions", mint, nil); control.Status(err) != http.StatusForbidden {
			t.Errorf("%q straight from credd: %v", name, err)
		}
	}
	if all := box.Must("--json", "list"); strings.Contains(all, `"name"`) {
		t.Errorf("a kid lives: %s", all)
	}
	kid := box.Spawn(card, hostile(t, box)) // the control: this one has a token
	if out := box.Sh(kid.Name, "env"); !strings.Contains(out.Stdout, "VENDOR_API_KEY=tgo_") {
		t.Fatalf("the control has no token: %q", out.Stdout)
	}
	wider := strings.Replace(card, "    - {secret: vendor_api, env: VENDOR_API_KEY}\n", "    - {secret: vendor_api, env: VENDOR_API_KEY}\n    - {secret: root_key, env: ROOT_KEY}\n", 1)
	wider = strings.Replace(wider, "credential: vendor_api", "credential: root_key", 1)
	box.Tagout("policy", "set", kid.Name, "--card", onDisk(wider), "--key", box.KeyFile(practice.Authority), "--reason", "test") // whatever comes of it
	for _, door := range []string{"secret:root_key", "root_key", "root_key:443"} {
		box.Tagout("grant", kid.Name, door, "--for", "1m", "--key", box.KeyFile(practice.Authority), "--reason", "test") // a grant is for a host
	}
	out := box.Sh(kid.Name, "env; /workspace/hostile whoami https://api.vendor.test/v1/whoami")
	if strings.Contains(out.Stdout, "ROOT_KEY") || strings.Contains(out.Stdout, "accepted=true") {
		t.Errorf("after a policy change that names it: %q", out.Stdout)
	}
	for _, rec := range box.Records(func(r *audit.Record) bool {
		return r.Event == audit.EventTokenMinted || r.Event == audit.EventTokenUsed
	}) {
		if name := strings.ToLower(rec.Fields["secret"]); strings.HasPrefix(name, "root_") || strings.HasPrefix(name, "payment_") {
			t.Errorf("given out: %+v", rec)
		}
	}
}
