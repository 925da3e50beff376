package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"regexp"
	"strings"
	"testing"

	"tagout/internal/reason"
)

// TestRequest is E18 and part of E12: judged in the same way on an inspected TLS and on a plain HTTP host.
func TestRequest(t *testing.T) {
	t.Parallel()
	p := compile(t, vendor())
	for host, port := range map[string]uint16{"api.vendor.test": 443, "files.vendor.test": 80} {
		for _, c := range []struct {
			method, path string
			want         reason.Code
		}{
			{"GET", "/v1/x", reason.OK},
			{"GET", "/v1/", reason.OK},
			{"GET", "/v1/a/b?q=/../x&y=%2f", reason.OK},
			{"GET", "/v1/a%20b", reason.OK},
			{"GET", "/%761/x", reason.OK}, // decodes to /v1/x
			{"POST", "/v1/x", reason.MethodDenied},
			{"DELETE", "/v1/x", reason.MethodDenied},
			{"get", "/v1/x", reason.MethodDenied},
			{"GET /v1/y", "/v1/x", reason.MethodDenied},
			{"", "/v1/x", reason.MethodDenied},
			{"GET", "/v1", reason.PathDenied},
			{"GET", "/admin", reason.PathDenied},
			{"GET", "/V1/x", reason.PathDenied},
			{"GET", "/v1/../admin", reason.PathDenied},
			{"GET", "/v1/./x", reason.PathDenied},
			{"GET", "/v1/..", reason.PathDenied},
			{"GET", "/v1%2f..%2fadmin", reason.AmbiguousHTTP},
			{"GET", "/v1/a%2Fb", reason.AmbiguousHTTP},
			{"GET", "/v1/%2e%2e/admin", reason.AmbiguousHTTP},
			{"GET", "/v1/.%2E/admin", reason.AmbiguousHTTP},
			{"GET", "/v1/..;x/admin", reason.AmbiguousHTTP},
			{"GET", "/v1/..%20/admin", reason.AmbiguousHTTP},
			{"GET", "/v1/%252e%252e/admin", reason.AmbiguousHTTP},
			{"GET", `/v1/..\admin`, reason.AmbiguousHTTP},
			{"GET", "/v1/..%5cadmin", reason.AmbiguousHTTP},
			{"GET", "/v1/%c0%ae%c0%ae/admin", reason.AmbiguousHTTP},
			{"GET", "/v1//x", reason.AmbiguousHTTP},
			{"GET", "//v1/x", reason.AmbiguousHTTP},
			{"GET", "/v1/x%00", reason.AmbiguousHTTP},
			{"GET", "/v1/x\x00", reason.AmbiguousHTTP},
			{"GET", "/v1/x%0d%0aHost: evil.test", reason.AmbiguousHTTP},
			{"GET", "/v1/x y", reason.AmbiguousHTTP},
			{"GET", "/v1/x#y", reason.AmbiguousHTTP},
			{"GET", "/v1/x%3f", reason.AmbiguousHTTP},
			{"GET", "/v1/%zz", reason.AmbiguousHTTP},
			{"GET", "/v1/%2", reason.AmbiguousHTTP},
			{"GET", "v1/x", reason.AmbiguousHTTP},
			{"GET", "", reason.AmbiguousHTTP},
			{"GET", "*", reason.AmbiguousHTTP},
			{"GET", "http://evil.test/v1/x", reason.AmbiguousHTTP},
		} {
			check(t, host+" "+c.method+" "+c.path, p.Request(host, port, c.method, c.path), c.want)
		}
		check(t, "host with port", p.Request(fmt.Sprintf("%s.:%d", strings.ToUpper(host), port), port, "GET", "/v1/x"), reason.OK)
		check(t, "other port", p.Request(host+":8080", port, "GET", "/v1/x"), reason.HostMismatch)
		check(t, "other host", p.Request("evil.test", port, "GET", "/v1/x"), reason.NameNotAllowed) // E12
		check(t, "host and more", p.Request(host+".evil.test", port, "GET", "/v1/x"), reason.NameNotAllowed)
		check(t, "address", p.Request("203.0.113.7", port, "GET", "/v1/x"), reason.RawAddress)
		check(t, "NUL", p.Request("evil\x00."+host, port, "GET", "/v1/x"), reason.NameInvalid)
		check(t, "no host", p.Request("", port, "GET", "/v1/x"), reason.NameInvalid)
	}
}

