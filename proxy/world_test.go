package proxy

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/pem"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/inspectca"
	"tagout/internal/metrics"
	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/wire"
)

const (
	patience = 10 * time.Second
	kidMark  = 0x54f00007
	apiHost  = "api.vendor.test"
	fileHost = "files.vendor.test"
)

// The test network is loopback: kids at 127.0.1.x, the gateway at 127.0.0.1, servers at 127.0.2.x, which the
// rules grant.
var (
	gateway     = netip.MustParseAddr("127.0.0.1")
	kidAddr     = netip.MustParseAddr("127.0.1.1")
	serverAddr  = netip.MustParseAddr("127.0.2.1")
	virtualNet  = netip.MustParsePrefix("198.18.240.0/20")
	serverGrant = []netip.Prefix{netip.MustParsePrefix("127.0.2.0/24")}
)

// names and tokens are fakes of dnsfilter and credd; a call that a test did not provide for fails it.
type fakeNames struct {
	name func(ctx context.Context, mark uint32, addr netip.Addr) (string, error)
}

func (f *fakeNames) Name(ctx context.Context, mark uint32, addr netip.Addr) (string, error) {
	if f.name == nil {
		panic("unexpected question to dnsfilter")
	}
	return f.name(ctx, mark, addr)
}

type fakeTokens struct {
	resolve func(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error)
}

func (f *fakeTokens) Resolve(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error) {
	if f.resolve == nil {
		panic("unexpected question to credd")
	}
	return f.resolve(ctx, req)
}

type fakeProcesses struct{}

func (fakeProcesses) Process(kid netip.AddrPort, proto uint8) (audit.Process, bool) {
	return audit.Process{PID: int(kid.Port()), Comm: "curl"}, proto == 6
}

// recorder keeps records and lets tests wait for one.
type recorder struct {
	mu      sync.Mutex
	records []audit.Record
	more    chan struct{}
}

func newRecorder() *recorder { return &recorder{more: make(chan struct{})} }

func (r *recorder) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.records = append(r.records, rec)
	close(r.more)
	r.more = make(chan struct{})
}

func (r *recorder) all() []audit.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]audit.Record(nil), r.records...)
}

// wait returns the first record that matches, waiting for it.
func (r *recorder) wait(t testing.TB, what string, match func(audit.Record) bool) audit.Record {
	t.Helper()
	deadline := time.After(patience)
	for {
		r.mu.Lock()
		for _, rec := range r.records {
			if match(rec) {
				r.mu.Unlock()
				return rec
			}
		}
		more := r.more
		r.mu.Unlock()
		select {
		case <-more:
		case <-deadline:
			t.Fatalf("no record of %s; there are:\n%s", what, r.dump())
		}
	}
}

func (r *recorder) dump() string {
	var b strings.Builder
	for _, rec := range r.all() {
		b.WriteString(rec.Event + " " + rec.Outcome + " " + rec.Reason.String() + " " + rec.Detail + "\n")
	}
	return b.String()
}

func event(name, outcome string) func(audit.Record) bool {
	return func(r audit.Record) bool { return r.Event == name && r.Outcome == outcome }
}

// authority is a test CA.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t testing.TB, name string) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	tmpl := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	must(t, err)
	cert, err := x509.ParseCertificate(der)
	must(t, err)
	return &authority{cert, key}
}

func (a *authority) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(a.cert)
	return pool
}

func (a *authority) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.cert.Raw})
}

// store writes the CA to dir, as `tagout setup` does.
func (a *authority) store(t testing.TB, dir string) {
	t.Helper()
	must(t, (&inspectca.CA{Cert: a.cert, Key: a.key}).Write(dir, "", -1, -1))
}

func (a *authority) issue(t testing.TB, names ...string) tls.Certificate {
	t.Helper()
	ca, err := newCA(a.cert, a.key)
	must(t, err)
	cert, err := ca.mint(names[0])
	must(t, err)
	return *cert
}

