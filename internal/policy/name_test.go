package policy

import (
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"tagout/internal/reason"
)

func TestName(t *testing.T) {
	t.Parallel()
	long63 := strings.Repeat("a", 63)
	max253 := strings.Repeat("a.", 126) + "b"
	for _, c := range []struct{ name, raw, want string }{
		{"lower", "api.vendor.test", "api.vendor.test"},
		{"E07 case and trailing dot", "API.Vendor.Test.", "api.vendor.test"},
		{"E07 IDNA name", "Bücher.vendor.test", "xn--bcher-kva.vendor.test"},
		{"E07 its A-label", "XN--BCHER-KVA.vendor.test", "xn--bcher-kva.vendor.test"},
		{"full-width letters", "ａｐｉ.vendor.test", "api.vendor.test"},
		{"ideographic full stop", "api。vendor。test。", "api.vendor.test"},
		{"sharp s is not ss", "straße.test", "xn--strae-oqa.test"},
		{"label of 63 bytes", long63 + ".test", long63 + ".test"},
		{"name of 253 bytes", max253, max253},
		{"with its trailing dot", max253 + ".", max253},
		{"underscore", "_dmarc.vendor.test", "_dmarc.vendor.test"},
		{"hyphens in the middle", "r3---sn-x.vendor.test", "r3---sn-x.vendor.test"},
		{"single label", "localhost", "localhost"},
		{"number label in front", "1.vendor.test", "1.vendor.test"},
		{"hex-like label in front", "0x7f.vendor.test", "0x7f.vendor.test"},
	} {
		got, err := Name(c.raw)
		if err != nil || got != c.want {
			t.Errorf("%s: Name(%q) = %q, %v; want %q", c.name, c.raw, got, err, c.want)
		}
	}
}

func TestNameRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, raw string
		code      reason.Code
		addr      string
	}{
		{"empty", "", reason.NameInvalid, ""},
		{"root", ".", reason.NameInvalid, ""},
		{"E07 two trailing dots", "api.vendor.test..", reason.NameInvalid, ""},
		{"leading dot", ".vendor.test", reason.NameInvalid, ""},
		{"empty label", "api..test", reason.NameInvalid, ""},
		{"E07 label of 64 bytes", strings.Repeat("a", 64) + ".test", reason.NameInvalid, ""},
		{"E07 name of 256 bytes", strings.Repeat("a.", 127) + "bb", reason.NameInvalid, ""},
		{"254 bytes", strings.Repeat("a.", 126) + "bb", reason.NameInvalid, ""},
		{"very long", strings.Repeat("ü", 5000), reason.NameInvalid, ""},
		{"E16 NUL", "evil\x00.api.vendor.test", reason.NameInvalid, ""},
		{"newline", "api.vendor.test\n", reason.NameInvalid, ""},
		{"DEL", "api\x7f.vendor.test", reason.NameInvalid, ""},
		{"DNS escape", `evil\000.api.vendor.test`, reason.NameInvalid, ""},
		{"blank", "api .vendor.test", reason.NameInvalid, ""},
		{"percent", "api%2evendor.test", reason.NameInvalid, ""},
		{"at", "api.vendor.test@evil.test", reason.NameInvalid, ""},
		{"star", "*.vendor.test", reason.NameInvalid, ""},
		{"port", "api.vendor.test:443", reason.NameInvalid, ""},
		{"hyphen first", "-api.vendor.test", reason.NameInvalid, ""},
		{"broken A-label", "xn--\x61\x61\x61\x61.test", reason.NameInvalid, ""},
		{"not UTF-8", "\xff.vendor.test", reason.NameInvalid, ""},
		{"full-width colon", "api.vendor.test：443", reason.NameInvalid, ""},
		{"right to left override", "api\u202e.vendor.test", reason.NameInvalid, ""},
		{"range", "10.0.0.0/8", reason.NameInvalid, ""},
		{"E17 two parts, hex", "0x7f.1", reason.RawAddress, "127.0.0.1"},
		{"E17 one number", "2130706433", reason.RawAddress, "127.0.0.1"},
		{"E17 mapped", "[::ffff:c0a8:101]", reason.RawAddress, "192.168.1.1"},
		{"E17 NAT64", "[64:ff9b::7f00:1]", reason.RawAddress, "127.0.0.1"},
		{"octal", "0177.0.0.01", reason.RawAddress, "127.0.0.1"},
		{"trailing dot", "127.0.0.1.", reason.RawAddress, "127.0.0.1"},
		{"full-width digits", "１２７.0.0.1", reason.RawAddress, "127.0.0.1"},
		{"capital hex", "0X7F000001", reason.RawAddress, "127.0.0.1"},
		{"public", "203.0.113.7", reason.RawAddress, "203.0.113.7"},
		{"unbracketed v6", "2001:db8::1", reason.RawAddress, "2001:db8::1"},
		{"zone", "fe80::1%eth0", reason.RawAddress, "fe80::1"},
		{"no address", "1.2.3.4.5", reason.RawAddress, ""},
		{"too big", "4294967296", reason.RawAddress, ""},
		{"bad octal", "09.1", reason.RawAddress, ""},
		{"number last", "vendor.0x1f", reason.RawAddress, ""},
		{"metadata", "169.254.169.254", reason.Metadata, "169.254.169.254"},
		{"metadata as number", "2852039166", reason.Metadata, "169.254.169.254"},
		{"metadata in NAT64", "[64:ff9b::a9fe:a9fe]", reason.Metadata, "169.254.169.254"},
	} {
		got, err := Name(c.raw)
		var ne *NameError
		if !errors.As(err, &ne) || got != "" {
			t.Errorf("%s: Name(%q) = %q, %v; want a NameError", c.name, c.raw, got, err)
			continue
		}
		if ne.Reason != c.code {
			t.Errorf("%s: reason %v, want %v (%v)", c.name, ne.Reason, c.code, ne)
		}
		if addr := ne.Addr; addr.IsValid() != (c.addr != "") || addr.IsValid() && addr.String() != c.addr {
			t.Errorf("%s: address %v, want %q", c.name, addr, c.addr)
		}
	}
}

