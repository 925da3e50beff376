package credential

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"filippo.io/age"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

const bound = "api.vendor.test"

// use presents a token in a request to the bound host, and says what of it a refusal was for.
func (b *box) use(token, method, path string, at wire.Presentation) (got wire.ResolveReply, scope string, err error) {
	b.svc.tokens.delivering.RLock()
	defer b.svc.tokens.delivering.RUnlock()
	got, u, no := b.svc.use(&wire.ResolveRequest{Mark: testMark, Token: token, Host: bound, Port: 443, Method: method, Path: path, Place: at})
	if no != nil {
		return got, u.scope, no
	}
	return got, u.scope, nil
}

func (b *box) putEntry(name string, e wire.VaultEntry) (info wire.VaultInfo) {
	b.t.Helper()
	if err := b.call("PUT", "/v1/vault/"+name, e, &info); err != nil {
		b.t.Fatal(err)
	}
	return info
}

func at(as, name string) wire.Presentation { return wire.Presentation{As: as, Name: name} }

// places are all that a proxy can say; each is tried with each presentation.
var places = []wire.Presentation{
	{}, at("header", "X-Api-Key"), at("header", "x-api-key"), at("header", "Authorization"), at("bearer", ""), at("basic", ""), at("query", "key"),
	at("query", "KEY"), at("cookie", "sid"), at("sigv4", ""), at("body", "auth.key"), at("body", "auth"), at("websocket", "auth.key"), at("websocket", ""),
	at("fragment", "key"),
}

func TestATokenIsSwappedOnlyWhereItsSecretIsShown(t *testing.T) {
	b := newBox(t).start()
	for _, c := range []struct {
		name    string
		present wire.Presentation
		want    []wire.Presentation // the places that are right
	}{
		{"any", wire.Presentation{}, []wire.Presentation{{}, at("header", "X-Api-Key"), at("header", "x-api-key"), at("header", "Authorization"),
			at("bearer", ""), at("basic", ""), at("cookie", "sid")}},
		{"header", at("header", "x-API-key"), []wire.Presentation{at("header", "X-Api-Key"), at("header", "x-api-key")}},
		{"authorization", at("header", "Authorization"), []wire.Presentation{at("header", "Authorization"), at("bearer", ""), at("basic", "")}},
		{"bearer", at("bearer", ""), []wire.Presentation{at("bearer", "")}},
		{"basic", wire.Presentation{As: "basic", User: "ci"}, []wire.Presentation{at("basic", "")}},
		{"query", at("query", "key"), []wire.Presentation{at("query", "key")}},
		{"cookie", at("cookie", "sid"), []wire.Presentation{at("cookie", "sid")}},
		{"sigv4", wire.Presentation{As: "sigv4", User: "AKIAIOSFODNN7EXAMPLE"}, []wire.Presentation{at("sigv4", "")}},
		{"body", at("body", "auth.key"), []wire.Presentation{at("body", "auth.key")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			secret := "s_" + c.name
			b.putEntry(secret, wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}, Present: c.present})
			token := b.mint("kid-"+c.name, testMark, secret)
			for _, p := range places {
				got, scope, err := b.use(token, "GET", "/", p)
				if slices.Contains(c.want, p) {
					if err != nil || got.Value != testValue || got.Present.As != c.present.As || got.Present.User != c.present.User {
						t.Errorf("at %+v: %+v, %v", p, got, err)
					}
					continue
				}
				if got.Value != "" || scope != scopePlace || codeOf(err) != reason.TokenScope {
					t.Errorf("at %+v: %+v, %v, refused for its %q", p, got, err, scope)
				}
			}
			if err := b.call("DELETE", "/v1/sessions/kid-"+c.name, nil, nil); err != nil {
				t.Fatal(err)
			}
			b.svc.tokens.revoked = newRevocations() // the next case has the mark
		})
	}
}

