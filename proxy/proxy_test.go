package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// echo sends back what it reads and closes when its client does.
func echo(c net.Conn) { io.Copy(c, c) }

// tlsServer starts a TLS server for the names that answers every connection with serve.
func (w *world) tlsServer(serve func(net.Conn), names ...string) netip.AddrPort {
	cert := w.vendor.issue(w.t, names...)
	return listen(w.t, serverAddr, 0, func(c net.Conn) {
		tc := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})
		if tc.Handshake() == nil {
			serve(tc)
		}
		tc.Close()
	})
}

// web starts an HTTP server, over TLS where names are given.
func (w *world) web(h http.Handler, names ...string) netip.AddrPort {
	w.t.Helper()
	l, err := net.Listen("tcp4", netip.AddrPortFrom(serverAddr, 0).String())
	must(w.t, err)
	at := l.Addr().(*net.TCPAddr).AddrPort()
	if len(names) > 0 {
		l = tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{w.vendor.issue(w.t, names...)}})
	}
	srv := &http.Server{Handler: h}
	go srv.Serve(l)
	w.t.Cleanup(func() { srv.Close() })
	return at
}

func wantReset(t testing.TB, c net.Conn) {
	t.Helper()
	n, err := c.Read(make([]byte, 1))
	if n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("want a reset, got %d bytes and %v", n, err)
	}
}

func wantAlert(t testing.TB, c net.Conn, desc byte) {
	t.Helper()
	got, err := io.ReadAll(c)
	if err != nil || len(got) != 7 || got[0] != 21 || got[6] != desc {
		t.Errorf("want TLS alert %d, got %x, %v", desc, got, err)
	}
}

func (w *world) wantRefused(code reason.Code) audit.Record {
	w.t.Helper()
	r := w.records.wait(w.t, "refusal "+code.String(), func(r audit.Record) bool {
		return r.Event == audit.EventConnOpened && r.Outcome != audit.OutcomeAllow && r.Reason == code
	})
	if r.Process == nil || r.Process.Comm != "curl" {
		w.t.Errorf("the record names no process: %+v", r.Process)
	}
	return r
}

func TestTCPIsRelayedWithExactCountsAndHalfClose(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, func(c net.Conn) {
		got, _ := io.ReadAll(c) // only a half-close ends this
		fmt.Fprintf(c, "got %d", len(got))
	})
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	c := w.dialName(apiHost, at.Port())
	sent := make([]byte, 3<<20+17)
	_, err := c.Write(sent)
	must(t, err)
	must(t, c.CloseWrite())
	answer, err := io.ReadAll(c)
	must(t, err)
	want := fmt.Sprintf("got %d", len(sent))
	if string(answer) != want {
		t.Fatalf("answer %q, want %q", answer, want)
	}
	opened := w.records.wait(t, "opening", event(audit.EventConnOpened, audit.OutcomeAllow))
	closed := w.records.wait(t, "closing", event(audit.EventConnClosed, audit.OutcomeOK))
	if *closed.Bytes != (audit.Bytes{Up: int64(len(sent)), Down: int64(len(want))}) {
		t.Errorf("counted %+v", closed.Bytes)
	}
	if opened.Conn == "" || opened.Conn != closed.Conn || opened.Kid != "kid1" || opened.Mark != kidMark || opened.Rule != 12 ||
		opened.Dst.Name != apiHost || opened.Dst.Real != serverAddr || opened.Dst.Addr != w.virtual(apiHost) || opened.Process.Comm != "curl" {
		t.Errorf("opened: %+v %+v %+v", opened, opened.Dst, opened.Process)
	}
	if w.marked.Load() != 2 {
		t.Errorf("%d sockets were marked, want the query's and the connection's", w.marked.Load())
	}
}

