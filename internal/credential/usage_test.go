package credential

import (
	"reflect"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestASessionsEndSaysWhatItDidNotNeed: secrets that were never used, and tokens that were for more than their use; a
// revocation before the end changes nothing of it, refused uses are none, and canaries lie there to be left alone.
func TestASessionsEndSaysWhatItDidNotNeed(t *testing.T) {
	for name, revoke := range map[string]bool{"while it lives": false, "after a stop": true} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t).start()
			b.put("idle", testValue, bound+":443")
			b.putEntry("bait", wire.VaultEntry{Value: "bait-" + testValue, Canary: true})
			b.putEntry("wide", wire.VaultEntry{Value: "wide-" + testValue, Hosts: []string{bound + ":443", bound + ":8443", "other.test:443"}, Methods: []string{"GET", "POST"}, Paths: []string{"/v1/*", "/v2/*"}})
			b.putEntry("any", wire.VaultEntry{Value: "any1-" + testValue, Hosts: []string{bound + ":443"}})
			b.putEntry("right", wire.VaultEntry{Value: "righ-" + testValue, Hosts: []string{bound + ":443"}, Methods: []string{"GET"}, Paths: []string{"/v1/*"}})
			var reply wire.MintReply
			if err := b.call("POST", "/v1/sessions", mintFor("kid1", testMark, "idle", "bait", "wide", "any", "right"), &reply); err != nil {
				t.Fatal(err)
			}
			use := func(secret, method, path, host string) error {
				return b.call("POST", "/v1/resolve", wire.ResolveRequest{Mark: testMark, Token: reply.Tokens[secret], Host: host, Port: 443, Method: method, Path: path}, nil)
			}
			for _, u := range []string{"wide", "wide", "any", "right"} {
				if err := use(u, "GET", "/v1/x", bound); err != nil {
					t.Fatal(err)
				}
			}
			refusedWith(t, use("idle", "GET", "/", "other.test"), 403, reason.TokenScope)
			refusedWith(t, use("wide", "DELETE", "/v1/x", "other.test"), 403, reason.TokenScope)
			want := wire.CredentialUse{Granted: []string{"idle", "wide", "any", "right"}, Unused: []string{"idle"}, Wide: []wire.WideSecret{
				{Secret: "wide", Uses: 2, Hosts: []string{bound + ":8443", "other.test:443"}, Methods: []string{"POST"}, Paths: []string{"/v2/*"}},
				{Secret: "any", Uses: 1, OnlyMethod: "GET"},
			}}
			if revoke {
				if err := b.call("POST", "/v1/revoke", wire.RevokeRequest{Marks: []uint32{testMark}}, nil); err != nil {
					t.Fatal(err)
				}
			}
			var got wire.CredentialUse
			if err := b.call("GET", "/v1/sessions/kid1/use", nil, &got); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("so far: %+v, %v", got, err)
			}
			for range 2 { // the second end finds nothing
				if err := b.call("DELETE", "/v1/sessions/kid1", nil, nil); err != nil {
					t.Fatal(err)
				}
			}
			refusedWith(t, b.call("GET", "/v1/sessions/kid1/use", nil, nil), 404, reason.UnknownSession)
			b.stop()
			recs := b.rec.find(audit.EventTokenJudged)
			if len(recs) != 1 {
				t.Fatalf("%d records of it, want one", len(recs))
			}
			f := recs[0].Fields
			if recs[0].Kid != "kid1" || recs[0].Mark != testMark || f["granted"] != "idle,wide,any,right" || f["unused"] != "idle" ||
				!strings.Contains(f["wide"], "method POST never used") || !strings.Contains(f["wide"], "any: any method, and only GET used") || strings.Contains(f["wide"], "right") {
				t.Errorf("the record: %+v", recs[0])
			}
		})
	}
}

// TestNothingIsSaidOfWhatHasNothing: sessions without secrets, and sessions of before credd started.
func TestNothingIsSaidOfWhatHasNothing(t *testing.T) {
	b := newBox(t).start()
	if err := b.call("POST", "/v1/sessions", mintFor("kid1", testMark), nil); err != nil {
		t.Fatal(err)
	}
	for _, kid := range []string{"kid1", "kid2"} {
		if err := b.call("DELETE", "/v1/sessions/"+kid, nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	b.stop()
	if recs := b.rec.find(audit.EventTokenJudged); len(recs) != 0 {
		t.Errorf("recorded: %+v", recs)
	}
}

// TestUsesAreRememberedInBounds: a kid chooses methods and paths, and cannot fill credd's memory with them.
func TestUsesAreRememberedInBounds(t *testing.T) {
	u := newUsage()
	h := &holder{kid: "k", secrets: []string{"s"}}
	u.begin(h)
	for i := range 10000 {
		m := strings.Repeat("M", i%64+1)
		u.note(h, "s", &binding{Hosts: []string{"a:1"}}, "a:1", &wire.ResolveRequest{Method: m, Path: "/" + m})
	}
	if s := u.peek("k").uses["s"]; s.uses != 10000 || len(s.methods) != 2 || len(s.hosts) != 1 || len(s.paths) != 0 {
		t.Errorf("remembered: %+v", s)
	}
	u.note(&holder{kid: "k"}, "s", nil, "a:1", &wire.ResolveRequest{}) // of another session with that kid's name
	if s := u.end("k").uses["s"]; s.uses != 10000 {
		t.Errorf("a use of another session counts: %d", s.uses)
	}
	u.note(h, "s", nil, "a:1", &wire.ResolveRequest{})
	if u.peek("k") != nil {
		t.Error("a use after the end is remembered")
	}
}
