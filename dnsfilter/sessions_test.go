package dnsfilter

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

func (b *bed) name(mark uint32, addr netip.Addr) (string, error) {
	var out wire.Name
	err := b.call("POST", "/v1/names", wire.NameQuery{Mark: mark, Addr: addr}, &out)
	return out.Name, err
}

func TestWildcardAddressesSurviveARestart(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	mark := testSession(1, policy.Spec{}).Mark
	before := map[string]netip.Addr{}
	for i := range 20 {
		name := fmt.Sprintf("n%d.cdn.test", 19-i)
		before[name] = addrOf(t, b.ask(name+".", dns.TypeA))
	}
	if got, err := b.name(mark, before["n3.cdn.test"]); err != nil || got != "n3.cdn.test" {
		t.Fatalf("name of %s: %q, %v", before["n3.cdn.test"], got, err)
	}
	b.stop()
	path := b.filter.namesPath("01TESTSESSION1")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err == nil {
		_, err = f.WriteString("198.18.0.200 torn.cdn.te") // what a kill in the middle of a write leaves
	}
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	b.start(one(vendorRules()))
	for name, addr := range before {
		if got, err := b.name(mark, addr); err != nil || got != name {
			t.Errorf("name of %s after a restart: %q, %v; want %s", addr, got, err, name)
		}
	}
	taken := addrOf(t, b.ask("new.cdn.test.", dns.TypeA))
	for name, addr := range before {
		if got := addrOf(t, b.ask(name+".", dns.TypeA)); got != addr || got == taken {
			t.Errorf("%s moved from %s to %s (a new name has %s)", name, addr, got, taken)
		}
	}
}