func TestUninspectedTLSIsNotDecrypted(t *testing.T) {
	w := newWorld(t)
	at := w.tlsServer(echo, apiHost)
	w.allow(rule(apiHost, at.Port(), policy.TLS))
	tc := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: w.vendor.pool()})
	must(t, tc.Handshake()) // against the vendor's CA: nobody is in between
	_, err := tc.Write([]byte("hello"))
	must(t, err)
	buf := make([]byte, 5)
	_, err = io.ReadFull(tc, buf)
	must(t, err)
}

// E11 over real sockets: a hello in 3 records and 20 segments, the name behind 1,800 bytes of key share.
func TestSplitHelloPasses(t *testing.T) {
	w := newWorld(t)
	raw := inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x5a5a, 0x0304}, grease: true, keyShare: 1800, extensions: true}.message(), 3)
	got := make(chan []byte, 1)
	at := listen(t, serverAddr, 0, func(c net.Conn) {
		buf := make([]byte, len(raw))
		io.ReadFull(c, buf)
		got <- buf
	})
	w.allow(rule(apiHost, at.Port(), policy.TLS))
	c := w.dialName(apiHost, at.Port())
	must(t, c.SetNoDelay(true))
	for i := range 20 {
		_, err := c.Write(raw[i*len(raw)/20 : (i+1)*len(raw)/20])
		must(t, err)
	}
	select {
	case b := <-got:
		if string(b) != string(raw) {
			t.Error("the hello was changed on its way")
		}
	case <-time.After(patience):
		t.Fatal("the hello does not arrive: " + w.records.dump())
	}
}

// E12, E13: distinct reasons, the right alert, both names in the record, nothing dialled.
func TestBadHellosAreRefused(t *testing.T) {
	for _, inspect := range []bool{false, true} {
		for _, tc := range []struct {
			name  string
			raw   []byte
			code  reason.Code
			alert byte // 0: a reset
		}{
			{"mismatch", inRecords(modernHello("evil.test").message(), 1), reason.SNIMismatch, 112},
			{"no SNI", inRecords(helloSpec{legacy: 0x0303, versions: []uint16{0x0304}, extensions: true}.message(), 1), reason.SNIMissing, 109},
			{"ECH", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x0304}, ech: true, extensions: true}.message(), 1), reason.ECH, 110},
			{"TLS 1.0", inRecords(helloSpec{legacy: 0x0301, names: []string{apiHost}, extensions: true}.message(), 1), reason.TLSVersion, 70},
			{"SSLv2 framing", []byte{0x80, 0x2e, 1, 3, 1, 0, 21, 0, 0, 0, 16}, reason.SSLv2, 70},
			{"SSLv2", []byte{0x80, 0x2e, 1, 0, 2, 0, 21, 0, 0, 0, 16}, reason.SSLv2, 0},
			{"noise", []byte{0x9f, 0x11, 0x22, 0x33, 0x44, 0x55}, reason.NotTLS, 0},
		} {
			t.Run(fmt.Sprintf("%s, inspect %v", tc.name, inspect), func(t *testing.T) {
				w := newWorld(t)
				r := rule(apiHost, 443, policy.TLS)
				r.Inspect = inspect
				w.allow(r)
				c := w.dialName(apiHost, 443)
				_, err := c.Write(tc.raw)
				must(t, err)
				if tc.alert == 0 {
					wantReset(t, c)
				} else {
					wantAlert(t, c, tc.alert)
				}
				rec := w.wantRefused(tc.code)
				if tc.code == reason.SNIMismatch && !(strings.Contains(rec.Detail, "evil.test") && strings.Contains(rec.Detail, apiHost)) {
					t.Errorf("detail %q lacks a name", rec.Detail)
				}
				if w.dns.asked.Load() != 0 {
					t.Error("a refused connection made the proxy ask a resolver")
				}
			})
		}
	}
}