func TestRequestWithoutLimits(t *testing.T) {
	t.Parallel()
	p := compile(t, Spec{Allow: []Rule{
		{Host: "*.vendor.test", Ports: []uint16{80}, Protocol: HTTP},
		{Host: "a.vendor.test", Ports: []uint16{443}, Protocol: TLS},
		{Host: "a.vendor.test", Ports: []uint16{1}, Protocol: TCP},
	}})
	for _, c := range []struct {
		host, method, path string
		want               reason.Code
	}{
		{"npm.vendor.test", "GET", "/@scope%2fname", reason.OK}, // nothing to get around without paths
		{"npm.vendor.test", "PATCH", "/a/../b", reason.OK},
		{"npm.vendor.test", "OPTIONS", "*", reason.OK},
		{"npm.vendor.test", "GET", "*", reason.AmbiguousHTTP},
		{"npm.vendor.test", "GET", "/a b", reason.AmbiguousHTTP},
		{"npm.vendor.test", "GET", "/a\r\n", reason.AmbiguousHTTP},
		{"npm.vendor.test", "TRACE", "/", reason.MethodDenied}, // would echo an injected credential
		{"npm.vendor.test", "trace", "/", reason.MethodDenied},
		{"npm.vendor.test", "CONNECT", "/", reason.MethodDenied},
		{"a.b.vendor.test", "GET", "/", reason.NameNotAllowed},
		{"vendor.test", "GET", "/", reason.NameNotAllowed},
	} {
		check(t, c.host+" "+c.method+" "+c.path, p.Request(c.host, 80, c.method, c.path), c.want)
	}
	check(t, "not inspected", p.Request("a.vendor.test", 443, "GET", "/"), reason.NotTLS)
	check(t, "tcp", p.Request("a.vendor.test", 1, "GET", "/"), reason.NotHTTP)
	check(t, "no rule for the port", p.Request("a.vendor.test", 2, "GET", "/"), reason.PortNotAllowed)
}

// TestGlob compares matchGlob with the same glob as a regular expression.
func TestGlob(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(7, 8)) // a test wants the same numbers each time
	random := func(alphabet string, n int) string {
		out := make([]byte, rng.IntN(n))
		for i := range out {
			out[i] = alphabet[rng.IntN(len(alphabet))]
		}
		return "/" + string(out)
	}
	matched := 0
	for range 200_000 {
		glob, path := random("ab/\x00**", 8), random("ab/\x00", 8)
		source, open := glob, strings.HasSuffix(glob, "*")
		if open {
			source = strings.TrimSuffix(glob, "*")
		}
		source = "(?s)^" + strings.ReplaceAll(regexp.QuoteMeta(source), `\*`, "[^/\x00]*")
		if open {
			source += "[^\x00]*"
		}
		want := regexp.MustCompile(source + "$").MatchString(path)
		glob = strings.ReplaceAll(glob, slashMark, encodedSlash)
		if got := matchGlob(glob, path); got != want {
			t.Fatalf("matchGlob(%q, %q) = %v, want %v", glob, path, got, want)
		}
		if want {
			matched++
		}
	}
	if matched < 1000 {
		t.Fatalf("only %d pairs matched: the test shows little", matched)
	}
}

