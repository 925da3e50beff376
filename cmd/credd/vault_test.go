package main

import (
	"bytes"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"filippo.io/age"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// TestAKilledCreddLosesNoChangeOfTheVault: credd is killed while secrets are rotated and the identity is sealed anew to one key
// after another. Each time it opens again, with one of the two newest keys, and has the newest value that was acknowledged, or
// the one whose answer the kill cut off.
func TestAKilledCreddLosesNoChangeOfTheVault(t *testing.T) {
	w := newWorld(t)
	w.start()
	if err := w.call("PUT", "/v1/vault/vendor_api", wire.VaultEntry{Value: value(0), Hosts: []string{"api.vendor.test:443"}}, nil); err != nil {
		t.Fatal(err)
	}
	keys := [2]*age.X25519Identity{newKey(t), newKey(t)} // the sealed one, and the one that may be
	if err := w.call("POST", "/v1/vault-seal", wire.SealRequest{Recipient: keys[0].Recipient().String()}, nil); err != nil {
		t.Fatal(err)
	}
	n := 0
	for round := range 8 {
		var kept, tried atomic.Int64
		kept.Store(int64(n))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for i := n + 1; ; i++ {
				tried.Store(int64(i))
				if w.call("POST", "/v1/vault/vendor_api/rotate", wire.RotateRequest{Value: value(i)}, nil) != nil {
					return
				}
				kept.Store(int64(i))
				if err := w.call("POST", "/v1/vault-seal", wire.SealRequest{Recipient: keys[i%2].Recipient().String()}, nil); err != nil {
					return
				}
			}
		}()
		deadline := time.Now().Add(10 * time.Second)
		for kept.Load() < int64(n+1+round) { // another moment in each round
			if time.Now().After(deadline) {
				t.Fatal("nothing is rotated")
			}
			time.Sleep(time.Millisecond)
		}
		w.kill()
		<-done
		w.start()
		var state wire.VaultState
		for _, k := range keys {
			if err := w.call("POST", "/v1/vault-unlock", wire.UnlockRequest{Key: k.String()}, &state); err != nil && control.Status(err) != http.StatusForbidden {
				t.Fatal(err)
			}
		}
		if !state.Open {
			t.Fatalf("round %d: neither key opens the vault", round)
		}
		mark := w.inst.SessionMark(uint32(round + 1)) // small
		got, err := w.asProxy(wire.ResolveRequest{Mark: mark, Token: w.mint(mark), Host: "api.vendor.test", Port: 443})
		if err != nil || got.Value != value(int(kept.Load())) && got.Value != value(int(tried.Load())) {
			t.Fatalf("round %d: %v; it is not the value of change %d or %d", round, err, kept.Load(), tried.Load())
		}
		fmt.Sscanf(got.Value, "value-%d-", &n)
	}
}

func value(n int) string { return fmt.Sprintf("value-%d-0123456789", n) }

func newKey(t *testing.T) *age.X25519Identity {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// TestTheVaultIsRootsAlone: the proxy's user, who may ask what tokens stand for, can do nothing else to the vault; the control
// is root with the same requests.
func TestTheVaultIsRootsAlone(t *testing.T) {
	w := newWorld(t)
	w.start()
	for _, c := range []struct{ method, route, body string }{
		{"PUT", "/v1/vault/a", `{"value":"0123456789","hosts":["a.test:443"]}`},
		{"GET", "/v1/vault", ""},
		{"POST", "/v1/vault/a/rotate", `{"value":"9876543210"}`},
		{"GET", "/v1/vault-state", ""},
		{"POST", "/v1/vault-seal", `{"plain":true}`},
		{"POST", "/v1/vault-unlock", `{"key":"x"}`},
		{"POST", "/v1/sessions", `{"kid":"k","session":"s","card":"c","mark":` + fmt.Sprint(w.inst.SessionMark(1)) + `}`},
		{"GET", "/v1/sessions/k/use", ""},
		{"DELETE", "/v1/vault/a", ""},
	} {
		status, err := w.statusAsProxy(c.method, c.route, c.body)
		if err != nil || status != http.StatusForbidden {
			t.Errorf("the proxy's %s %s: status %d, %v", c.method, c.route, status, err)
		}
		var body any
		if c.body != "" {
			body = rawJSON(c.body)
		}
		if err := w.call(c.method, c.route, body, nil); err != nil {
			t.Errorf("root's %s %s: %v", c.method, c.route, err)
		}
	}
}

// rawJSON is a body as it is.
type rawJSON string

func (r rawJSON) MarshalJSON() ([]byte, error) { return []byte(r), nil }

// statusAsProxy makes a call with the proxy's credentials.
func (w *world) statusAsProxy(method, route, body string) (status int, err error) {
	err = w.onProxysThread(func(socket string) error {
		req, err := http.NewRequest(method, "http://credd"+route, bytes.NewReader([]byte(strings.TrimSpace(body)))) // blocking on purpose
		if err != nil {
			return err
		}
		resp, err := sendHere(socket, req)
		if err != nil {
			return err
		}
		status = resp.StatusCode
		return resp.Body.Close()
	})
	return status, err
}