func TestMethodsAndPathsNarrowASecret(t *testing.T) {
	b := newBox(t).start()
	b.putEntry("narrow", wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}, Methods: []string{"POST", "GET", "GET"}, Paths: []string{"/v1/*", "/healthz"}})
	token := b.mint("kid1", testMark, "narrow")
	for _, c := range []struct{ method, path, scope string }{
		{"GET", "/v1/items", ""},
		{"POST", "/v1/items?next=/v2/", ""},
		{"GET", "/healthz", ""},
		{"DELETE", "/v1/items", scopeMethod},
		{"get", "/v1/items", scopeMethod},
		{"", "/v1/items", scopeMethod},
		{"GET", "/v2/items", scopePath},
		{"GET", "/v1/../admin", scopePath},
		{"GET", "/v1/%2e%2e/admin", scopePath},
		{"GET", "/v1/a%2fb", scopePath},
		{"GET", "/healthz/x", scopePath},
		{"GET", "https://api.vendor.test/v1/items", scopePath},
		{"GET", "", scopePath},
		{"GET", "/v2/items?key=" + testValue, scopePath},
	} {
		got, scope, err := b.use(token, c.method, c.path, at("bearer", ""))
		switch {
		case c.scope == "" && (err != nil || got.Value != testValue):
			t.Errorf("%s %s: %+v, %v", c.method, c.path, got, err)
		case c.scope != "" && (scope != c.scope || codeOf(err) != reason.TokenScope || got.Value != ""):
			t.Errorf("%s %s: %+v, %v, refused for its %q and not for its %q", c.method, c.path, got, err, scope, c.scope)
		case c.scope != "" && strings.Contains(err.Error(), testValue):
			t.Errorf("a query is in the detail: %v", err)
		}
	}
	// The control: without the narrowing each of them passes.
	b.putEntry("narrow", wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}})
	if _, _, err := b.use(token, "DELETE", "/v2/items", at("bearer", "")); err != nil {
		t.Errorf("with any method and path: %v", err)
	}
}

// TestRecordsSayWhatOfARequestWasWrong: the record of a refusal names it.
func TestRecordsSayWhatOfARequestWasWrong(t *testing.T) {
	b := newBox(t).start()
	b.putEntry("narrow", wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}, Present: at("bearer", ""), Methods: []string{"GET"}, Paths: []string{"/v1/*"}})
	token := b.mint("kid1", testMark, "narrow")
	right := wire.ResolveRequest{Mark: testMark, Token: token, Host: bound, Port: 443, Method: "GET", Path: "/v1/x", Place: at("bearer", "")}
	change := map[string]func(r *wire.ResolveRequest){
		scopeSession: func(r *wire.ResolveRequest) { r.Mark = otherMark },
		scopeHost:    func(r *wire.ResolveRequest) { r.Host = "other.test" },
		scopePlace:   func(r *wire.ResolveRequest) { r.Place = at("cookie", "a") },
		scopeMethod:  func(r *wire.ResolveRequest) { r.Method = "PUT" },
		scopePath:    func(r *wire.ResolveRequest) { r.Path = "/v2/x" },
	}
	for _, fn := range change {
		req := right
		fn(&req)
		refusedWith(t, b.call("POST", "/v1/resolve", req, nil), 403, reason.TokenScope)
	}
	if err := b.call("POST", "/v1/resolve", right, nil); err != nil {
		t.Errorf("what is right: %v", err)
	}
	b.stop()
	for _, rec := range b.rec.find(audit.EventTokenRefused) {
		if scope := rec.Fields["scope"]; change[scope] == nil || rec.Reason != reason.TokenScope || rec.Detail == "" {
			t.Errorf("the record %+v", rec)
		} else {
			delete(change, scope)
		}
	}
	if len(change) != 0 {
		t.Errorf("not recorded: %v", change)
	}
}

func codeOf(err error) reason.Code {
	var no *refusal
	if !errors.As(err, &no) {
		return reason.OK
	}
	return no.code
}