func FuzzPath(f *testing.F) {
	for _, s := range []string{
		"/v1/x", "/v1/../admin", "/v1%2f..%2fadmin", "/v1/%2e%2e/", "/%252e", "/a//b", "/a;b/..;c", "/%", "/%zz", "/\x00", `/\`, "/a?b=%2f",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		path, err := Path(raw)
		if err != nil {
			return
		}
		if path == "" || path[0] != '/' || strings.ContainsAny(path, "\\\x00\r\n?#") || strings.Contains(path, "//") {
			t.Fatalf("Path(%q) = %q", raw, path)
		}
		for segment := range strings.SplitSeq(path, "/") {
			if segment == "." || segment == ".." {
				t.Fatalf("Path(%q) = %q has a dot segment", raw, path)
			}
		}
		// Escapes never make or hide a slash: the raw path has exactly as many.
		head, _, _ := strings.Cut(raw, "?")
		if strings.Count(head, "/") != strings.Count(path, "/") {
			t.Fatalf("Path(%q) = %q has another number of slashes", raw, path)
		}
		// Decoding a second time changes nothing.
		if strings.Contains(path, "%") {
			for i := range len(path) {
				if _, ok := unhex(path, i); ok {
					t.Fatalf("Path(%q) = %q decodes once more", raw, path)
				}
			}
		}
	})
}

// An encoded slash passes where a glob spells it, and nowhere else. The same without the spelling is in
// TestRequest's table: refused.
func TestSpelledSlashes(t *testing.T) {
	t.Parallel()
	p := compile(t, Spec{Allow: []Rule{{Host: "npm.vendor.test", Ports: []uint16{80}, Protocol: HTTP,
		Paths: []string{"/@one%2Fname", "/@all%2F*", "/@some%2F*/-/*", "/plain/*", "/x*y%2Fz*w"}}}})
	for _, c := range []struct {
		path string
		want reason.Code
	}{
		{"/@one%2fname", reason.OK}, {"/@one%2Fname?write=true", reason.OK}, {"/%40one%2fname", reason.OK},
		{"/@all%2fname", reason.OK}, {"/@all%2Fname/-/name-1.tgz", reason.OK}, {"/@some%2fname/-/name-1.tgz", reason.OK},
		{"/xayabcy%2fzqw", reason.OK}, {"/plain/a/b", reason.OK},
		{"/@one/name", reason.PathDenied}, {"/@all/name", reason.PathDenied}, // another path
		{"/@one%2fother", reason.AmbiguousHTTP}, {"/@one%2fname/x", reason.AmbiguousHTTP},
		{"/@one%2fname%2fx", reason.AmbiguousHTTP}, {"/@all%2fname%2fx", reason.AmbiguousHTTP}, // no star stands for one
		{"/plain%2fa", reason.AmbiguousHTTP}, {"/plain/a%2fb", reason.AmbiguousHTTP}, {"/@some%2fa%2fb/-/c", reason.AmbiguousHTTP},
		{"/@all%2f..%2f..%2fadmin", reason.AmbiguousHTTP}, {"/@all%2f../admin", reason.AmbiguousHTTP}, {"/@all%2f..", reason.AmbiguousHTTP},
		{"/@all%2f%2e%2e", reason.AmbiguousHTTP}, {"/@all%2f.", reason.AmbiguousHTTP}, {"/@all%2f..;x", reason.AmbiguousHTTP},
		{"/..%2f@all%2fname", reason.AmbiguousHTTP}, {"/@all%2f/admin", reason.AmbiguousHTTP}, {"/@all/%2fname", reason.AmbiguousHTTP},
		{"/@all%2f%2fadmin", reason.AmbiguousHTTP}, {"/@all%252fname", reason.AmbiguousHTTP}, {"/@all%25%32fname", reason.AmbiguousHTTP},
		{"/@all%5cname", reason.AmbiguousHTTP}, {"/@all%00name", reason.AmbiguousHTTP}, {"/@all\x00name", reason.AmbiguousHTTP},
		{"/@all%c0%afname", reason.AmbiguousHTTP},
	} {
		check(t, c.path, p.Request("npm.vendor.test", 80, "GET", c.path), c.want)
	}
	for glob, ok := range map[string]bool{
		"/a%2Fb": true, "/a%2F*": true, "/a%2fb": false, "/a%252Fb": false, "/a%2F..": false, "/a%2F/b": false,
		"/a/%2Fb": false, "/a%2F%2Fb": false, "/%2F": false, "/a%20b": false, "/a\x00b": false, "/a%": false,
	} {
		if err := CheckPathGlob(glob); (err == nil) != ok {
			t.Errorf("CheckPathGlob(%q): %v", glob, err)
		}
	}
	for _, c := range []struct {
		wide, narrow string
		want         bool
	}{
		{"/a/*", "/a/b%2Fc", false}, {"/a/*", "/a/b%2F*", false}, {"/a%2F*", "/a%2Fb", true}, {"/a%2F*", "/a%2Fb/*", true}, {"/a%2F*", "/a%2Fb%2F*", false},
	} {
		if got := globCovers(c.wide, c.narrow); got != c.want {
			t.Errorf("globCovers(%q, %q) = %v", c.wide, c.narrow, got)
		}
	}
}

// FuzzGlob: whatever a glob lets through, a server that takes encoded slashes for slashes reads something that the
// glob with plain slashes says, without dot segments and empty ones; one that does not sees as many as the glob has.
func FuzzGlob(f *testing.F) {
	for _, s := range [][2]string{
		{"/@a%2F*", "/@a%2fb"}, {"/@a%2F*", "/@a%2f..%2fb"}, {"/@a%2Fb*", "/@a%2Fb/../c"}, {"/*", "/a%2fb"}, {"/a*%2F*c", "/ab%2F/c"}, {"/v1/*", "/v1/a;b%2f..;c"},
	} {
		f.Add(s[0], s[1])
	}
	f.Fuzz(func(t *testing.T, glob, raw string) {
		path, err := canonical(raw)
		if err != nil || CheckPathGlob(glob) != nil || !matchGlob(glob, path) {
			return
		}
		head, _, _ := strings.Cut(raw, "?")
		if n := strings.Count(strings.ToUpper(head), "%2F"); n != strings.Count(glob, "%2F") {
			t.Fatalf("%q lets %q through: %d encoded slashes", glob, raw, n)
		}
		decoded := strings.ReplaceAll(path, slashMark, "/")
		if !matchGlob(strings.ReplaceAll(glob, "%2F", "/"), decoded) {
			t.Fatalf("%q lets %q through, which a server may read as %q", glob, raw, decoded)
		}
		for segment := range strings.SplitSeq(strings.TrimSuffix(decoded[1:], "/"), "/") {
			if segment == "." || segment == ".." || segment == "" && decoded != "/" {
				t.Fatalf("%q lets %q through, which has the segment %q", glob, raw, segment)
			}
		}
	})
}

func upstreamRule(addresses ...string) *Rule {
	r := &Rule{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: TLS}
	for _, a := range addresses {
		r.Addresses = append(r.Addresses, netip.MustParsePrefix(a))
	}
	return r
}

// everything is a rule that no compiler lets through: Upstream must not depend on the card check.
var everything = []string{"0.0.0.0/0", "::/0"}

// TestUpstream is E09 (invariant 2).
func TestUpstream(t *testing.T) {
	t.Parallel()
	p := compile(t, vendor())
	for _, c := range []struct {
		addr           string
		plain, granted reason.Code
	}{
		{"203.0.113.7", reason.OK, reason.OK}, // TEST-NET-3: where practice internets live
		{"93.184.216.34", reason.OK, reason.OK},
		{"::ffff:93.184.216.34", reason.OK, reason.OK},
		{"2606:2800:220:1::1", reason.OK, reason.OK},
		{"64:ff9b::5db8:d822", reason.OK, reason.OK},
		{"2002:5db8:d822::1", reason.OK, reason.OK},
		{"127.0.0.1", reason.PrivateAnswer, reason.OK},
		{"127.1.2.3", reason.PrivateAnswer, reason.OK},
		{"10.0.0.5", reason.PrivateAnswer, reason.OK},
		{"172.16.0.1", reason.PrivateAnswer, reason.OK},
		{"172.31.255.255", reason.PrivateAnswer, reason.OK},
		{"192.168.1.1", reason.PrivateAnswer, reason.OK},
		{"100.64.0.1", reason.PrivateAnswer, reason.OK},
		{"::1", reason.PrivateAnswer, reason.OK},
		{"fd12:3456::1", reason.PrivateAnswer, reason.OK},
		{"::ffff:192.168.1.1", reason.PrivateAnswer, reason.OK},
		{"169.254.169.254", reason.PrivateAnswer, reason.PrivateAnswer},
		{"::ffff:169.254.169.254", reason.PrivateAnswer, reason.PrivateAnswer},
		{"169.254.170.2", reason.PrivateAnswer, reason.PrivateAnswer},
		{"169.254.1.1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"100.100.100.200", reason.PrivateAnswer, reason.PrivateAnswer},
		{"192.0.0.192", reason.PrivateAnswer, reason.PrivateAnswer},
		{"168.63.129.16", reason.PrivateAnswer, reason.PrivateAnswer},
		{"fd00:ec2::254", reason.PrivateAnswer, reason.PrivateAnswer},
		{"fd20:ce::254", reason.PrivateAnswer, reason.PrivateAnswer},
		{"fe80::1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"fe80::1%eth0", reason.PrivateAnswer, reason.PrivateAnswer},
		{"fd12:3456::1%eth0", reason.PrivateAnswer, reason.PrivateAnswer},
		{"64:ff9b::a9fe:a9fe", reason.PrivateAnswer, reason.PrivateAnswer},
		{"64:ff9b::7f00:1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"64:ff9b:1::a00:5", reason.PrivateAnswer, reason.PrivateAnswer},
		{"2002:a9fe:a9fe::1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"2002:a00:5::1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"2001:0:5db8:d822:0:0:f5ff:fffa", reason.PrivateAnswer, reason.PrivateAnswer}, // Teredo, client 10.0.0.5
		{"2001:470:1::5efe:a00:5", reason.PrivateAnswer, reason.PrivateAnswer},         // ISATAP
		{"::10.0.0.5", reason.PrivateAnswer, reason.PrivateAnswer},
		{"::93.184.216.34", reason.PrivateAnswer, reason.PrivateAnswer},
		{"0.0.0.0", reason.PrivateAnswer, reason.PrivateAnswer},
		{"0.1.2.3", reason.PrivateAnswer, reason.PrivateAnswer},
		{"::", reason.PrivateAnswer, reason.PrivateAnswer},
		{"224.0.0.1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"ff02::1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"255.255.255.255", reason.PrivateAnswer, reason.PrivateAnswer},
		{"240.0.0.1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"198.18.0.16", reason.PrivateAnswer, reason.PrivateAnswer}, // virtual addresses
		{"198.19.0.1", reason.PrivateAnswer, reason.PrivateAnswer},  // gateways and kids
		{"192.0.2.1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"198.51.100.1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"2001:db8::1", reason.PrivateAnswer, reason.PrivateAnswer},
		{"fec0::1", reason.PrivateAnswer, reason.PrivateAnswer},
	} {
		addr := netip.MustParseAddr(c.addr)
		check(t, c.addr, p.Upstream(upstreamRule(), addr, 443), c.plain)
		check(t, c.addr+" granted", p.Upstream(upstreamRule(everything...), addr, 443), c.granted)
	}
	check(t, "no address", p.Upstream(upstreamRule(everything...), netip.Addr{}, 443), reason.PrivateAnswer)
	check(t, "other port", p.Upstream(upstreamRule(), netip.MustParseAddr("203.0.113.7"), 22), reason.PortNotAllowed)
	check(t, "granted neighbour", p.Upstream(upstreamRule("10.0.0.4/32"), netip.MustParseAddr("10.0.0.5"), 443), reason.PrivateAnswer)
}

// TestUpstreamDisguise: whatever IPv4 address is refused plainly is refused in every disguise.
func TestUpstreamDisguise(t *testing.T) {
	t.Parallel()
	p := compile(t, vendor())
	rng := rand.New(rand.NewPCG(9, 10)) // a test wants the same numbers each time
	refused := 0
	for range 20_000 {
		n := rng.Uint32()
		if rng.IntN(2) == 0 { // half of them out of special blocks
			b := blocks[rng.IntN(14)].prefix
			n = toUint(b.Addr()) | n>>b.Bits()
		}
		b := [4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}
		plain := p.Upstream(upstreamRule(), netip.AddrFrom4(b), 443)
		if plain.Verdict == Allow {
			continue
		}
		refused++
		for what, a := range map[string][16]byte{
			"mapped": {10: 0xff, 11: 0xff, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"NAT64":  {0, 0x64, 0xff, 0x9b, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"6to4":   {0x20, 0x02, b[0], b[1], b[2], b[3], 15: 1},
			"Teredo": {0x20, 0x01, 4: 9, 9, 9, 9, 12: ^b[0], 13: ^b[1], 14: ^b[2], 15: ^b[3]},
			"compat": {12: b[0], 13: b[1], 14: b[2], 15: b[3]},
			"ISATAP": {0x26, 0x06, 8: 2, 10: 0x5e, 11: 0xfe, 12: b[0], 13: b[1], 14: b[2], 15: b[3]},
		} {
			if d := p.Upstream(upstreamRule(), netip.AddrFrom16(a), 443); d.Verdict == Allow {
				t.Fatalf("%s is refused, but not %s (%s)", netip.AddrFrom4(b), netip.AddrFrom16(a), what)
			}
		}
	}
	if refused < 5000 {
		t.Fatalf("only %d addresses were refused: the test shows little", refused)
	}
}

func toUint(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func TestCheckGrant(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"10.0.0.5/32", "10.0.0.0/8", "192.168.0.0/24", "127.0.0.1/32", "100.64.0.0/16", "::1/128", "fd12:3456::/64"} {
		if err := CheckGrant(netip.MustParsePrefix(s)); err != nil {
			t.Errorf("CheckGrant(%s): %v", s, err)
		}
	}
	for _, s := range []string{
		"169.254.0.0/16", "169.254.169.254/32", "100.100.100.200/32", "100.64.0.0/10", "fd00:ec2::254/128", "fd00::/8",
		"fe80::/10", "fe80::1/128", "0.0.0.0/0", "::/0", "198.18.0.0/15", "198.19.0.1/32", "0.0.0.0/32", "224.0.0.1/32",
		"203.0.113.7/32", "8.8.8.8/32", "10.0.0.0/7", "10.0.0.5/8", "::ffff:10.0.0.0/104", "64:ff9b::a00:5/128", "2002:a00:5::/48",
		"168.63.129.16/32", "::/128",
	} {
		if err := CheckGrant(netip.MustParsePrefix(s)); err == nil {
			t.Errorf("CheckGrant(%s) allows it", s)
		}
	}
	if err := CheckGrant(netip.Prefix{}); err == nil {
		t.Error("the zero prefix can be granted")
	}
}
