package config

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestTheIssuerSectionIsRead(t *testing.T) {
	t.Parallel()
	b, err := Parse("f", []byte(minimal+"issuer: {url: \"https://issuer.test\", trustDomain: own.test}\n"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Issuer{URL: "https://issuer.test", TrustDomain: "own.test", Algorithm: "EdDSA", Lifetime: 5 * time.Minute, RotateEvery: 720 * time.Hour}); !reflect.DeepEqual(b.Issuer, want) {
		t.Errorf("%+v, want %+v", b.Issuer, want)
	}
	if b, err := Parse("f", []byte(minimal)); err != nil || b.Issuer.URL != "" {
		t.Errorf("without the section: %+v %v", b, err)
	}
	for _, text := range []string{
		"issuer: {url: \"https://issuer.test:8443\", trustDomain: own.test, algorithm: ES256, lifetime: 90s, rotateEvery: off, audiences: [\"https://*.test\"], listen: \"192.0.2.1:8471\", certificate: /c, key: /k}\n",
		"issuer: {url: \"http://127.0.0.1:8471\", trustDomain: own.test, rotateEvery: 24h, listen: \"127.0.0.1:8471\"}\n",
	} {
		b, err := Parse("f", []byte(minimal+text))
		if err != nil {
			t.Fatal(err)
		}
		raw, err := b.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(t.TempDir(), "box.yaml")
		if err := os.WriteFile(file, raw, 0o600); err != nil {
			t.Fatal(err)
		}
		if again, err := Load(file); err != nil || !reflect.DeepEqual(again, b) {
			t.Errorf("written and read again: %+v, %v, want %+v", again, err, b)
		}
	}
}

// TestWrongIssuersAreRefused, each with where it is wrong.
func TestWrongIssuersAreRefused(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"{trustDomain: own.test}":                                                     "url is missing",
		"{url: \"https://a.test\"}":                                                   "trustDomain is missing",
		"{url: \"https://a.test/\", trustDomain: own.test}":                           "is not the name of an issuer",
		"{url: \"https://a.test/x\", trustDomain: own.test}":                          "is not the name of an issuer",
		"{url: \"https://u:p@a.test\", trustDomain: own.test}":                        "is not the name of an issuer",
		"{url: \"http://a.test\", trustDomain: own.test}":                             "by https",
		"{url: \"https://a.test\", trustDomain: \"spiffe://own.test\"}":               "is not a trust domain",
		"{url: \"https://a.test\", trustDomain: Own.test}":                            "is not a trust domain",
		"{url: \"https://a.test\", trustDomain: a, algorithm: none}":                  "not signed with",
		"{url: \"https://a.test\", trustDomain: a, algorithm: RS256}":                 "not signed with",
		"{url: \"https://a.test\", trustDomain: a, lifetime: 24h}":                    "lifetime is",
		"{url: \"https://a.test\", trustDomain: a, rotateEvery: 1s}":                  "rotateEvery is",
		"{url: \"https://a.test\", trustDomain: a, audiences: [\"[\"]}":               "not a pattern",
		"{url: \"https://a.test\", trustDomain: a, listen: \"192.0.2.1:1\"}":          "without TLS",
		"{url: \"https://a.test\", trustDomain: a, listen: \"0.0.0.0:1\"}":            "not an address",
		"{url: \"https://a.test\", trustDomain: a, certificate: /c}":                  "go together",
		"{url: \"https://a.test\", trustDomain: a, certificate: /c, key: /k}":         "nothing is served",
		"{url: \"https://a.test\", trustDomain: a, listen: \"127.0.0.1:1\", key: /k}": "go together",
		"{url: \"https://a.test\", trustDomain: a, keyFile: /k}":                      "unknown key",
	} {
		if _, err := Parse("f", []byte(minimal+"issuer: "+text+"\n")); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "f:4:") {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
