package provider_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"encoding/pem"

	"tagout/internal/provider"
	"tagout/internal/provider/providertest"
)

// issuer is what a test needs of each kind.
type issuer struct {
	name    string
	p       provider.Provider
	role    string
	accepts func(provider.Secret) bool // as the issuer sees it
	live    func() int                 // credentials that the issuer takes; nil: it cannot say
	fault   func(providertest.Fault)
	handler http.Handler // without faults
	values  []string     // what is secret on the way to it
}

// place serves h over TLS under a name of its own and returns its URL and a client that reaches it there alone.
func place(t testing.TB, h http.Handler, timeout time.Duration) (string, provider.Call) {
	t.Helper()
	srv := httptest.NewTLSServer(h)
	t.Cleanup(srv.Close)
	ca := filepath.Join(t.TempDir(), "ca.pem")
	raw := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})
	if err := os.WriteFile(ca, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	// httptest's certificate is for example.com.
	client, err := provider.NewHTTP(provider.Place{Host: "example.com", Addresses: []netip.Addr{netip.MustParseAddr(u.Hostname())}, CAFiles: []string{ca}})
	if err != nil {
		t.Fatal(err)
	}
	return "https://example.com:" + u.Port(), provider.Call{HTTP: client, Timeout: timeout}
}

func secrets(m map[string]string) provider.Secrets {
	return func(name string) (string, error) {
		if v, ok := m[name]; ok {
			return v, nil
		}
		return "", errors.New("the vault holds no " + name)
	}
}