func TestBindingsThatCannotBe(t *testing.T) {
	b := newBox(t).start()
	for name, change := range map[string]func(e *wire.VaultEntry){
		"an unknown way":             func(e *wire.VaultEntry) { e.Present.As = "hunter2hunter2" },
		"a header without a name":    func(e *wire.VaultEntry) { e.Present.As = "header" },
		"a header with a line end":   func(e *wire.VaultEntry) { e.Present = at("header", "X-A\r\nX-B") },
		"a header that frames":       func(e *wire.VaultEntry) { e.Present = at("header", "content-LENGTH") },
		"the host as a header":       func(e *wire.VaultEntry) { e.Present = at("header", "host") },
		"a bearer with a name":       func(e *wire.VaultEntry) { e.Present = at("bearer", "x") },
		"a bearer with a user":       func(e *wire.VaultEntry) { e.Present = wire.Presentation{As: "bearer", User: "x"} },
		"a user with a colon":        func(e *wire.VaultEntry) { e.Present = wire.Presentation{As: "basic", User: "a:b"} },
		"a user with a line end":     func(e *wire.VaultEntry) { e.Present = wire.Presentation{As: "basic", User: "a\n"} },
		"a query without a name":     func(e *wire.VaultEntry) { e.Present.As = "query" },
		"a cookie with an equals":    func(e *wire.VaultEntry) { e.Present = at("cookie", "a=b") },
		"a field with empty parts":   func(e *wire.VaultEntry) { e.Present = at("body", "a..b") },
		"an access key that is none": func(e *wire.VaultEntry) { e.Present = wire.Presentation{As: "sigv4", User: "AKIA/../x"} },
		"no access key":              func(e *wire.VaultEntry) { e.Present.As = "sigv4" },
		"any field with a name":      func(e *wire.VaultEntry) { e.Present.Name = "x" },
		"a name of a page":           func(e *wire.VaultEntry) { e.Present = at("query", strings.Repeat("x", 129)) },
		"a method in small letters":  func(e *wire.VaultEntry) { e.Methods = []string{"get"} },
		"a method that tunnels":      func(e *wire.VaultEntry) { e.Methods = []string{"CONNECT"} },
		"a path without a slash":     func(e *wire.VaultEntry) { e.Paths = []string{"v1/*"} },
		"a path with a query":        func(e *wire.VaultEntry) { e.Paths = []string{"/v1?x=1"} },
		"too many paths":             func(e *wire.VaultEntry) { e.Paths = make([]string, 65) },
		"no host":                    func(e *wire.VaultEntry) { e.Hosts = nil },
	} {
		t.Run(name, func(t *testing.T) {
			e := wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}}
			change(&e)
			err := b.call("PUT", "/v1/vault/a", e, nil)
			refusedWith(t, err, 400, reason.Malformed)
			if err != nil && strings.Contains(err.Error(), "hunter2") {
				t.Errorf("what may be the value is repeated: %v", err)
			}
			if b.svc.vault.has("a") {
				t.Error("it is in the vault")
			}
		})
	}
}

