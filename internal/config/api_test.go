package config

import (
	"strings"
	"testing"
)

const apiHead = "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"192.0.2.53:53\"]\napi:\n"

func TestTheAPISectionIsRead(t *testing.T) {
	b, err := Parse("f", []byte(apiHead+"  listen: \"192.0.2.1:8470\"\n  certificate: /c\n  key: /k\n  clientCA: /a\n  clients: [{name: ci, roles: [read]}]\n"))
	if err != nil || b.API.Listen.String() != "192.0.2.1:8470" || len(b.API.Clients) != 1 || b.API.Clients[0].Roles[0] != "read" {
		t.Errorf("%+v %v", b, err)
	}
	if b, err := Parse("f", []byte(strings.TrimSuffix(apiHead, "api:\n"))); err != nil || b.API.Listen.IsValid() {
		t.Errorf("without the section: %+v %v", b, err)
	}
}

// TestNothingIsServedPlainlyByMistake: each mistake is refused, none opens more than was meant.
func TestNothingIsServedPlainlyByMistake(t *testing.T) {
	for text, want := range map[string]string{
		"  listen: \"192.0.2.1:8470\"\n":                    "without TLS",
		"  listen: \"0.0.0.0:8470\"\n":                      "not an address",
		"  listen: \"127.0.0.1:8470\"\n  certificate: /c\n": "go together",
		"  listen: \"127.0.0.1:8470\"\n  clientCA: /c\n":    "need TLS",
		"  certificate: /c\n  key: /k\n":                    "listen",
		"  listen: \"127.0.0.1:1\"\n  certificate: /c\n  key: /k\n  clients: [{name: a, roles: [read]}]\n":                 "would count",
		"  listen: \"127.0.0.1:1\"\n  certificate: c\n  key: /k\n":                                                         "absolute path",
		"  listen: \"127.0.0.1:1\"\n  certificate: /c\n  key: /k\n  clientCA: /a\n  clients: [{name: a, roles: [root]}]\n": "unknown role",
	} {
		if _, err := Parse("f", []byte(apiHead+text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