// The check of the name is what refuses: the same hello passes where the rule says tcp.
func TestMismatchPassesWhereNobodyLooks(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	c := w.dialName(apiHost, at.Port())
	raw := inRecords(modernHello("evil.test").message(), 1)
	_, err := c.Write(raw)
	must(t, err)
	_, err = io.ReadFull(c, make([]byte, len(raw)))
	must(t, err)
}

func TestSilentClientIsRefusedInTime(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.Hello = 30 * time.Millisecond })
	w.allow(rule(apiHost, 443, policy.TLS))
	wantReset(t, w.dialName(apiHost, 443))
	w.wantRefused(reason.Idle)
}

func TestUnknownSendersAndAddresses(t *testing.T) {
	w := newWorld(t)
	t.Run("no session", func(t *testing.T) {
		for _, to := range []netip.AddrPort{w.explicit, w.transparent} {
			c, err := w.tryDial(kidAddr, to)
			if errors.Is(err, syscall.ECONNRESET) {
				continue // the reset was faster than connect
			}
			must(t, err)
			wantReset(t, c)
		}
		w.wantRefused(reason.UnknownSession)
	})
	w.allow(rule(apiHost, 443, policy.TCP))
	for _, tc := range []struct {
		dst  string
		code reason.Code
	}{
		{"203.0.113.7:443", reason.RawAddress},
		{"169.254.169.254:80", reason.Metadata},
		{gateway.String() + ":3129", reason.HostAddress},
	} {
		c := w.dialVirtual(netip.MustParseAddrPort(tc.dst))
		c.Write([]byte("\x00\x00"))
		wantReset(t, c)
		if rec := w.wantRefused(tc.code); rec.Dst.Addr.String()+fmt.Sprintf(":%d", rec.Dst.Port) != tc.dst {
			t.Errorf("the record says %+v", rec.Dst)
		}
	}
	c := w.dialName(apiHost, 22)
	c.Write([]byte("SSH-2.0-x\r\n"))
	wantReset(t, c)
	w.wantRefused(reason.PortNotAllowed)
}

func TestVirtualAddressesOfWildcards(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.Names = 50 * time.Millisecond })
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule("*.vendor.test", at.Port(), policy.TCP))
	addr := netip.MustParseAddr("198.18.240.77")
	asked := 0
	w.names.name = func(_ context.Context, mark uint32, a netip.Addr) (string, error) {
		if asked++; mark != kidMark || a != addr {
			t.Errorf("asked about %#x %s", mark, a)
		}
		return fileHost, nil
	}
	for range 3 {
		c := w.dialVirtual(netip.AddrPortFrom(addr, at.Port()))
		_, err := c.Write([]byte("x"))
		must(t, err)
		_, err = io.ReadFull(c, make([]byte, 1))
		must(t, err)
		c.Close()
	}
	if asked != 1 {
		t.Errorf("asked %d times", asked)
	}
	refusedFor := func(name string, fn func(context.Context, uint32, netip.Addr) (string, error), code reason.Code) {
		t.Helper()
		w.allow(rule("*.vendor.test", at.Port(), policy.TCP)) // a new policy forgets what was learned
		w.names.name = fn
		c := w.dialVirtual(netip.AddrPortFrom(addr, at.Port()))
		c.Write([]byte{0})
		wantReset(t, c)
		w.wantRefused(code)
		w.records.mu.Lock()
		w.records.records = nil
		w.records.mu.Unlock()
	}
	refusedFor("unknown", func(context.Context, uint32, netip.Addr) (string, error) { return "", errors.New("404") }, reason.VirtualUnknown)
	refusedFor("late", func(ctx context.Context, _ uint32, _ netip.Addr) (string, error) {
		<-ctx.Done()
		return "", ctx.Err()
	}, reason.VirtualUnknown)
	refusedFor("not canonical", func(context.Context, uint32, netip.Addr) (string, error) { return "Files.Vendor.Test", nil }, reason.VirtualUnknown)
	refusedFor("not covered", func(context.Context, uint32, netip.Addr) (string, error) { return "vendor.test.evil.test", nil }, reason.NameNotAllowed)
}

