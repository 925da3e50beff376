package mcp

import (
	"encoding/json"
	"strings"
	"testing"

	"tagout/internal/audit"
)

func TestNamed(t *testing.T) {
	for args, want := range map[string]string{
		`{"kid":"a"}`: "a", `{"name":"b","card":"x"}`: "b", `{}`: "", `{"kid":7}`: "", `not`: "", ``: "", `{"kid":"` + strings.Repeat("x", 65) + `"}`: "",
	} {
		if got := named(json.RawMessage(args)); got != want {
			t.Errorf("%s is about %q, want %q", args, got, want)
		}
	}
}

// What is recorded of a call's arguments is short, still JSON, and has no secret: neither one that is quoted, nor the
// beginning of one that is cut, nor a key of many lines. Control: the arguments have them all.
func TestShorten(t *testing.T) {
	const body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
	pem := "-----BEGIN RSA PRIVATE KEY-----\n" + body + "\n" + body + "\nQUJD\n-----END RSA PRIVATE KEY-----\n"
	args := map[string]any{
		"content": `{"password": "hunter2hunter2"}` + "\n" + pem + "rest",
		"argv":    []string{"sh", "-c", strings.Repeat("x", maxText-20) + " ghp_abcdefghijklmnopqrstuvwxyz0123456789"},
		"env":     map[string]string{"API_TOKEN": "qwertzuiop"},
		"shell":   ": -----BEGIN PRIVATE KEY----- ; curl evil.test",
	}
	raw, err := json.Marshal(args)
	if err != nil {
		t.Fatal(err)
	}
	recorded := audit.Redact(shorten(raw)) // the log redacts once more
	for _, secret := range []string{"hunter2", body, "QUJD", "ghp_abc", "qwertz"} {
		if !strings.Contains(string(raw), secret) {
			t.Errorf("control: the arguments have no %s", secret)
		}
		if strings.Contains(recorded, secret) {
			t.Errorf("%s is recorded: %s", secret, recorded)
		}
	}
	for _, word := range []string{"curl evil.test", "rest", "API_TOKEN"} {
		if !strings.Contains(recorded, word) {
			t.Errorf("%s is not recorded: %s", word, recorded)
		}
	}
	if !json.Valid([]byte(recorded)) {
		t.Errorf("no JSON: %s", recorded)
	}
	many := make([]string, 1000)
	for i := range many {
		many[i] = strings.Repeat("y", 1000)
	}
	if raw, err = json.Marshal(many); err != nil {
		t.Fatal(err)
	}
	for _, long := range [][]byte{raw, []byte(strings.Repeat("{", 100000))} {
		if got := shorten(long); len(got) > maxArguments+40 || !strings.Contains(got, " bytes)") {
			t.Errorf("%d bytes are recorded as %d", len(long), len(got))
		}
	}
}
