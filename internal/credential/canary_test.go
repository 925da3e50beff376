package credential

import (
	"errors"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestACanaryIsNeverGivenAway: every use of a canary's token is refused and recorded, for the session that presents it
// and for the one that holds it, wherever it is presented; its value is never told. The same secret without the flag is.
func TestACanaryIsNeverGivenAway(t *testing.T) {
	t.Parallel()
	b := newBox(t).start()
	const other = testMark + 1
	if err := b.call("PUT", "/v1/vault/bait", wire.VaultEntry{Value: testValue, Canary: true}, nil); err != nil {
		t.Fatal("a canary without a host: ", err)
	}
	if err := b.call("PUT", "/v1/vault/hosted", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}, Canary: true}, nil); err != nil {
		t.Fatal(err)
	}
	bait, hosted := b.mint("kid1", testMark, "bait"), b.mint("kid2", other, "hosted")
	refusedAs := func(err error) reason.Code {
		var ce *control.Error
		if !errors.As(err, &ce) {
			return reason.OK
		}
		return ce.Problem.Reason
	}
	for _, use := range []struct {
		mark  uint32
		token string
		host  string
	}{{testMark, bait, "api.vendor.test"}, {testMark, bait, "-"}, {other, hosted, "api.vendor.test"}, {testMark, hosted, "api.vendor.test"}} {
		if reply, err := b.resolve(use.mark, use.token, use.host, 443); refusedAs(err) != reason.Canary || reply.Value != "" {
			t.Errorf("%+v: %+v, %v", use, reply, err)
		}
	}
	if b.introspect(bait).Active {
		t.Error("introspection says that a canary's token is active")
	}
	marks := map[uint32]int{}
	b.wait("the records", func() bool {
		clear(marks)
		for _, r := range b.rec.find(audit.EventTokenRefused) {
			if r.Reason == reason.Canary && r.Outcome == audit.OutcomeDeny {
				marks[r.Mark]++
			}
		}
		return marks[testMark] >= 3 && marks[other] >= 2
	})
	// The holder of a token that somebody else presents is told of, too.
	leaks := 0
	for _, r := range b.rec.find(audit.EventTokenRefused) {
		if r.Reason == reason.Canary && r.Mark == other && r.Fields["token_id"] == "" {
			leaks++
		}
	}
	if leaks != 1 {
		t.Errorf("%d records of the session whose canary leaked", leaks)
	}
	if err := b.call("PUT", "/v1/vault/hosted", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}, nil); err != nil {
		t.Fatal(err)
	}
	if reply, err := b.resolve(other, hosted, "api.vendor.test", 443); err != nil || reply.Value != testValue {
		t.Errorf("without the flag: %v", err)
	}
	var no wire.ResolveReply
	if err := b.call("POST", "/v1/resolve", wire.ResolveRequest{Mark: other, Token: hosted, Host: "api.vendor.test", Port: 443, None: true}, &no); refusedAs(err) != reason.TokenScope {
		t.Errorf("where no credential belongs: %v", err)
	}
}
