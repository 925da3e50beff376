package e2e

import (
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// answered asks the practice resolver itself, over UDP and TCP, as a client may that nobody stands in front of, and
// returns how many answers each query brought.
func (c *cases) answered(queries ...[]byte) []int {
	c.t.Helper()
	at := c.box.Net.DNSAddr().String()
	var steps []step
	for _, q := range queries {
		steps = append(steps, step{Kind: "udp", Host: at, Port: 53, Send: [][]byte{q}, Any: true},
			step{Kind: "tcp", Host: at, Port: 53, Send: [][]byte{overTCP(q)}, Any: true})
	}
	out := c.outside(steps...)
	var n []int
	for i, q := range queries {
		udp, _ := readReply(q, out[2*i].Data)
		tcp, _ := readReply(q, out[2*i+1].Data[min(2, len(out[2*i+1].Data)):])
		if udp.answers != tcp.answers {
			c.t.Errorf("query %d: %d answers over UDP, %d over TCP", i, udp.answers, tcp.answers)
		}
		n = append(n, udp.answers)
	}
	return n
}

// refusedInside checks that the kid's own resolver refuses every query.
func (c *cases) refusedInside(queries ...[]byte) {
	c.t.Helper()
	for i, r := range c.resolve(c.kid.Name, queries...) {
		if r.rcode != rcodeRefused || r.answers != 0 {
			c.t.Errorf("the kid's query %d: %+v", i, r)
		}
	}
}

// leaves checks that a kid gets nothing for names that whoever asks the resolver itself gets addresses for: what the
// names carry is at the resolver then.
func (c *cases) leaves(names ...string) {
	c.t.Helper()
	var queries [][]byte
	count := func() (n int) {
		for _, name := range names {
			n += c.box.Net.DNS.Count(strings.ToLower(strings.TrimSuffix(name, ".")))
		}
		return n
	}
	for _, name := range names {
		queries = append(queries, query(name, typeA, classIN))
	}
	before := count()
	c.refusedInside(queries...)
	if n := count() - before; n != 0 {
		c.t.Errorf("%d of the kid's queries left the box", n)
	}
	if got := c.answered(queries...); slices.Contains(got, 0) {
		c.t.Errorf("straight, the answers are %d for %q", got, names)
	}
	if n := count() - before; n < 2*len(names) {
		c.t.Errorf("%d queries reached the resolver, want %d", n, 2*len(names))
	}
}

// dataLeaves: E01. Nobody between: the data is at the attacker's resolver with the first query.
func (c *cases) dataLeaves() { c.leaves(strings.Repeat("mfrggzdfmz", 5) + ".evil.test") }

// anyNameAnswered: E02. What the kid without an allowlist asks for has an answer, over UDP and TCP, where nobody
// filters it.
func (c *cases) anyNameAnswered() {
	kid := c.box.Spawn(bareCard, nil)
	defer c.box.Destroy(kid.Name)
	q := query(practice.NameAPI, typeA, classIN)
	for _, r := range c.resolve(kid.Name, q) {
		if r.rcode != rcodeRefused {
			c.t.Errorf("in the kid: %+v", r)
		}
	}
	if got := c.answered(q); got[0] == 0 {
		c.t.Error("straight: no answer")
	}
}

// otherTypesAnswered: E06. The resolver gives an IPv6 address to whoever asks it; the kid gets none of an allowed
// name that has one.
func (c *cases) otherTypesAnswered() {
	name := "six.turn.test"
	c.box.Net.DNS.SetHost(name, c.box.Net.FilesAddr(), c.box.Net.EvilAddr6())
	q := query(name, typeAAAA, classIN)
	if r := c.resolve(c.kid.Name, q)[0]; r.rcode != rcodeOK || r.answers != 0 {
		c.t.Errorf("in the kid: %+v", r)
	}
	if got := c.answered(q); got[0] != 1 {
		c.t.Errorf("straight: %d answers", got[0])
	}
}

// anySpellingAnswered: E07. To a resolver a name is the same in every spelling: a filter that compares spellings would
// let one of them by.
func (c *cases) anySpellingAnswered() { c.leaves("EVIL.test", "eViL.TeSt.", "XN--BCHER-KVA.evil.test") }

// singleLabelsAnswered: E08. A resolver that knows such names gives them to whoever asks.
func (c *cases) singleLabelsAnswered() {
	names := []string{"metadata", "localhost", "kubernetes"}
	for _, name := range names {
		c.box.Net.DNS.SetHost(name, c.box.Net.FilesAddr())
		defer c.box.Net.DNS.SetHost(name)
	}
	c.leaves(names...)
}

// almostTheNameAnswered: E16. Each of the names that only look like an allowed one is somebody's.
func (c *cases) almostTheNameAnswered() {
	for _, name := range []string{"xapi.vendor.test", "xturn.test", "a.b.turn.test"} {
		c.box.Net.DNS.SetHost(name, c.box.Net.EvilAddr())
		defer c.box.Net.DNS.SetHost(name)
	}
	c.leaves("xapi.vendor.test", "xturn.test", "a.b.turn.test", "api.vendor.test.evil.test")
}

// otherResolversHeard: E03. Where nobody stands between, the ports of encrypted DNS are open at the other resolver.
func (c *cases) otherResolversHeard() {
	evil := c.box.Net.EvilAddr().String()
	for i, o := range c.outside(step{Kind: "tcp", Host: evil, Port: 853, Send: [][]byte{[]byte("x")}, Shut: true},
		step{Kind: "tcp", Host: evil, Port: 443, Send: [][]byte{[]byte("x")}, Shut: true}) {
		if o.Error != "" {
			c.t.Errorf("way %d, straight: %+v", i, o)
		}
	}
	// By name too: the other kid's card allows the port that this kid's does not.
	connect := "CONNECT " + practice.NameAPI + ":22 HTTP/1.1\r\nHost: x\r\n\r\n"
	c.wantProblem("a port that is on no rule", c.attack(c.kid.Name, c.proxied(connect))[0], reason.PortNotAllowed)
	s := step{Kind: "tcp", Host: c.gateway(), Port: instance.PortExplicit, Send: [][]byte{[]byte(connect)}, Until: []byte("\r\n\r\n")}
	if o := c.attack(c.unchecked.Name, s)[0]; !strings.HasPrefix(string(o.Data), "HTTP/1.1 200 ") {
		c.t.Errorf("where a rule has the port: %+v", o)
	}
}

// socketsOpen: E22. Outside a kid the machine gives root every kind of socket that the case asks for, but for those
// that its kernel was built without.
func (c *cases) socketsOpen() {
	steps := []step{
		{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Proto: unix.IPPROTO_ICMP},
		{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Proto: unix.IPPROTO_RAW},
		{Kind: "socket", Family: unix.AF_INET6, Type: unix.SOCK_RAW, Proto: unix.IPPROTO_ICMPV6},
		{Kind: "socket", Family: unix.AF_PACKET, Type: unix.SOCK_RAW, Proto: 0x0300},
		{Kind: "socket", Family: unix.AF_VSOCK, Type: unix.SOCK_STREAM},
		{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Proto: unix.IPPROTO_SCTP},
		{Kind: "socket", Family: unix.AF_ALG, Type: unix.SOCK_SEQPACKET},
	}
	for i, o := range c.walk(func(start func() error) error { return start() }, steps...) {
		missing := o.Error == "EPROTONOSUPPORT" || o.Error == "EAFNOSUPPORT" || o.Error == "ESOCKTNOSUPPORT"
		if o.Error != "" && (i < 4 || !missing) {
			c.t.Errorf("%+v outside: %+v", steps[i], o)
		}
	}
}