func problemOf(t testing.TB, resp *http.Response) problem {
	t.Helper()
	defer resp.Body.Close()
	var p problem
	if ct := resp.Header.Get("Content-Type"); ct != "application/problem+json" {
		t.Errorf("content type %q", ct)
	}
	must(t, json.NewDecoder(resp.Body).Decode(&p))
	return p
}

// E15 and E17: CONNECT to what the card does not name.
func TestConnectRefusals(t *testing.T) {
	w := newWorld(t)
	w.allow(rule(apiHost, 443, policy.TLS))
	for target, code := range map[string]reason.Code{
		"evil.test:443":               reason.NameNotAllowed,
		apiHost + ":22":               reason.PortNotAllowed,
		"203.0.113.7:443":             reason.RawAddress,
		"[::ffff:c0a8:101]:443":       reason.RawAddress,
		"[64:ff9b::7f00:1]:443":       reason.RawAddress,
		"0x7f.1:443":                  reason.RawAddress,
		"2130706433:443":              reason.RawAddress,
		"169.254.169.254:443":         reason.Metadata,
		"evil%00.api.vendor.test:443": reason.NameInvalid,
		apiHost:                       reason.NameInvalid,
	} {
		c := w.dial(w.explicit)
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\n", target)
		resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
		must(t, err)
		if resp.StatusCode != 403 {
			t.Errorf("%s: status %d", target, resp.StatusCode)
		}
		if p := problemOf(t, resp); p.Reason != code || p.Conn == "" || p.Detail == "" {
			t.Errorf("%s: %+v, want %v", target, p, code)
		}
		w.records.wait(t, "refusal of "+target, func(r audit.Record) bool { return r.Reason == code && r.Outcome == audit.OutcomeDeny })
	}
}

// E15: the inner protocol is held against the card.
func TestConnectThenPlainHTTP(t *testing.T) {
	w := newWorld(t)
	w.allow(rule(apiHost, 443, policy.TLS))
	c, head := w.connect(apiHost + ":443")
	if !strings.HasPrefix(head, "HTTP/1.1 200 ") {
		t.Fatal(head)
	}
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: api.vendor.test\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	must(t, err)
	if p := problemOf(t, resp); resp.StatusCode != 403 || p.Reason != reason.NotTLS {
		t.Errorf("%d %+v", resp.StatusCode, p)
	}
	w.wantRefused(reason.NotTLS)
}

// The first bytes of the tunnel may come with the CONNECT itself.
func TestConnectWithEarlyBytes(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	c := w.dial(w.explicit)
	fmt.Fprintf(c, "CONNECT %s:%d HTTP/1.1\r\nHost: x\r\n\r\nearly \x00\r\n\r\n", apiHost, at.Port())
	if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 200 ") {
		t.Fatal(head)
	}
	io.WriteString(c, "late")
	must(t, c.CloseWrite())
	got, err := io.ReadAll(c)
	must(t, err)
	if string(got) != "early \x00\r\n\r\nlate" {
		t.Errorf("echoed %q", got)
	}
	closed := w.records.wait(t, "closing", event(audit.EventConnClosed, audit.OutcomeOK))
	if *closed.Bytes != (audit.Bytes{Up: 15, Down: 15}) || closed.Fields["via"] != viaExplicit {
		t.Errorf("counted %+v", closed.Bytes)
	}
}

func TestConnectToDeadServer(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	w.dns.set(apiHost, netip.MustParseAddr("127.0.2.99"))
	_, head := w.connect(fmt.Sprintf("%s:%d", apiHost, at.Port()))
	if !strings.HasPrefix(head, "HTTP/1.1 502 ") {
		t.Error(head)
	}
	if r := w.wantRefused(reason.DialFailed); r.Outcome != audit.OutcomeFail {
		t.Errorf("outcome %s", r.Outcome)
	}
}