// world is a proxy with a kid, a resolver and whatever servers a test starts.
type world struct {
	t         testing.TB
	proxy     *Proxy
	records   *recorder
	names     *fakeNames
	tokens    *fakeTokens
	dns       *fakeDNS
	vendor    *authority // of upstream servers
	inspector *authority // of the instance

	explicit, transparent netip.AddrPort
	going                 sync.Map                       // client's address -> where it believes to go
	toward                atomic.Pointer[netip.AddrPort] // where everybody goes, instead; nil: see going
	marked                atomic.Int64                   // sockets that got the mark
	secretive             atomic.Int64                   // those among them that say that they carry a secret
	generation            uint64
	stop                  func()
}

func newWorld(t testing.TB, change ...func(*Config)) *world {
	t.Helper()
	w := &world{
		t: t, records: newRecorder(), names: &fakeNames{}, tokens: &fakeTokens{}, dns: newFakeDNS(t),
		vendor: newAuthority(t, "vendor CA"), inspector: newAuthority(t, "inspection CA"),
	}
	dir := t.TempDir()
	w.inspector.store(t, dir)
	ca, err := LoadCA(dir, "")
	must(t, err)
	cfg := w.config(ca)
	for _, f := range change {
		f(&cfg)
	}
	w.proxy, err = New(cfg)
	must(t, err)
	w.serve(netip.AddrPortFrom(gateway, 0), netip.AddrPortFrom(gateway, 0))
	return w
}

func (w *world) config(ca *CA) Config {
	return Config{
		Gateway: gateway, Virtual: virtualNet, Names: w.names, Tokens: w.tokens, Processes: fakeProcesses{},
		Audit: w.records, Metrics: metrics.NewProxy(metrics.NewRegistry("test", "proxy")),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), CA: ca,
		Resolvers: []netip.AddrPort{w.dns.addr}, Roots: w.vendor.pool(),
		OriginalDst: w.originalDst, Mark: w.mark,
		Limits: Limits{Hello: 2 * time.Second, Connect: 4 * time.Second},
	}
}

func (w *world) serve(explicitAt, transparentAt netip.AddrPort) {
	explicit, err := Listen(w.t.Context(), explicitAt)
	must(w.t, err)
	transparent, err := Listen(w.t.Context(), transparentAt)
	must(w.t, err)
	w.explicit = explicit.Addr().(*net.TCPAddr).AddrPort()
	w.transparent = transparent.Addr().(*net.TCPAddr).AddrPort()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- w.proxy.Serve(ctx, explicit, transparent) }()
	w.stop = sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				w.t.Errorf("serving: %v", err)
			}
		case <-time.After(patience):
			w.t.Error("the proxy does not end")
		}
	})
	w.t.Cleanup(w.stop)
}

// mark sets the real mark where the test may, and counts.
func (w *world) mark(fd uintptr, mark uint32) error {
	if mark&^session.SecretBit != kidMark {
		w.t.Errorf("a socket gets mark %#x", mark)
	}
	if mark != kidMark {
		w.secretive.Add(1)
	}
	w.marked.Add(1)
	if os.Geteuid() != 0 {
		return nil
	}
	if err := setMark(fd, mark); err != nil {
		return err
	}
	got, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK)
	if err != nil || uint32(got) != mark {
		w.t.Errorf("SO_MARK is %#x after setting %#x: %v", got, mark, err)
	}
	return nil
}

func (w *world) originalDst(c net.Conn) (netip.AddrPort, error) {
	if dst := w.toward.Load(); dst != nil {
		return *dst, nil
	}
	deadline := time.Now().Add(patience)
	for time.Now().Before(deadline) {
		if dst, ok := w.going.Load(c.RemoteAddr().String()); ok {
			return dst.(netip.AddrPort), nil
		}
		time.Sleep(time.Millisecond) // the dialling goroutine is about to say
	}
	return netip.AddrPort{}, io.ErrUnexpectedEOF
}

