package credential

import (
	"testing"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestProofToken: it stands for no secret, is active until it is revoked, and opens nothing; the answer to the
// revocation carries the order's nonce.
func TestProofToken(t *testing.T) {
	b := newBox(t).start(func(c *Config) { c.Deny = []string{"*"} })
	var reply wire.MintReply
	req := mintFor("proof-1", testMark)
	req.Proof = true
	if err := b.call("POST", "/v1/sessions", req, &reply); err != nil {
		t.Fatal(err)
	}
	token := reply.Tokens[wire.ProofSecret]
	if len(reply.Tokens) != 1 || token == "" {
		t.Fatalf("minted %v", reply.Tokens)
	}
	if got := b.introspect(token); !got.Active || got.Kid != "proof-1" {
		t.Errorf("introspection: %+v", got)
	}
	_, err := b.resolve(testMark, token, "api.vendor.test", 443)
	refusedWith(t, err, 403, reason.TokenUnknown)
	var done wire.RevokeReply
	if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}, Nonce: "n1"}, &done); err != nil || done.Revoked != 1 || done.Nonce != "n1" {
		t.Errorf("%+v, %v", done, err)
	}
	if b.introspect(token).Active {
		t.Error("active after it was revoked")
	}
	// Nobody gets such a token by naming it as a secret, or puts a value behind it.
	refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark+1, wire.ProofSecret), nil), 403, reason.SecretDenied)
	if err := b.call("PUT", "/v1/vault/"+wire.ProofSecret, wire.VaultEntry{Value: testValue, Hosts: []string{"a.test:443"}}, nil); err == nil {
		t.Error("the vault takes a value for a proof's token")
	}
}