func TestRotationKeepsTheBindingAndTheTokens(t *testing.T) {
	b := newBox(t).start()
	first := b.putEntry("narrow", wire.VaultEntry{Value: testValue, Hosts: []string{bound + ":443"}, Present: at("bearer", ""), Methods: []string{"GET"}})
	token := b.mint("kid1", testMark, "narrow")
	var second wire.VaultInfo
	if err := b.call("POST", "/v1/vault/narrow/rotate", wire.RotateRequest{Value: "another-" + testValue}, &second); err != nil {
		t.Fatal(err)
	}
	if first.Version != 1 || !first.Rotated.IsZero() || second.Version != 2 || second.Rotated.IsZero() || second.Present.As != "bearer" || len(second.Methods) != 1 {
		t.Errorf("before %+v, after %+v", first, second)
	}
	got, _, err := b.use(token, "GET", "/", at("bearer", ""))
	if err != nil || got.Value != "another-"+testValue {
		t.Errorf("the live token: %+v, %v", got, err)
	}
	if _, scope, err := b.use(token, "POST", "/", at("bearer", "")); scope != scopeMethod || err == nil {
		t.Errorf("a method that the binding does not have: %v", err)
	}
	refusedWith(t, b.call("POST", "/v1/vault/narrow/rotate", wire.RotateRequest{Value: "another-" + testValue}, nil), 400, reason.Malformed)
	refusedWith(t, b.call("POST", "/v1/vault/narrow/rotate", wire.RotateRequest{Value: "short"}, nil), 400, reason.Malformed)
	refusedWith(t, b.call("POST", "/v1/vault/nope/rotate", wire.RotateRequest{Value: testValue}, nil), 404, reason.SecretUnknown)
	recs := b.rec.find(audit.EventVaultChanged)
	if f := recs[1].Fields; f["change"] != "rotated" || f["version_before"] != "1" || f["version"] != "2" {
		t.Errorf("the record of the rotation: %+v", recs[1])
	}
	raw, err := json.Marshal(recs)
	if err != nil || strings.Contains(string(raw), testValue) {
		t.Errorf("a record holds a value: %v", err)
	}
	b.stop()
	b.start()
	if list := b.svc.vault.list(); len(list) != 1 || list[0].Version != 2 || list[0].Rotated.IsZero() {
		t.Errorf("after a restart: %+v", list)
	}
}

// TestAVaultOfTheFirstVersionIsRead, with what it knew, and is written as one that an older build does not take for
// wider than it is.
func TestAVaultOfTheFirstVersionIsRead(t *testing.T) {
	dir := t.TempDir()
	id, err := makeIdentity(filepath.Join(dir, "identity.age"))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "vault.age")
	err = seal(path, id, `{"version":1,"secrets":{"old":{"value":"dmVuZG9yLXMzY3JldA==","hosts":["a.test:443"],"updated":"2026-01-02T03:04:05Z"}}}`)
	if err != nil {
		t.Fatal(err)
	}
	v := testVault(t, dir)
	if list := v.list(); len(list) != 1 || list[0].Name != "old" || list[0].Hosts[0] != "a.test:443" || list[0].Version != 1 {
		t.Fatalf("read %+v", list)
	}
	if _, err := v.rotate("old", testValue); err != nil {
		t.Fatal(err)
	}
	v.close()
	if err := seal(path, id, `{"version":3,"secrets":{}}`); err != nil {
		t.Fatal(err)
	}
	if _, err := openVault(dir, nil, func(string) {}); err == nil {
		t.Error("a vault of a later version was read")
	}
}

func seal(path string, to *age.X25519Identity, plain string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	w, err := age.Encrypt(f, to.Recipient())
	if err != nil {
		return err
	}
	_, err = w.Write([]byte(plain))
	return errors.Join(err, w.Close(), f.Close())
}

// FuzzPresentation: what is taken can be written into a request without changing what the request is.
func FuzzPresentation(f *testing.F) {
	f.Add("header", "X-Api-Key", "")
	f.Add("basic", "", "ci")
	f.Add("query", "key\r\nHost: x", "")
	f.Add("sigv4", "", "AKIAIOSFODNN7EXAMPLE")
	f.Add("", "a", "b")
	f.Fuzz(func(t *testing.T, as, name, user string) {
		p, err := checkPresentation(wire.Presentation{As: as, Name: name, User: user})
		if err != nil {
			return
		}
		for _, s := range []string{p.As, p.Name, p.User} {
			if strings.ContainsAny(s, "\r\n\x00") || len(s) > maxName {
				t.Errorf("%+v was taken", p)
			}
		}
		again, err := checkPresentation(p)
		if err != nil || again != p {
			t.Errorf("%+v is not canonical: %+v, %v", p, again, err)
		}
		if !shownAt(p, wire.Presentation{As: p.As, Name: p.Name}) {
			t.Errorf("%+v is not shown where it says", p)
		}
	})
}