func TestWildcardAddressIsWrittenBeforeItIsGiven(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	if err := os.RemoveAll(b.dir); err != nil { // no file can be made there any more
		t.Fatal(err)
	}
	r := b.ask("a.cdn.test.", dns.TypeA)
	if _, text := ede(r); r.Rcode != dns.RcodeRefused || !strings.HasPrefix(text, "internal") {
		t.Fatalf("answered without having written: %v", r)
	}
	table := b.filter.sessions.byKid("kid1").names.table
	addr, ok := table.Addr("a.cdn.test")
	if !ok {
		t.Fatal("the table forgot the name")
	}
	if name, err := b.name(testSession(1, policy.Spec{}).Mark, addr); control.Status(err) != 404 {
		t.Errorf("an address that was never given out is %q, %v", name, err)
	}
	if err := os.Mkdir(b.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if got := addrOf(t, b.ask("a.cdn.test.", dns.TypeA)); got != addr {
		t.Errorf("the second lookup got %s, want %s", got, addr)
	}
}

func TestVirtualNetRunsFull(t *testing.T) {
	b := newBed(t).start(one(vendorRules()), func(c *Config) { c.Virtual = netip.MustParsePrefix("198.18.0.0/26") })
	refusals := 0
	for i := range 64 {
		if r := b.ask(fmt.Sprintf("n%d.cdn.test.", i), dns.TypeA); r.Rcode == dns.RcodeRefused {
			refusals++
		}
	}
	if refusals == 0 || refusals == 64 {
		t.Errorf("%d of 64 names refused", refusals)
	}
	addrOf(t, b.ask("api.vendor.test.", dns.TypeA))
	b.stop()
	if _, events := b.rec.lookups(reason.Capacity); events != uint64(refusals) {
		t.Errorf("%d refusals recorded, want %d", events, refusals)
	}
}

func TestSessionsComeAndGo(t *testing.T) {
	b := newBed(t).start(nil)
	ask := func() *dns.Msg { return b.ask("api.vendor.test.", dns.TypeA) }
	if r := ask(); r.Rcode != dns.RcodeRefused {
		t.Fatal("answered before a session was loaded")
	}
	doc := testSession(1, vendorRules())
	var ack wire.Ack
	if err := b.call("PUT", "/v1/sessions/kid1", doc, &ack); err != nil || ack != (wire.Ack{Kid: "kid1", Generation: 1}) {
		t.Fatalf("loading: %+v, %v", ack, err)
	}
	addr := addrOf(t, ask())
	if name, err := b.name(doc.Mark, addr); err != nil || name != "api.vendor.test" {
		t.Errorf("name of %s: %q, %v", addr, name, err)
	}
	for what, q := range map[string]wire.NameQuery{
		"another session's mark": {Mark: doc.Mark + 1, Addr: addr}, "an address that was not given out": {Mark: doc.Mark, Addr: netip.MustParseAddr("198.18.1.1")},
		"a real address": {Mark: doc.Mark, Addr: netip.MustParseAddr("203.0.113.7")}, "nothing": {},
	} {
		if err := b.call("POST", "/v1/names", q, nil); control.Status(err) != 404 {
			t.Errorf("%s: %v, want 404", what, err)
		}
	}
	wild := addrOf(t, b.ask("a.cdn.test.", dns.TypeA))
	tightened := testSession(1, policy.Spec{})
	tightened.Generation = 2
	if err := b.call("PUT", "/v1/sessions/kid1", tightened, &ack); err != nil || ack.Generation != 2 {
		t.Fatalf("tightening: %+v, %v", ack, err)
	}
	if r := ask(); r.Rcode != dns.RcodeRefused {
		t.Error("answered after the policy was tightened")
	}
	for _, a := range []netip.Addr{addr, wild} {
		if name, err := b.name(doc.Mark, a); control.Status(err) != 404 {
			t.Errorf("%s still stands for %q, %v", a, name, err)
		}
	}
	if err := b.call("PUT", "/v1/sessions/kid1", doc, nil); control.Status(err) != 409 {
		t.Errorf("going back a generation: %v, want 409", err)
	}
	for range 2 {
		if err := b.call("DELETE", "/v1/sessions/kid1", nil, nil); err != nil {
			t.Fatal(err)
		}
	}
	if files, err := os.ReadDir(b.dir); err != nil || len(files) != 0 {
		t.Errorf("left behind: %v, %v", files, err)
	}
	if r := ask(); r.Rcode != dns.RcodeRefused {
		t.Error("answered after the session was removed")
	}
}

func TestSessionsThatAreRefused(t *testing.T) {
	b := newBed(t).start(one(vendorRules()), func(c *Config) {
		c.Check = func(s *session.Session) error {
			if s.Mark>>20 != 0x543 {
				return errors.New("another instance's mark")
			}
			return nil
		}
	})
	for name, c := range map[string]struct {
		change func(s *session.Session)
		status int
	}{
		"another kid's address":    {func(s *session.Session) { s.Addr = netip.MustParseAddr(kidAddr) }, 409},
		"another kid's mark":       {func(s *session.Session) { s.Mark = testSession(1, policy.Spec{}).Mark }, 409},
		"another session's kid":    {func(s *session.Session) { s.Kid = "kid1" }, 409},
		"another instance's mark":  {func(s *session.Session) { s.Mark = 0x54400001 }, 422},
		"no mark":                  {func(s *session.Session) { s.Mark = 0 }, 422},
		"an id that is a path":     {func(s *session.Session) { s.ID = "../../x" }, 422},
		"a rule that is no host":   {func(s *session.Session) { s.Egress.Allow[0].Host = "*" }, 422},
		"another version":          {func(s *session.Session) { s.Version = 9 }, 422},
		"another kid than the URL": {func(s *session.Session) { s.Kid = "kidx" }, 400},
	} {
		doc := testSession(2, vendorRules())
		c.change(doc)
		route := "/v1/sessions/" + doc.Kid
		if c.status == 400 {
			route = "/v1/sessions/kid2"
		}
		if err := b.call("PUT", route, doc, nil); control.Status(err) != c.status {
			t.Errorf("%s: %v, want status %d", name, err, c.status)
		}
	}
	addrOf(t, b.ask("api.vendor.test.", dns.TypeA)) // the first session is unharmed
}

func TestStartWithBrokenDocuments(t *testing.T) {
	b := newBed(t)
	bad, worse := testSession(2, vendorRules()), testSession(3, vendorRules())
	bad.Egress.Allow[0].Host = "*"
	for name, text := range map[string]string{worse.ID: "198.18.0.99\n", "01GONE": "198.18.0.99 a.cdn.test\n"} {
		if err := os.WriteFile(filepath.Join(b.dir, name+namesSuffix), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b.start(append(one(vendorRules()), bad, worse))
	addrOf(t, b.ask("api.vendor.test.", dns.TypeA))
	for _, addr := range []string{"127.0.5.12", "127.0.5.13"} {
		if r := b.exchange(question("api.vendor.test.", dns.TypeA), addr, "udp"); r.Rcode != dns.RcodeRefused {
			t.Errorf("%s was answered without a whole session", addr)
		}
	}
	if _, err := os.Stat(b.filter.namesPath("01GONE")); err == nil {
		t.Error("the file of a session that has ended is still there")
	}
	failed := 0
	for _, rec := range b.rec.all() {
		if rec.Event == audit.EventPolicyLoaded && rec.Outcome == audit.OutcomeFail {
			failed++
		}
	}
	if failed != 2 {
		t.Errorf("%d failures recorded, want 2", failed)
	}
}

func TestFloodIsLimitedAndCountedExactly(t *testing.T) {
	const sent = 3000
	b := newBed(t).start(append(one(vendorRules()), testSession(2, vendorRules())), func(c *Config) { c.Rate, c.Burst = 1, 100 })
	conn, err := from(kidAddr, "tcp").Dial(b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() // read to the end
	refusals := 0
	for i := range sent {
		name := "api.vendor.test."
		if i%2 == 1 {
			name = fmt.Sprintf("x%d.evil.test.", i)
		}
		if err := conn.WriteMsg(question(name, dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		r, err := conn.ReadMsg()
		if err != nil {
			t.Fatal(err)
		}
		if _, text := ede(r); strings.HasPrefix(text, "rate-limit") && r.Rcode == dns.RcodeRefused {
			refusals++
		}
	}
	if refusals < sent-200 || refusals > sent-100 {
		t.Errorf("%d of %d queries were refused for their rate, want all but 100 and some", refusals, sent)
	}
	if r := b.exchange(question("api.vendor.test.", dns.TypeA), "127.0.5.12", "udp"); r.Rcode != dns.RcodeSuccess {
		t.Error("another kid is limited too")
	}
	b.stop()
	limited, events := b.rec.lookups(reason.RateLimit)
	_, allowed := b.rec.lookups(reason.OK)
	_, denied := b.rec.lookups(reason.NameNotAllowed)
	if events != uint64(refusals) || events+allowed+denied != sent+1 {
		t.Errorf("records stand for %d + %d + %d lookups, sent were %d", events, allowed, denied, sent+1)
	}
	if len(limited) > sent/10 {
		t.Errorf("%d records for %d refusals", len(limited), refusals)
	}
}

func TestTCPConnectionsAreBoundedAndCut(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	var conns []*dns.Conn
	for range tcpPerKid {
		c, err := from(kidAddr, "tcp").Dial(b.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close() // cut by the filter
		if err := c.WriteMsg(question("api.vendor.test.", dns.TypeA)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.ReadMsg(); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	if _, _, err := from(kidAddr, "tcp").Exchange(question("api.vendor.test.", dns.TypeA), b.addr); err == nil {
		t.Error("one connection more than allowed was served")
	}
	if err := b.call("DELETE", "/v1/sessions/kid1", nil, nil); err != nil {
		t.Fatal(err)
	}
	for _, c := range conns {
		c.SetReadDeadline(time.Now().Add(5 * time.Second)) // the read fails then
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("a connection of the removed session lives on: %v", err)
		}
	}
	b.stop()
	if _, events := b.rec.lookups(reason.Capacity); events != 1 {
		t.Errorf("%d refused connections recorded, want 1", events)
	}
}

func TestStrangersOnTheControlSocket(t *testing.T) {
	b := newBed(t).start(one(vendorRules()), func(c *Config) { c.Sandboxd, c.Proxy = 1<<20, 1<<20 })
	for route, in := range map[string]any{"PUT /v1/sessions/kid1": testSession(1, vendorRules()), "DELETE /v1/sessions/kid1": nil, "POST /v1/names": wire.NameQuery{}} {
		method, path, _ := strings.Cut(route, " ")
		if err := b.call(method, path, in, nil); control.Status(err) != 403 {
			t.Errorf("%s: %v, want 403", route, err)
		}
	}
}

func TestPortInUse(t *testing.T) {
	b := newBed(t).start(nil)
	cfg := b.filter.cfg
	cfg.Listen = b.filter.Addr()
	if _, err := New(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "another resolver") {
		t.Errorf("a second filter on %s: %v", cfg.Listen, err)
	}
}

// TestAddressThatIsNotThereYet: the gateway's interface may come after the filter.
func TestAddressThatIsNotThereYet(t *testing.T) {
	b := newBed(t).start(nil, func(c *Config) { c.Listen = netip.MustParseAddrPort("203.0.113.250:0") })
	if _, ok := net.ResolveUDPAddr("udp", b.addr); ok != nil || !strings.HasPrefix(b.addr, "203.0.113.250:") {
		t.Errorf("bound to %s", b.addr)
	}
}

// TestOneNameDoesNotHideAnother: a name that a kid asks for in a loop leaves room for the records of others, of which
// alerts come.
func TestOneNameDoesNotHideAnother(t *testing.T) {
	b := newBed(t).start(one(vendorRules()))
	for range 10 * auditLines {
		b.ask("loop.test.", dns.TypeA)
	}
	b.ask("other.test.", dns.TypeA)
	b.stop()
	recs, events := b.rec.lookups(reason.NameNotAllowed)
	single, other := 0, false
	for _, r := range recs {
		other = other || r.Dst.Name == "other.test"
		if r.Count == 0 && r.Dst.Name == "loop.test" {
			single++
		}
	}
	if !other || single < auditLines/2 || events != 10*auditLines+1 {
		t.Errorf("%d of the loop's lookups are shown one by one, the other name is: %v; %d events", single, other, events)
	}
}