// E09: an allowed name that resolves to what nobody may reach, alone or beside what everybody may.
func TestPrivateAnswers(t *testing.T) {
	w := newWorld(t)
	r := rule(apiHost, 443, policy.TCP)
	r.Addresses = nil
	w.allow(r)
	for _, list := range [][]string{
		{"127.0.0.1"}, {"10.0.0.5"}, {"169.254.169.254"}, {"100.100.100.200"}, {"0.0.0.0"}, {"198.18.240.16"},
		{"::1"}, {"fe80::1"}, {"::ffff:192.168.1.1"}, {"64:ff9b::a9fe:a9fe"},
		{"10.0.0.5", "203.0.113.7"}, {"203.0.113.7", "10.0.0.5"}, {"203.0.113.7", "203.0.113.8", "169.254.169.254"},
		{"fd00::1", "2001:db9::1"}, {"2001:db9::1", "fd00::1"},
	} {
		w.records.mu.Lock()
		w.records.records = nil
		w.records.mu.Unlock()
		var addrs []netip.Addr
		for _, a := range list {
			addrs = append(addrs, netip.MustParseAddr(a))
		}
		w.dns.set(apiHost, addrs...)
		c := w.dialName(apiHost, 443)
		c.Write([]byte{0})
		wantReset(t, c)
		if rec := w.wantRefused(reason.PrivateAnswer); !strings.Contains(rec.Detail, strings.Join(list, ", ")) || rec.Outcome != audit.OutcomeDeny {
			t.Errorf("%s: %s %q", list, rec.Outcome, rec.Detail)
		}
	}
	// A public IPv6 address is no attack, and nothing that is dialled.
	w.dns.set(apiHost, netip.MustParseAddr("2001:db9::1"))
	c := w.dialName(apiHost, 443)
	c.Write([]byte{0})
	wantReset(t, c)
	w.wantRefused(reason.ResolveFailed)
}

// E10: dead addresses in an answer are passed over; an answer that changes at every
// lookup is no trouble; a truncated answer is asked for again over TCP.
func TestAnswersThatChange(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	turn := 0
	w.dns.setFunc(apiHost, func() []netip.Addr {
		turn++
		dead := netip.AddrFrom4([4]byte{127, 0, 2, byte(100 + turn%100)})
		return []netip.Addr{dead, serverAddr}
	})
	first := w.dialName(apiHost, at.Port())
	for i := range 3 {
		w.dns.cut.Store(i == 2)
		c := w.dialName(apiHost, at.Port())
		for _, conn := range []net.Conn{first, c} { // the first one lives through every rotation
			_, err := conn.Write([]byte("x"))
			must(t, err)
			_, err = io.ReadFull(conn, make([]byte, 1))
			must(t, err)
		}
	}
}

func TestResolverFailures(t *testing.T) {
	w := newWorld(t, func(c *Config) {
		dead, _ := net.ListenPacket("udp4", "127.0.0.1:0")
		dead.Close()
		c.Resolvers = append([]netip.AddrPort{dead.LocalAddr().(*net.UDPAddr).AddrPort()}, c.Resolvers...)
	})
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP), rule("gone.vendor.test", at.Port(), policy.TCP))
	c := w.dialName(apiHost, at.Port()) // by the second resolver
	_, err := c.Write([]byte("x"))
	must(t, err)
	_, err = io.ReadFull(c, make([]byte, 1))
	must(t, err)
	c = w.dialName("gone.vendor.test", at.Port())
	c.Write([]byte{0})
	wantReset(t, c)
	w.wantRefused(reason.ResolveFailed)
}