func rule(host string, port uint16, proto policy.Protocol) policy.Rule {
	return policy.Rule{Host: host, Ports: []uint16{port}, Protocol: proto, Addresses: serverGrant, Line: 12}
}

func (w *world) session(rules ...policy.Rule) *session.Session {
	w.generation++
	return &session.Session{
		Version: session.Version, ID: "01SESSION", Kid: "kid1", Card: "card1", Index: 1, Mark: kidMark, Addr: kidAddr,
		HostAddr: netip.MustParseAddr("127.0.1.0"), Cgroup: "/x", CgroupID: 1, Generation: w.generation,
		Egress: policy.Spec{Allow: rules},
	}
}

func (w *world) allow(rules ...policy.Rule) {
	w.t.Helper()
	_, err := w.proxy.Put(w.session(rules...))
	must(w.t, err)
}

// dial connects from the kid's address.
func (w *world) dial(to netip.AddrPort) *net.TCPConn {
	w.t.Helper()
	c, err := w.tryDial(kidAddr, to)
	must(w.t, err)
	return c
}

func (w *world) tryDial(from netip.Addr, to netip.AddrPort) (*net.TCPConn, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(from, 0)), Timeout: patience}
	c, err := d.DialContext(context.Background(), "tcp4", to.String())
	if err != nil {
		return nil, err
	}
	w.t.Cleanup(func() { c.Close() })
	must(w.t, c.SetDeadline(time.Now().Add(patience)))
	return c.(*net.TCPConn), nil
}

// virtual returns the address that stands for name in the session.
func (w *world) virtual(name string) netip.Addr {
	w.t.Helper()
	a, ok := w.proxy.sessions.find(kidAddr).current().exact.Addr(name)
	if !ok {
		w.t.Fatalf("%s has no virtual address", name)
	}
	return a
}

// dialName connects as the firewall would bring it here: towards the name's virtual address.
func (w *world) dialName(name string, port uint16) *net.TCPConn {
	w.t.Helper()
	return w.dialVirtual(netip.AddrPortFrom(w.virtual(name), port))
}

func (w *world) dialVirtual(dst netip.AddrPort) *net.TCPConn {
	w.t.Helper()
	c := w.dial(w.transparent)
	w.going.Store(c.LocalAddr().String(), dst)
	return c
}

// connect sends a CONNECT and returns the connection with the response's head.
func (w *world) connect(target string) (*net.TCPConn, string) {
	w.t.Helper()
	c := w.dial(w.explicit)
	_, err := io.WriteString(c, "CONNECT "+target+" HTTP/1.1\r\nHost: "+target+"\r\n\r\n")
	must(w.t, err)
	return c, readHead(w.t, c)
}

// readHead reads up to the first empty line, byte by byte.
func readHead(t testing.TB, r io.Reader) string {
	t.Helper()
	var head []byte
	one := make([]byte, 1)
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		if _, err := io.ReadFull(r, one); err != nil {
			t.Fatalf("reading a response head after %q: %v", head, err)
		}
		head = append(head, one[0])
	}
	return string(head)
}

// listen starts a server at the given loopback address.
func listen(t testing.TB, addr netip.Addr, port uint16, serve func(net.Conn)) (at netip.AddrPort) {
	t.Helper()
	l, err := net.Listen("tcp4", netip.AddrPortFrom(addr, port).String())
	must(t, err)
	serveListener(t, l, serve)
	return l.Addr().(*net.TCPAddr).AddrPort()
}