// TestNameVariants: any change of case and any one trailing dot leads to the same name.
func TestNameVariants(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2)) // a test wants the same numbers each time
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	for range 2000 {
		var labels []string
		for range 1 + rng.IntN(5) {
			label := make([]byte, 1+rng.IntN(20))
			for i := range label {
				label[i] = letters[rng.IntN(len(letters))]
			}
			labels = append(labels, string(label))
		}
		name := strings.Join(append(labels, "test"), ".")
		variant := []byte(name)
		for i, c := range variant {
			if c >= 'a' && rng.IntN(2) == 0 {
				variant[i] = c - 0x20
			}
		}
		raw := string(variant)
		if rng.IntN(2) == 0 {
			raw += "."
		}
		if got, err := Name(raw); err != nil || got != name {
			t.Fatalf("Name(%q) = %q, %v; want %q", raw, got, err, name)
		}
	}
}

func TestAuthority(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		raw  string
		name string
		port uint16
	}{
		{"api.vendor.test", "api.vendor.test", 0},
		{"API.vendor.test.:443", "api.vendor.test", 443},
	} {
		if name, port, err := Authority(c.raw); err != nil || name != c.name || port != c.port {
			t.Errorf("Authority(%q) = %q, %d, %v", c.raw, name, port, err)
		}
	}
	for _, raw := range []string{
		"", ":443", "api.vendor.test:", "api.vendor.test:0", "api.vendor.test:+443", "api.vendor.test:0443",
		"api.vendor.test:65536", "api.vendor.test:443:443", "[::1]:443", "[::1]x", "[::1", "user@api.vendor.test:443",
		"203.0.113.7:443", "api.vendor.test:44 3",
	} {
		if name, port, err := Authority(raw); err == nil {
			t.Errorf("Authority(%q) = %q, %d; want an error", raw, name, port)
		}
	}
}

func FuzzName(f *testing.F) {
	for _, s := range []string{
		"api.vendor.test", "API.Vendor.Test.", "bücher.test", "xn--bcher-kva.test", "0x7f.1", "2130706433",
		"[::ffff:c0a8:101]", "evil\x00.api.vendor.test", "a。b", "xn--a-.test", "ａ．test", "1%.test", "xn--0.test",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		name, err := Name(raw)
		if err != nil {
			var ne *NameError
			if !errors.As(err, &ne) || name != "" || ne.Reason == reason.OK {
				t.Fatalf("Name(%q) = %q, %#v", raw, name, err)
			}
			return
		}
		if again, err := Name(name); err != nil || again != name {
			t.Fatalf("Name(%q) = %q, but Name of that = %q, %v", raw, name, again, err)
		}
		if len(name) > maxName || strings.HasSuffix(name, ".") || strings.Trim(name, "abcdefghijklmnopqrstuvwxyz0123456789-_.") != "" {
			t.Fatalf("Name(%q) = %q is not canonical", raw, name)
		}
		if _, ok := strings.CutPrefix(name, "*."); ok || endsInNumber(name) {
			t.Fatalf("Name(%q) = %q", raw, name)
		}
	})
}