func TestInspectionEndsAtTheInstancesCA(t *testing.T) {
	w := newWorld(t)
	at := w.web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, r.Host, " ", r.URL.Path) }), apiHost)
	r := rule(apiHost, at.Port(), policy.TLS)
	r.Inspect = true
	w.allow(r)
	tc := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: w.inspector.pool(), NextProtos: []string{"spdy/3", "http/1.1"}})
	must(t, tc.Handshake())
	if p := tc.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("negotiated %q", p)
	}
	fmt.Fprintf(tc, "GET /v1/x HTTP/1.1\r\nHost: %s\r\n\r\n", apiHost)
	resp, err := http.ReadResponse(bufio.NewReader(tc), nil)
	must(t, err)
	body, _ := io.ReadAll(resp.Body)
	if string(body) != fmt.Sprintf("%s:%d /v1/x", apiHost, at.Port()) {
		t.Errorf("answer %q", body)
	}
	// A client that does not trust the CA says so; the record explains it.
	bad := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: w.vendor.pool()})
	var ua x509.UnknownAuthorityError
	if err := bad.Handshake(); !errors.As(err, &ua) {
		t.Errorf("handshake with another CA: %v", err)
	}
	w.records.wait(t, "the broken handshake", func(r audit.Record) bool {
		return r.Event == audit.EventConnClosed && strings.Contains(r.Detail, "did not finish the handshake")
	})
}

func TestUpstreamCertificateIsChecked(t *testing.T) {
	w := newWorld(t)
	at := w.web(http.NotFoundHandler(), "other.vendor.test")
	r := rule(apiHost, at.Port(), policy.TLS)
	r.Inspect = true
	w.allow(r)
	resp := w.inspected(apiHost, at.Port(), "GET / HTTP/1.1\r\nHost: "+apiHost+"\r\n\r\n")
	if p := problemOf(t, resp); resp.StatusCode != 502 || p.Reason != reason.UpstreamTLS {
		t.Errorf("%d %+v", resp.StatusCode, p)
	}
	rec := w.records.wait(t, "the refusal", event(audit.EventRequest, audit.OutcomeDeny))
	if rec.Reason != reason.UpstreamTLS {
		t.Errorf("reason %v", rec.Reason)
	}
}

// TestAHandshakeThatIsCutSaysNothingOfTheCertificate: the server, or a stop, ends the connection in its middle.
func TestAHandshakeThatIsCutSaysNothingOfTheCertificate(t *testing.T) {
	for name, end := range map[string]func(net.Conn){
		"closed": func(net.Conn) {},
		"reset":  func(c net.Conn) { c.(*net.TCPConn).SetLinger(0) },
	} {
		w := newWorld(t)
		at := listen(t, serverAddr, 0, func(c net.Conn) {
			c.Read(make([]byte, 16<<10)) // the hello
			end(c)
			c.Close()
		})
		r := rule(apiHost, at.Port(), policy.TLS)
		r.Inspect = true
		w.allow(r)
		resp := w.inspected(apiHost, at.Port(), "GET / HTTP/1.1\r\nHost: "+apiHost+"\r\n\r\n")
		if p := problemOf(t, resp); resp.StatusCode != 502 || p.Reason != reason.DialFailed {
			t.Errorf("%s: %d %+v", name, resp.StatusCode, p)
		}
	}
}

// inspected sends raw inside inspected TLS and returns the first response.
func (w *world) inspected(host string, port uint16, raw string) *http.Response {
	w.t.Helper()
	tc := tls.Client(w.dialName(host, port), &tls.Config{ServerName: host, RootCAs: w.inspector.pool()})
	must(w.t, tc.Handshake())
	io.WriteString(tc, raw)
	resp, err := http.ReadResponse(bufio.NewReader(tc), nil)
	must(w.t, err)
	return resp
}

func (w *world) inspectedConn(c net.Conn) net.Conn {
	w.t.Helper()
	tc := tls.Client(c, &tls.Config{ServerName: apiHost, RootCAs: w.inspector.pool()})
	must(w.t, tc.Handshake())
	return tc
}

func mustURL(t testing.TB, raw string) *url.URL {
	t.Helper()
	u, err := url.Parse(raw)
	must(t, err)
	return u
}