func issuers(t testing.TB, timeout time.Duration) []issuer {
	t.Helper()
	value := func(accepts func(string) bool) func(provider.Secret) bool {
		return func(s provider.Secret) bool { return accepts(s.Value) }
	}
	var out []issuer

	bao := providertest.NewBao()
	at, call := place(t, bao, timeout)
	roles := map[string]provider.OpenBaoRole{"r": {Path: "database/creds/readonly", Value: "password", User: "username"}}
	out = append(out, issuer{"openbao-approle", &provider.OpenBao{Call: call, URL: at, Mount: "approle", RoleID: "id", SecretID: "secret", Roles: roles,
		Secrets: secrets(map[string]string{"id": bao.RoleID, "secret": bao.SecretID})}, "r", value(bao.Accepts), bao.Live, bao.SetFault, bao.Handler(), []string{bao.SecretID}})

	filed := providertest.NewBao()
	at, call = place(t, filed, timeout)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(filed.Root+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	out = append(out, issuer{"openbao-token-file", &provider.OpenBao{Call: call, URL: at, TokenFile: file, Roles: roles}, "r", value(filed.Accepts), filed.Live, filed.SetFault, filed.Handler(), []string{filed.Root}})

	for _, c := range []struct {
		name, subject string
		inBody        bool
	}{{"oauth-client", "", false}, {"oauth-exchange", "subject", true}} {
		o := providertest.NewOAuth()
		at, call = place(t, o, timeout)
		out = append(out, issuer{c.name, &provider.OAuth{Call: call, TokenURL: at + "/token", RevokeURL: at + "/revoke", ClientID: o.ClientID, Secret: "client", InBody: c.inBody,
			Secrets: secrets(map[string]string{"client": o.Secret, "subject": o.Subject}),
			Roles:   map[string]provider.OAuthRole{"r": {Scopes: []string{"read", "list"}, Subject: c.subject, Audience: "https://api.vendor.test"}}},
			"r", value(o.Accepts), o.Live, o.SetFault, o.Handler(), []string{o.Secret}})
	}

	gh, err := providertest.NewGitHub()
	if err != nil {
		t.Fatal(err)
	}
	at, call = place(t, gh, timeout)
	out = append(out, issuer{"github-app", &provider.GitHubApp{Call: call, URL: at, AppID: gh.AppID, Key: "key", Secrets: secrets(map[string]string{"key": gh.Key()}),
		Roles: map[string]provider.GitHubRole{"r": {Installation: 77, Repositories: []string{"docs"}, Permissions: map[string]string{"contents": "read"}}}},
		"r", value(gh.Accepts), gh.Live, gh.SetFault, gh.Handler(), []string{gh.Key()}})

	aws := providertest.NewAWS()
	at, call = place(t, aws, timeout)
	out = append(out, issuer{"aws-sts", &provider.AWS{STS: provider.Endpoint{Call: call, URL: at, Region: "eu-central-1"}, IAM: provider.Endpoint{Call: call, URL: at, Region: "us-east-1"},
		KeyID: "keyid", Key: "key", Secrets: secrets(map[string]string{"keyid": aws.KeyID, "key": aws.Key}), Now: time.Now,
		Roles: map[string]provider.AWSRole{"r": {ARN: "arn:aws:iam::123456789012:role/ci/deploy"}}},
		"r", func(s provider.Secret) bool { return aws.Accepts(s.User) }, nil, aws.SetFault, aws.Handler(), []string{aws.Key}})
	return out
}

// notes keeps what a mint noted.
type notes struct{ last *provider.Handle }

func (n *notes) request(role string) provider.Request {
	return provider.Request{ID: "01JLEASE", Session: "01JSESSION", Kid: "kid1", Card: "practice", Role: role, Lifetime: time.Hour,
		Note: func(h provider.Handle) error { n.last = &h; return nil }}
}

// TestALeaseLivesUntilItIsRevoked: each issuer takes what it gave, and takes it no more once Revoke has returned. The
// control is the moment before.
func TestALeaseLivesUntilItIsRevoked(t *testing.T) {
	t.Parallel()
	for _, is := range issuers(t, 10*time.Second) {
		t.Run(is.name, func(t *testing.T) {
			t.Parallel()
			var n notes
			l, err := is.p.Mint(t.Context(), n.request(is.role))
			if err != nil {
				t.Fatal(err)
			}
			if l.Lifetime <= 59*time.Minute || l.Lifetime > time.Hour+time.Second || n.last == nil || *n.last != l.Handle {
				t.Errorf("lease %+v, noted %+v", l.Lifetime, n.last)
			}
			if !is.accepts(l.Secret) {
				t.Fatal("the issuer does not take what it gave: the test shows nothing")
			}
			other, err := is.p.Mint(t.Context(), func() provider.Request { r := n.request(is.role); r.ID = "01JOTHER"; return r }())
			if err != nil {
				t.Fatal(err)
			}
			if l.Renewable {
				if d, err := is.p.Renew(t.Context(), l.Handle, 30*time.Minute); err != nil || d <= 0 {
					t.Errorf("renewing: %v, %v", d, err)
				}
			} else if _, err := is.p.Renew(t.Context(), l.Handle, time.Minute); provider.KindOf(err) != provider.Refused {
				t.Errorf("renewing what is not renewed: %v", err)
			}
			for range 2 { // again is no error
				if err := is.p.Revoke(t.Context(), l.Handle); err != nil {
					t.Fatal(err)
				}
			}
			if is.accepts(l.Secret) {
				t.Error("the issuer still takes it")
			}
			if !is.accepts(other.Secret) {
				t.Error("another session's lease went with it")
			}
			if tidy, ok := is.p.(provider.Tidier); ok {
				if err := tidy.Tidy(t.Context(), l.Handle); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// TestProvidersThatFail: whatever an issuer does, a call ends in its time with an error that says what can be done and
// shows nothing.
func TestProvidersThatFail(t *testing.T) {
	t.Parallel()
	const planted = "PLANTED-SECRET-0123456789"
	for _, c := range []struct {
		name  string
		fault providertest.Fault
		kind  provider.Kind
	}{
		{"hangs", providertest.Hang, provider.Unsure},
		{"is down", providertest.Answer(503, planted), provider.Unreachable},
		{"breaks", providertest.Answer(500, planted), provider.Unsure},
		{"refuses", providertest.Answer(403, `{"error":"`+planted+` \u0007","errors":["`+planted+`"]}`), provider.Refused},
		{"is full of nothing", providertest.Answer(200, "{}"), provider.Malformed},
		{"speaks HTML", providertest.Answer(200, "<html>"+planted), provider.Malformed},
		{"never ends", providertest.Answer(200, `{"access_token":"`+strings.Repeat("a", 300<<10)), provider.Malformed},
		{"sends elsewhere", func(w http.ResponseWriter, r *http.Request) bool {
			http.Redirect(w, r, "https://evil.example.net/", http.StatusTemporaryRedirect)
			return true
		}, provider.Malformed},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for _, is := range issuers(t, 500*time.Millisecond) {
				is.fault(c.fault)
				var n notes
				begun := time.Now()
				_, err := is.p.Mint(t.Context(), n.request(is.role))
				if err == nil || provider.KindOf(err) != c.kind {
					t.Errorf("%s: kind %d (%v), want %d", is.name, provider.KindOf(err), err, c.kind)
					continue
				}
				if took := time.Since(begun); took > 8*time.Second {
					t.Errorf("%s: it took %v", is.name, took)
				}
				for _, v := range append(is.values, planted) {
					if strings.Contains(err.Error(), v) {
						t.Errorf("%s: the error shows a secret: %v", is.name, err)
					}
				}
				if err := is.p.Revoke(t.Context(), provider.Handle{Role: is.role, ID: "a/b", Token: "token"}); err == nil && c.kind != provider.Malformed {
					t.Errorf("%s: what %s has revoked", is.name, c.name)
				}
			}
		})
	}
}

// TestAProviderIsCheckedAndPinned: neither another certificate, nor another name, nor an address that no name should
// have is called.
func TestAProviderIsCheckedAndPinned(t *testing.T) {
	t.Parallel()
	srv := httptest.NewTLSServer(providertest.NewOAuth())
	t.Cleanup(srv.Close)
	u, _ := url.Parse(srv.URL)
	local := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	for _, c := range []struct {
		name  string
		place provider.Place
		url   string
		want  string
	}{
		{"a certificate that nobody vouches for", provider.Place{Host: "example.com", Addresses: local}, "https://example.com:" + u.Port(), "not trusted"},
		{"another host", provider.Place{Host: "example.com", Addresses: local}, "https://evil.test:" + u.Port(), "only example.com"},
		{"a name that leads inside", provider.Place{Host: "localhost"}, "https://localhost:" + u.Port(), "localhost"},
	} {
		client, err := provider.NewHTTP(c.place)
		if err != nil {
			t.Fatal(err)
		}
		o := &provider.OAuth{Call: provider.Call{HTTP: client, Timeout: 5 * time.Second}, TokenURL: c.url + "/token", Secret: "s",
			Secrets: secrets(map[string]string{"s": "12345678"}), Roles: map[string]provider.OAuthRole{"r": {}}}
		var n notes
		_, err = o.Mint(t.Context(), n.request("r"))
		if err == nil || provider.KindOf(err) != provider.Unreachable || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// TestMoreThanWasAskedFor: what is wider than its role is an error, and noted, so that it can be given back.
func TestMoreThanWasAskedFor(t *testing.T) {
	t.Parallel()
	o := providertest.NewOAuth()
	o.Grants = "read admin"
	at, call := place(t, o, 5*time.Second)
	gh, err := providertest.NewGitHub()
	if err != nil {
		t.Fatal(err)
	}
	gh.Wide = true
	ghAt, ghCall := place(t, gh, 5*time.Second)
	for name, p := range map[string]provider.Provider{
		"oauth": &provider.OAuth{Call: call, TokenURL: at + "/token", RevokeURL: at + "/revoke", ClientID: o.ClientID, Secret: "s",
			Secrets: secrets(map[string]string{"s": o.Secret}), Roles: map[string]provider.OAuthRole{"r": {Scopes: []string{"read"}}}},
		"github": &provider.GitHubApp{Call: ghCall, URL: ghAt, AppID: gh.AppID, Key: "k", Secrets: secrets(map[string]string{"k": gh.Key()}),
			Roles: map[string]provider.GitHubRole{"r": {Installation: 77, Repositories: []string{"docs"}, Permissions: map[string]string{"contents": "read"}}}},
	} {
		var n notes
		if _, err := p.Mint(t.Context(), n.request("r")); err == nil || !strings.Contains(err.Error(), "more") {
			t.Errorf("%s: %v", name, err)
		}
		if n.last == nil {
			t.Fatalf("%s: nothing was noted, so nothing can be given back", name)
		}
		if err := p.Revoke(t.Context(), *n.last); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if o.Live()+gh.Live() != 0 {
		t.Error("what was too wide is still valid")
	}
}

// TestALostAnswerIsRevoked: OpenBao made the lease and its answer never came. The login that was noted before takes it
// back; AWS' tag does the same.
func TestALostAnswerIsRevoked(t *testing.T) {
	t.Parallel()
	for _, is := range issuers(t, 5*time.Second) {
		if is.name != "openbao-approle" {
			continue
		}
		is.fault(providertest.Lose(func(r *http.Request) bool { return strings.HasSuffix(r.URL.Path, "/readonly") }, is.handler))
		var n notes
		if _, err := is.p.Mint(t.Context(), n.request(is.role)); provider.KindOf(err) != provider.Unsure {
			t.Fatalf("minting: %v", err)
		}
		is.fault(nil)
		if is.live() != 1 || n.last == nil {
			t.Fatalf("%d leases are there, noted %v: the test shows nothing", is.live(), n.last)
		}
		if err := is.p.Revoke(t.Context(), *n.last); err != nil || is.live() != 0 {
			t.Errorf("revoking: %v; %d leases are left", err, is.live())
		}
	}
}

// TestARevocationOutlivesTheLogin: the login that made the lease is over, as after a restart long after; another one
// revokes it.
func TestARevocationOutlivesTheLogin(t *testing.T) {
	t.Parallel()
	bao := providertest.NewBao()
	at, call := place(t, bao, 5*time.Second)
	p := &provider.OpenBao{Call: call, URL: at, Mount: "approle", RoleID: "id", SecretID: "secret",
		Roles:   map[string]provider.OpenBaoRole{"r": {Path: "database/creds/readonly", Value: "password"}},
		Secrets: secrets(map[string]string{"id": bao.RoleID, "secret": bao.SecretID})}
	var n notes
	l, err := p.Mint(t.Context(), n.request("r"))
	if err != nil {
		t.Fatal(err)
	}
	h := l.Handle
	h.Token = "hvs.expired"
	if err := p.Revoke(t.Context(), h); err != nil || bao.Accepts(l.Secret.Value) {
		t.Errorf("revoking: %v, accepted %v", err, bao.Accepts(l.Secret.Value))
	}
	if bao.Logins() != 1 {
		t.Errorf("%d logins are left, want that of the mint alone", bao.Logins())
	}
}

// TestGivenUp: a mint whose caller went away ends at once.
func TestGivenUp(t *testing.T) {
	t.Parallel()
	for _, is := range issuers(t, time.Minute) {
		is.fault(providertest.Hang)
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		var n notes
		begun := time.Now()
		if _, err := is.p.Mint(ctx, n.request(is.role)); err == nil || time.Since(begun) > 10*time.Second {
			t.Errorf("%s: %v after %v", is.name, err, time.Since(begun))
		}
		cancel()
	}
}
