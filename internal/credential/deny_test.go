package credential

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// spell writes a name in another way that a person could take for the same.
func spell(rng *rand.Rand, name string) string {
	var b strings.Builder
	for _, r := range name {
		switch rng.IntN(8) {
		case 0:
			b.WriteString(strings.ToUpper(string(r)))
		case 1:
			if r >= 'a' && r <= 'z' {
				r += 'ａ' - 'a' // full width
			}
			b.WriteRune(r)
		case 2:
			b.WriteRune(r)
			b.WriteString([]string{"\u200b", "\u00ad", " ", "\t", "\u2060", "\ufeff", "\u0301"}[rng.IntN(7)])
		default:
			b.WriteRune(r)
		}
	}
	return []string{"", "", " ", "\n"}[rng.IntN(4)] + b.String() + []string{"", "", " ", "\x00"}[rng.IntN(4)]
}

// TestWhatIsDeniedIsGivenOnNoRoute tries names of denied secrets, in thousands of spellings, on every route on which credd
// gives something for a name. The vault holds every name of them that it takes. The control is a box without the pattern.
func TestWhatIsDeniedIsGivenOnNoRoute(t *testing.T) {
	b := newBox(t).start(func(c *Config) { c.Deny = []string{"Root_*", "*_signing_key", "master"} })
	names := []string{"payment_key", "Payment_Card", "payment_", "PAYMENT_K.x-y", "root_ca", "ROOT_ca", "my_signing_key", "Master"}
	for i, name := range names {
		b.put(name, fmt.Sprintf("%s-%d", testValue, i), bound+":443")
	}
	rng := rand.New(rand.NewPCG(1, 2))
	tried := map[string]bool{}
	for i := range 4000 {
		name := names[rng.IntN(len(names))]
		if i >= len(names) {
			name = spell(rng, name)
		} else {
			name = names[i]
		}
		tried[name] = true
		if !b.svc.denied(name) {
			t.Fatalf("%q is not denied", name)
		}
		req := mintFor("kid1", testMark, name)
		if no := b.svc.checkMint(&req); no == nil || no.code != reason.SecretDenied {
			t.Fatalf("minting %q: %v", name, no)
		}
		req = mintFor("kid1", testMark)
		req.Mint = []wire.MintToken{{Name: name, Audience: "a"}}
		if no := b.svc.checkMint(&req); no == nil {
			t.Fatalf("minting a JWT called %q was not refused", name)
		}
		if len(tried)%500 == 1 { // over the socket, whole
			refusedWith(t, b.call("POST", "/v1/sessions", mintFor("kid1", testMark, name), nil), 403, reason.SecretDenied)
		}
	}
	if len(tried) < 3000 {
		t.Errorf("only %d spellings were tried", len(tried))
	}
	if sessions, tokens := b.svc.tokens.size(); sessions != 0 || tokens != 0 {
		t.Errorf("%d sessions and %d tokens were made", sessions, tokens)
	}
	for _, name := range []string{"pay_ment", "xpayment_key", "rootca", "signing_key2", "vendor_api", "paymen_t"} { // and no more than that
		if b.svc.denied(name) {
			t.Errorf("%q is denied", name)
		}
	}
}

// TestADeniedSecretHasNoOtherName: its value is taken under no name that can be granted, set or rotated, in either order.
func TestADeniedSecretHasNoOtherName(t *testing.T) {
	b := newBox(t).start()
	b.put("payment_key", testValue, bound+":443")
	b.put("vendor_api", "other-"+testValue, bound+":443")
	set := func(name, value string) error {
		return b.call("PUT", "/v1/vault/"+name, wire.VaultEntry{Value: value, Hosts: []string{bound + ":443"}}, nil)
	}
	rotate := func(name, value string) error {
		return b.call("POST", "/v1/vault/"+name+"/rotate", wire.RotateRequest{Value: value}, nil)
	}
	for what, err := range map[string]error{
		"a new name":              set("harmless", testValue),
		"a name that is there":    set("vendor_api", testValue),
		"by rotating":             rotate("vendor_api", testValue),
		"the other way round":     set("root_key", "other-"+testValue),
		"the other way, rotating": rotate("payment_key", "other-"+testValue),
	} {
		t.Run(what, func(t *testing.T) {
			refusedWith(t, err, 400, reason.Malformed)
			if err != nil && strings.Contains(err.Error(), testValue) {
				t.Error("the value is repeated")
			}
		})
	}
	for what, err := range map[string]error{
		"two that can be granted":   set("vendor_two", "other-"+testValue),
		"two that cannot":           set("payment_two", testValue),
		"the same name once more":   set("vendor_api", "other-"+testValue),
		"the same name, denied too": set("payment_key", testValue),
	} {
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func FuzzDenied(f *testing.F) {
	for _, name := range []string{"payment_x", " Payment_X", "ｐayment_x", "pay\u200bment_x", "payment_/x", "vendor_api"} {
		f.Add(name)
	}
	s := &Service{deny: []string{"payment_*"}}
	f.Fuzz(func(t *testing.T, name string) {
		if strings.HasPrefix(strings.ToLower(strings.TrimSpace(name)), "payment_") && !s.denied(name) {
			t.Errorf("%q is not denied", name)
		}
		if secretNameRE.MatchString(name) && s.denied(name) != strings.HasPrefix(strings.ToLower(name), "payment_") {
			t.Errorf("%q, which the vault takes: %v", name, s.denied(name))
		}
	})
}
