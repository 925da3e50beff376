package provider

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// always answers every request alike.
type always struct {
	status int
	body   []byte
	header http.Header
}

func (a always) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	return &http.Response{StatusCode: a.status, Header: a.header, Body: io.NopCloser(bytes.NewReader(a.body)), Request: r}, nil
}

const fuzzSecret = "fuzz-secret-that-nobody-shows"

var fuzzKey = sync.OnceValue(func() string {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		panic(err)
	}
	return base64.StdEncoding.EncodeToString(pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}))
})

// FuzzAnswers: whatever a provider answers, at whatever step, a call ends in a lease that is whole and within bounds, or in
// an error that shows nothing of what was sent or came.
func FuzzAnswers(f *testing.F) {
	f.Add(uint8(0), 200, []byte(`{"lease_id":"a/b","lease_duration":60,"data":{"password":"0123456789"},"auth":{"client_token":"tok","lease_duration":9}}`), "")
	f.Add(uint8(1), 200, []byte(`{"access_token":"0123456789","token_type":"bearer","expires_in":60,"scope":"read"}`), "5")
	f.Add(uint8(2), 201, []byte(`{"token":"0123456789","expires_at":"2999-01-01T00:00:00Z","permissions":{"contents":"read"}}`), "")
	f.Add(uint8(3), 200, []byte(`<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>A</AccessKeyId><SecretAccessKey>0123456789</SecretAccessKey><SessionToken>s</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>`), "")
	f.Add(uint8(1), 400, []byte(`{"error":"invalid_client"}`), "-1")
	f.Fuzz(func(t *testing.T, kind uint8, status int, body []byte, wait string) {
		if status < 200 || status > 599 {
			return
		}
		call := Call{HTTP: &http.Client{
			Transport:     always{status, body, http.Header{"Retry-After": {wait}, "Date": {wait}, "Location": {"https://evil.test"}}},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}, Timeout: 10 * time.Second}
		vault := func(name string) (string, error) {
			switch name {
			case "key":
				return fuzzKey(), nil
			case "s":
				return fuzzSecret, nil
			}
			return "", errors.New("unknown")
		}
		p := []Provider{
			&OpenBao{Call: call, URL: "https://p.test", Mount: "approle", RoleID: "s", SecretID: "s", Secrets: vault, Roles: map[string]OpenBaoRole{"r": {Path: "p", Value: "password", User: "username"}}},
			&OAuth{Call: call, TokenURL: "https://p.test", RevokeURL: "https://p.test", Secret: "s", Secrets: vault, Roles: map[string]OAuthRole{"r": {Scopes: []string{"read"}}}},
			&GitHubApp{Call: call, URL: "https://p.test", Key: "key", Secrets: vault, Roles: map[string]GitHubRole{"r": {Repositories: []string{"x"}, Permissions: map[string]string{"contents": "read"}}}},
			&AWS{STS: Endpoint{Call: call, URL: "https://p.test"}, IAM: Endpoint{Call: call, URL: "https://p.test"}, KeyID: "s", Key: "s", Secrets: vault, Now: time.Now, Roles: map[string]AWSRole{"r": {ARN: "a/b"}}},
		}[kind%4]
		l, err := p.Mint(context.Background(), Request{ID: "ID", Role: "r", Lifetime: time.Hour, Note: func(Handle) error { return nil }})
		if err == nil {
			if checkSecret(l.Secret) != nil || l.Lifetime <= 0 || l.Lifetime > maxLifetime || l.Handle.Role != "r" || l.Handle.ID+l.Handle.Token == "" {
				t.Fatalf("lease %+v", l)
			}
		} else {
			quiet(t, err)
		}
		h := Handle{Role: "r", ID: "i", Token: "handle-token"}
		if d, err := p.Renew(context.Background(), h, time.Minute); err != nil {
			quiet(t, err)
		} else if d <= 0 || d > maxLifetime {
			t.Fatalf("renewed for %v", d)
		}
		if err := p.Revoke(context.Background(), h); err != nil {
			quiet(t, err)
		} else if status >= 300 && (kind%4 != 2 || status != http.StatusUnauthorized) { // GitHub's for a token that is over
			t.Fatalf("status %d counts as revoked", status)
		}
		if err := p.Revoke(context.Background(), Handle{Role: "r", Token: "handle-token"}); err == nil && status >= 300 && (kind%4 != 2 || status != http.StatusUnauthorized) {
			t.Fatalf("status %d counts as revoked, where only a login was noted", status)
		}
	})
}

func quiet(t *testing.T, err error) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || len(e.Text) > 400 || strings.Contains(e.Text, fuzzSecret) || strings.Contains(e.Text, "handle-token") || strings.ContainsFunc(e.Text, func(r rune) bool { return r < ' ' }) {
		t.Fatalf("error %q", err)
	}
}