func serveListener(t testing.TB, l net.Listener, serve func(net.Conn)) {
	var conns sync.WaitGroup
	t.Cleanup(func() { l.Close(); conns.Wait() })
	conns.Go(func() { // it counts itself: nobody may be added to none while somebody waits
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			conns.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
}

// sameUDPAndTCPPort returns sockets of both kinds on one free port.
func sameUDPAndTCPPort(t testing.TB) (net.PacketConn, net.Listener) {
	t.Helper()
	for range 50 {
		pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
		must(t, err)
		l, err := net.Listen("tcp4", pc.LocalAddr().String())
		if err == nil {
			t.Cleanup(func() { pc.Close() })
			return pc, l
		}
		pc.Close()
	}
	t.Fatal("no port is free for both UDP and TCP")
	return nil, nil
}

// fakeDNS answers A questions out of a map.
type fakeDNS struct {
	addr  netip.AddrPort
	mu    sync.Mutex
	zone  map[string]func() []netip.Addr
	asked atomic.Int64
	cut   atomic.Bool                                                     // UDP answers come truncated
	twist atomic.Pointer[func(m *dnsmessage.Message, stream bool) []byte] // what becomes of each answer
	ttl   atomic.Uint32
}

func newFakeDNS(t testing.TB) *fakeDNS {
	t.Helper()
	f := &fakeDNS{zone: map[string]func() []netip.Addr{}}
	pc, l := sameUDPAndTCPPort(t)
	f.addr = pc.LocalAddr().(*net.UDPAddr).AddrPort()
	go func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			pc.WriteTo(f.said(buf[:n], f.cut.Load(), false), from)
		}
	}()
	serveListener(t, l, func(c net.Conn) {
		var length [2]byte
		io.ReadFull(c, length[:])
		msg := make([]byte, binary.BigEndian.Uint16(length[:]))
		io.ReadFull(c, msg)
		out := f.said(msg, false, true)
		c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(out))), out...))
	})
	f.set(apiHost, serverAddr)
	f.set(fileHost, serverAddr)
	return f
}

func (f *fakeDNS) set(name string, addrs ...netip.Addr) {
	f.setFunc(name, func() []netip.Addr { return addrs })
}

func (f *fakeDNS) setFunc(name string, fn func() []netip.Addr) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.zone[name+"."] = fn
}

// said is answer after its twist.
func (f *fakeDNS) said(msg []byte, cut, stream bool) []byte {
	raw, twist := f.answer(msg, cut), f.twist.Load()
	if twist == nil {
		return raw
	}
	var m dnsmessage.Message
	if m.Unpack(raw) != nil {
		return raw
	}
	return (*twist)(&m, stream)
}

// answer puts the addresses behind a CNAME, as large hosters do.
func (f *fakeDNS) answer(msg []byte, cut bool) []byte {
	f.asked.Add(1)
	var p dnsmessage.Parser
	h, err := p.Start(msg)
	if err != nil {
		return nil
	}
	q, err := p.Question()
	if err != nil {
		return nil
	}
	f.mu.Lock()
	fn := f.zone[q.Name.String()]
	f.mu.Unlock()
	out := dnsmessage.Message{Header: dnsmessage.Header{ID: h.ID, Response: true}, Questions: []dnsmessage.Question{q}}
	switch {
	case fn == nil:
		out.RCode = dnsmessage.RCodeNameError
	case cut:
		out.Truncated = true
	default:
		edge := dnsmessage.MustNewName("edge.cdn.test.")
		out.Answers = append(out.Answers, dnsmessage.Resource{
			Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: f.ttl.Load()},
			Body:   &dnsmessage.CNAMEResource{CNAME: edge},
		})
		for _, a := range fn() {
			res := dnsmessage.Resource{Header: dnsmessage.ResourceHeader{Name: edge, Class: dnsmessage.ClassINET, TTL: f.ttl.Load()}}
			switch {
			case a.Is4() && q.Type == dnsmessage.TypeA:
				res.Body = &dnsmessage.AResource{A: a.As4()}
			case a.Is6() && q.Type == dnsmessage.TypeAAAA:
				res.Body = &dnsmessage.AAAAResource{AAAA: a.As16()}
			default:
				continue
			}
			out.Answers = append(out.Answers, res)
		}
	}
	raw, _ := out.Pack()
	return raw
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

var zeroTime time.Time

func writeAll(path string, b []byte) error { return os.WriteFile(path, b, 0o600) }
