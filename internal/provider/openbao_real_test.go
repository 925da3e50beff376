//go:build openbao

package provider_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/provider"
)

// These tests run against a real OpenBao (or Vault) and a real Redis, whose users are the dynamic secrets:
// `make test-openbao BAO=/path/to/bao`.

const realRoot = "root-token-of-the-test"

// freePort returns a port that nobody listened on a moment ago.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// daemon runs a program until the test ends.
func daemon(t *testing.T, name string, args ...string) *bytes.Buffer {
	t.Helper()
	var out bytes.Buffer
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr, cmd.Env = &out, &out, append(os.Environ(), "HOME="+t.TempDir())
	if err := cmd.Start(); err != nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait() // killed
		if t.Failed() {
			t.Logf("%s said:\n%s", name, out.String())
		}
	})
	return &out
}

func until(t *testing.T, what string, cond func() error) {
	t.Helper()
	deadline := time.Now().Add(60 * time.Second)
	for {
		err := cond()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("waited for %s: %v", what, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// redisTakes asks the database itself whether it lets the user in.
func redisTakes(t *testing.T, at string, s provider.Secret) bool {
	t.Helper()
	c, err := net.DialTimeout("tcp", at, 5*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(5 * time.Second))
	fmt.Fprintf(c, "AUTH %s %s\r\n", s.User, s.Value)
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.HasPrefix(line, "+OK")
}

// realBao is an OpenBao with AppRole and a database whose leases live for a minute.
type realBao struct {
	url, redis       string
	call             provider.Call
	roleID, secretID string
}

func startBao(t *testing.T) realBao {
	t.Helper()
	bin := os.Getenv("BAO")
	if bin == "" {
		t.Fatal("BAO names no OpenBao or Vault binary: make test-openbao BAO=/path/to/bao")
	}
	b := realBao{redis: fmt.Sprintf("127.0.0.1:%d", freePort(t))}
	_, port, _ := strings.Cut(b.redis, ":")
	daemon(t, "redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--requirepass", "admin-password", "--dir", t.TempDir())
	certs, at := t.TempDir(), freePort(t)
	b.url = fmt.Sprintf("https://localhost:%d", at)
	daemon(t, bin, "server", "-dev", "-dev-tls", "-dev-tls-cert-dir="+certs, "-dev-no-store-token", "-dev-root-token-id="+realRoot, fmt.Sprintf("-dev-listen-address=127.0.0.1:%d", at))
	until(t, "OpenBao's certificate", func() error {
		ca, err := filepath.Glob(filepath.Join(certs, "*ca*.pem"))
		if err != nil || len(ca) == 0 {
			return fmt.Errorf("none in %s", certs)
		}
		client, err := provider.NewHTTP(provider.Place{Host: "localhost", Addresses: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, CAFiles: ca[:1]})
		b.call = provider.Call{HTTP: client, Timeout: 10 * time.Second}
		return err
	})
	until(t, "OpenBao to be unsealed", func() error { _, err := b.ask("GET", "sys/mounts", nil); return err })
	b.must(t, "POST", "sys/auth/approle", map[string]any{"type": "approle"})
	b.must(t, "PUT", "sys/policies/acl/tagout", map[string]any{"policy": `path "database/creds/readonly" { capabilities = ["read"] }
path "sys/leases/revoke" { capabilities = ["update"] }
path "sys/leases/renew" { capabilities = ["update"] }`})
	b.must(t, "POST", "auth/approle/role/tagout", map[string]any{"token_policies": "tagout", "token_ttl": "5m", "token_max_ttl": "1h"})
	b.roleID = b.must(t, "GET", "auth/approle/role/tagout/role-id", nil)["role_id"].(string)
	b.secretID = b.must(t, "POST", "auth/approle/role/tagout/secret-id", nil)["secret_id"].(string)
	b.must(t, "POST", "sys/mounts/database", map[string]any{"type": "database"})
	n := 0
	fmt.Sscan(port, &n)
	b.must(t, "POST", "database/config/kv", map[string]any{"plugin_name": "valkey-database-plugin", "allowed_roles": "*", "host": "127.0.0.1", "port": n, "username": "default", "password": "admin-password"})
	b.must(t, "POST", "database/roles/readonly", map[string]any{"db_name": "kv", "creation_statements": `["+@read"]`, "default_ttl": "1m", "max_ttl": "1h"})
	return b
}

func (b realBao) ask(method, path string, in any) (map[string]any, error) {
	raw, err := json.Marshal(in)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequest(method, b.url+"/v1/"+path, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Vault-Token", realRoot)
	resp, err := b.call.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %d %s", method, path, resp.StatusCode, body)
	}
	var out struct{ Data map[string]any }
	json.Unmarshal(body, &out) // some answers have none
	return out.Data, err
}

func (b realBao) must(t *testing.T, method, path string, in any) map[string]any {
	t.Helper()
	out, err := b.ask(method, path, in)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// leases is how many leases of the role OpenBao holds.
func (b realBao) leases(t *testing.T) int {
	t.Helper()
	out, err := b.ask("LIST", "sys/leases/lookup/database/creds/readonly", nil)
	if err != nil {
		return 0 // it answers 404 for none
	}
	return len(out["keys"].([]any))
}

// TestRealOpenBao: a lease's user is one that the database lets in, until it is revoked; also by another login, and also
// one whose answer was lost.
func TestRealOpenBao(t *testing.T) {
	b := startBao(t)
	p := &provider.OpenBao{Call: b.call, URL: b.url, Mount: "approle", RoleID: "id", SecretID: "secret",
		Secrets: secrets(map[string]string{"id": b.roleID, "secret": b.secretID}),
		Roles:   map[string]provider.OpenBaoRole{"r": {Path: "database/creds/readonly", Value: "password", User: "username"}}}
	var n notes
	mint := func() provider.Lease {
		t.Helper()
		l, err := p.Mint(t.Context(), n.request("r"))
		if err != nil {
			t.Fatal(err)
		}
		if !redisTakes(t, b.redis, l.Secret) {
			t.Fatal("the database does not take what was leased: the test shows nothing")
		}
		return l
	}
	l := mint()
	if l.Lifetime > time.Minute || l.Lifetime < 50*time.Second || !l.Renewable || l.Secret.User == "" {
		t.Errorf("lease %v, renewable %v, user %q", l.Lifetime, l.Renewable, l.Secret.User)
	}
	if d, err := p.Renew(t.Context(), l.Handle, 4*time.Minute); err != nil || d < 3*time.Minute {
		t.Errorf("renewing: %v, %v", d, err)
	}
	other := mint()
	for range 2 { // again is no error
		if err := p.Revoke(t.Context(), l.Handle); err != nil {
			t.Fatal(err)
		}
	}
	if redisTakes(t, b.redis, l.Secret) || b.leases(t) != 1 {
		t.Errorf("the database takes what was revoked; %d leases", b.leases(t))
	}
	if !redisTakes(t, b.redis, other.Secret) {
		t.Error("another session's lease went with it")
	}
	h := other.Handle // its login is over, as after a long restart
	h.Token = "hvs.over"
	if err := p.Revoke(t.Context(), h); err != nil || redisTakes(t, b.redis, other.Secret) {
		t.Errorf("by another login: %v", err)
	}
	lost := mint()
	if err := p.Revoke(t.Context(), provider.Handle{Role: "r", Token: lost.Handle.Token}); err != nil { // all that was noted
		t.Error(err)
	}
	until(t, "OpenBao to revoke what hung on the login", func() error {
		if redisTakes(t, b.redis, lost.Secret) {
			return fmt.Errorf("the database still takes it")
		}
		return nil
	})
	down := &provider.OpenBao{Call: b.call, URL: b.url, Mount: "approle", RoleID: "id", SecretID: "secret", Roles: p.Roles,
		Secrets: secrets(map[string]string{"id": b.roleID, "secret": "not-the-secret"})}
	if _, err := down.Mint(context.Background(), n.request("r")); provider.KindOf(err) != provider.Refused {
		t.Errorf("a wrong secret id: %v", err)
	}
}

// TestRealOpenBaoTokenFile: with a token that somebody else keeps.
func TestRealOpenBaoTokenFile(t *testing.T) {
	b := startBao(t)
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(realRoot+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := &provider.OpenBao{Call: b.call, URL: b.url, TokenFile: file,
		Roles: map[string]provider.OpenBaoRole{"r": {Path: "database/creds/readonly", Value: "password", User: "username"}}}
	var n notes
	l, err := p.Mint(t.Context(), n.request("r"))
	if err != nil {
		t.Fatal(err)
	}
	if l.Handle.Token != "" || !redisTakes(t, b.redis, l.Secret) {
		t.Errorf("handle %+v", l.Handle)
	}
	if d, err := p.Renew(t.Context(), l.Handle, 5*time.Minute); err != nil || d < 4*time.Minute {
		t.Errorf("renewing: %v, %v", d, err)
	}
	if err := p.Revoke(t.Context(), l.Handle); err != nil || redisTakes(t, b.redis, l.Secret) {
		t.Errorf("revoking: %v", err)
	}
	if _, err := b.ask("GET", "sys/mounts", nil); err != nil {
		t.Errorf("the file's token went with the lease: %v", err)
	}
}
