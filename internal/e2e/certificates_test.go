package e2e

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/apikey"
	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testcert"
	"tagout/internal/wire"
)

// far is a client of the API over TCP that shows a certificate.
type far struct {
	t   *testing.T
	url string
	*http.Client
}

func newFar(t *testing.T, dir, url string, ca, of *testcert.Authority, name string) far {
	t.Helper()
	security := &tls.Config{RootCAs: x509.NewCertPool(), MinVersion: tls.VersionTLS13}
	security.RootCAs.AppendCertsFromPEM(ca.PEM())
	if of != nil {
		of.Write(t, dir, "client", name, x509.ExtKeyUsageClientAuth)
		pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "client.pem"), filepath.Join(dir, "client.key"))
		if err != nil {
			t.Fatal(err)
		}
		security.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: security}}
	t.Cleanup(client.CloseIdleConnections)
	return far{t, url, client}
}

// call returns the answer's status, 0 where there is no answer, and decodes its body into out, unless that is nil.
func (f far) call(method, route string, in, out any) int {
	f.t.Helper()
	raw, err := json.Marshal(in)
	if err != nil {
		f.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(f.t.Context(), method, f.url+route, bytes.NewReader(raw))
	if err != nil {
		f.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := f.Do(req)
	if err != nil {
		return 0
	}
	defer resp.Body.Close() // read whole
	if out == nil {
		return resp.StatusCode
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		f.t.Fatal(err)
	}
	return resp.StatusCode
}

// TestTheAPIByCertificate: whoever has a certificate of the right authority and name does from afar what its roles name; a
// kid on the machine's network takes a person's approval there too, and agents and strangers get none.
func TestTheAPIByCertificate(t *testing.T) {
	t.Parallel()
	dir, addr := t.TempDir(), freePort(t)
	ca, other := testcert.New(t), testcert.New(t)
	ca.Write(t, dir, "server", "127.0.0.1", x509.ExtKeyUsageServerAuth)
	if err := os.WriteFile(filepath.Join(dir, "ca.pem"), ca.PEM(), 0o600); err != nil {
		t.Fatal(err)
	}
	box := newHostBox(t, func(b *config.Box) {
		b.API = config.API{
			Listen: addr, Certificate: filepath.Join(dir, "server.pem"), Key: filepath.Join(dir, "server.key"), ClientCA: filepath.Join(dir, "ca.pem"),
			Clients: []config.APIClient{
				{Name: "ci.test", Roles: []apikey.Role{apikey.RoleRead, apikey.RoleSpawn, apikey.RoleDestroy}}, {Name: "eye.test", Roles: []apikey.Role{apikey.RoleRead}},
			},
		}
	})
	url := "https://" + addr.String()
	ci := newFar(t, dir, url, ca, ca, "ci.test")
	card := strings.Replace(hostCard(), hostInputs, "", 1)
	req := wire.SpawnRequest{Name: "k1", Purpose: hostPurpose, Card: card}
	var no refusedCall
	for name, c := range map[string]struct {
		far
		code int
	}{
		"a reader": {newFar(t, dir, url, ca, ca, "eye.test"), http.StatusForbidden}, "another name": {newFar(t, dir, url, ca, ca, "x.test"), http.StatusUnauthorized},
		"nobody": {newFar(t, dir, url, ca, nil, ""), http.StatusUnauthorized}, "another authority": {newFar(t, dir, url, ca, other, "ci.test"), 0},
		"without an approval": {ci, http.StatusForbidden},
	} {
		if code := c.call("POST", "/v1/kids", req, &no); code != c.code {
			t.Errorf("%s: %d %+v, want %d", name, code, no, c.code)
		}
	}
	req.Approval = box.approval("k1", card, practice.Second)
	var kid wire.Kid
	if code := ci.call("POST", "/v1/kids", req, &kid); code != http.StatusOK || kid.Name != "k1" {
		t.Fatalf("an approved spawn: %d %+v", code, kid)
	}
	box.WaitRecord("who approved, and who asked", func(r *audit.Record) bool {
		return r.Event == audit.EventKidSpawned && r.Kid == "k1" && r.Actor == "cert:ci.test" && r.Fields["approved_by"] == practice.Second
	})
	if code := ci.call("DELETE", "/v1/kids/k1?reason=done", nil, nil); code != http.StatusNoContent {
		t.Errorf("destroy: %d", code)
	}
	if code := ci.call("POST", "/v1/kids", req, &no); code != http.StatusConflict || no.Reason != reason.OrderReplayed {
		t.Errorf("the approval once more: %d %+v", code, no)
	}
}

// refusedCall is what counts of a refusal.
type refusedCall struct {
	Reason reason.Code `json:"reason"`
	Detail string      `json:"detail"`
}
