package e2e

import (
	"encoding/base64"
	"encoding/hex"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// TestTheSecretIsUsedAndNeverSeen (invariant 3): the vendor's API gets the real value; the kid's environment,
// output and files, and every file and log of the box, hold nothing of it in any usual form.
func TestTheSecretIsUsedAndNeverSeen(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	out := box.Sh(kid.Name, "/workspace/hostile whoami https://api.vendor.test/v1/whoami; env; cat /proc/self/environ; cat /proc/1/environ 2>/dev/null; true")
	if !strings.Contains(out.Stdout, "accepted=true") {
		t.Fatalf("the API did not accept the swapped secret: %q %q", out.Stdout, out.Stderr)
	}
	if !strings.Contains(out.Stdout, "VENDOR_API_KEY=tgo_") {
		t.Errorf("the kid holds no token: %q", out.Stdout)
	}
	value := box.Net.Secret()
	forms := map[string]string{
		"clear": value, "hex": hex.EncodeToString([]byte(value)),
		"base64": strings.TrimRight(base64.StdEncoding.EncodeToString([]byte(value)), "="),
	}
	for form, text := range forms {
		if strings.Contains(out.Stdout+out.Stderr, text) {
			t.Errorf("the kid saw the secret in %s", form)
		}
	}
	searched := 0
	for _, root := range []string{box.Inst.RunDir(), box.Inst.StateDir()} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // it vanished, or is a socket or a namespace
			}
			raw, err := os.ReadFile(path)
			if err != nil {
				return nil
			}
			searched++
			for form, text := range forms {
				if strings.Contains(string(raw), text) {
					t.Errorf("%s holds the secret in %s", path, form)
				}
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
	if searched < 10 {
		t.Errorf("only %d files were searched", searched)
	}
}

// TestASecretGoesToItsHostOnly: a token sent to another host of the card stays a token.
func TestASecretGoesToItsHostOnly(t *testing.T) {
	t.Parallel()
	box := start(t)
	kid := box.Spawn(card, hostile(t, box))
	out := box.Exec(kid.Name, "/bin/bash", "-c",
		"exec 3<>/dev/tcp/files.vendor.test/80; printf \"GET /hello.txt HTTP/1.1\\r\\nHost: files.vendor.test\\r\\nAuthorization: Bearer $VENDOR_API_KEY\\r\\nConnection: close\\r\\n\\r\\n\" >&3; cat <&3")
	if !strings.HasPrefix(out.Stdout, "HTTP/1.1 403") || !strings.Contains(out.Stdout, "token-scope") {
		t.Errorf("got %q", out.Stdout)
	}
}

// TestWhatCanNeverBeGranted: payment_* is refused whatever the card says, and an empty scope gets nothing.
func TestWhatCanNeverBeGranted(t *testing.T) {
	t.Parallel()
	box := start(t)
	box.SetSecret("payment_card", "4242424242424242", "api.vendor.test:443")
	greedy := strings.ReplaceAll(card, "{secret: vendor_api, env: VENDOR_API_KEY}", "{secret: payment_card, env: CARD}")
	greedy = strings.ReplaceAll(greedy, "      credential: vendor_api\n", "")
	if _, err := box.TrySpawn("", greedy, hostile(t, box)); err == nil || !strings.Contains(err.Error(), "payment_") {
		t.Errorf("a card with a payment secret: %v", err)
	}
	// Past the card, straight at credd: refused there too.
	mint := wire.MintRequest{Kid: "x", Session: "01JX", Card: "x", Mark: box.Inst.SessionMark(999), Secrets: []wire.MintSecret{{Name: "payment_card"}}}
	if err := box.Client(instance.Credd).Call(t.Context(), http.MethodPost, "/v1/sessions", mint, nil); control.Status(err) == 0 || control.Status(err) < 400 {
		t.Errorf("credd minted it: %v", err)
	}
	kid := box.Spawn(bareCard, nil)
	if out := box.Sh(kid.Name, "env"); strings.Contains(out.Stdout, "tgo_") {
		t.Errorf("an empty scope got a token: %q", out.Stdout)
	}
}
