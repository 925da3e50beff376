package dnsfilter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
)

type recorder struct {
	mu   sync.Mutex
	recs []audit.Record
}

func (r *recorder) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recs = append(r.recs, rec)
}

func (r *recorder) all() []audit.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]audit.Record(nil), r.recs...)
}

// lookups returns the records of lookups with the reason, and how many events they stand for.
func (r *recorder) lookups(code reason.Code) (recs []audit.Record, events uint64) {
	for _, rec := range r.all() {
		if rec.Event == audit.EventLookup && rec.Reason == code {
			recs = append(recs, rec)
			events += max(rec.Count, 1)
		}
	}
	return recs, events
}

type noMetrics struct{}

func (noMetrics) Answered(string, reason.Code) {}
func (noMetrics) Dropped(string)               {}
func (noMetrics) Sessions(int)                 {}

// processes names every query after its source port.
type processes struct{}

func (processes) Process(kid netip.AddrPort, proto uint8) (audit.Process, bool) {
	return audit.Process{PID: int(kid.Port()), Comm: fmt.Sprintf("proto%d", proto)}, true
}

const (
	gateway = "127.0.0.1"
	kidAddr = "127.0.5.11"
)

var virtualNet = netip.MustParsePrefix("198.18.0.0/20")

// vendorRules are those of the example cards: api.vendor.test:443, files.vendor.test:80 and one wildcard.
func vendorRules() policy.Spec {
	return policy.Spec{Allow: []policy.Rule{
		{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: policy.TLS, Line: 7},
		{Host: "files.vendor.test", Ports: []uint16{80}, Protocol: policy.HTTP, Line: 9},
		{Host: "*.cdn.test", Ports: []uint16{443}, Protocol: policy.TLS, Line: 11},
	}}
}

func testSession(n int, spec policy.Spec) *session.Session {
	return &session.Session{
		Version: session.Version, ID: fmt.Sprintf("01TESTSESSION%d", n), Kid: fmt.Sprintf("kid%d", n), Card: "practice", Index: n,
		Mark: 0x54300000 | uint32(n), Addr: netip.AddrFrom4([4]byte{127, 0, 5, byte(10 + n)}), HostAddr: netip.MustParseAddr("127.0.5.1"),
		Cgroup: "/sys/fs/cgroup/x", CgroupID: 1, Generation: 1, Egress: spec,
	}
}

// bed is a running filter with what surrounds it faked.
type bed struct {
	t      testing.TB
	dir    string // survives a restart
	rec    *recorder
	filter *Filter
	addr   string
	client *control.Client
	stop   func()
}

func newBed(t testing.TB) *bed { return &bed{t: t, dir: t.TempDir(), rec: &recorder{}} }

func (b *bed) start(docs []*session.Session, change ...func(*Config)) *bed {
	b.t.Helper()
	cfg := Config{
		Listen: netip.MustParseAddrPort(gateway + ":0"), Virtual: virtualNet, StateDir: b.dir,
		Load:  func() ([]*session.Session, error) { return docs, nil },
		Check: func(*session.Session) error { return nil },
		Audit: b.rec, Processes: processes{}, Metrics: noMetrics{}, Log: slog.New(slog.DiscardHandler),
		Sandboxd: os.Getuid(), Proxy: os.Getuid(), Sockets: 2, Rate: 1e6, Burst: 1e6,
	}
	for _, fn := range change {
		fn(&cfg)
	}
	f, err := New(b.t.Context(), cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	b.filter, b.addr = f, f.Addr().String()
	sock, err := os.MkdirTemp("", "tdns")
	if err != nil {
		b.t.Fatal(err)
	}
	l, err := control.Listen(filepath.Join(sock, "s"), os.Getgid())
	if err != nil {
		b.t.Fatal(err)
	}
	mux := http.NewServeMux()
	f.Routes(mux)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := f.Run(ctx); err != nil {
			b.t.Error(err)
		}
	})
	wg.Go(func() { control.Serve(ctx, l, mux, time.Second) }) // ends with the test
	b.client = control.NewClient(filepath.Join(sock, "s"))
	b.stop = sync.OnceFunc(func() {
		b.client.CloseIdle()
		cancel()
		wg.Wait()
		os.RemoveAll(sock) // a temporary directory
	})
	b.t.Cleanup(b.stop)
	return b
}

func (b *bed) call(method, route string, in, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return b.client.Call(ctx, method, route, in, out)
}

// from returns a client whose queries come from the address.
func from(addr, network string) *dns.Client {
	c := &dns.Client{Net: network, Timeout: 5 * time.Second, Dialer: &net.Dialer{Timeout: 5 * time.Second}}
	if network == "tcp" {
		c.Dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(addr)}
	} else {
		c.Dialer.LocalAddr = &net.UDPAddr{IP: net.ParseIP(addr)}
	}
	return c
}

func (b *bed) exchange(m *dns.Msg, addr, network string) *dns.Msg {
	b.t.Helper()
	r, _, err := from(addr, network).Exchange(m, b.addr)
	if err != nil {
		b.t.Fatalf("%s over %s: %v", m.Question[0].String(), network, err)
	}
	return r
}

// ask sends one question from the first kid over UDP, with EDNS.
func (b *bed) ask(name string, qtype uint16) *dns.Msg {
	b.t.Helper()
	return b.exchange(question(name, qtype), kidAddr, "udp")
}

func question(name string, qtype uint16) *dns.Msg {
	return new(dns.Msg).SetQuestion(name, qtype).SetEdns0(1232, false)
}

// raw sends bytes from the first kid and returns the answer; nil after patience without one.
func (b *bed) raw(msg []byte, patience time.Duration) []byte {
	b.t.Helper()
	d := net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(kidAddr)}}
	c, err := d.Dial("udp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	defer c.Close() // nothing is buffered
	if _, err := c.Write(msg); err != nil {
		b.t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(patience)); err != nil {
		b.t.Fatal(err)
	}
	buf := make([]byte, 64<<10)
	n, err := c.Read(buf)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	if err != nil {
		b.t.Fatal(err)
	}
	return buf[:n]
}

func addrOf(t testing.TB, r *dns.Msg) netip.Addr {
	t.Helper()
	if r.Rcode != dns.RcodeSuccess || len(r.Answer) != 1 {
		t.Fatalf("no address in %v", r)
	}
	a, ok := r.Answer[0].(*dns.A)
	if !ok {
		t.Fatalf("no address in %v", r)
	}
	addr, _ := netip.AddrFromSlice(a.A.To4())
	return addr
}

// ede returns the extended error of a reply.
func ede(r *dns.Msg) (code uint16, text string) {
	if opt := r.IsEdns0(); opt != nil {
		for _, o := range opt.Option {
			if e, ok := o.(*dns.EDNS0_EDE); ok {
				return e.InfoCode, e.ExtraText
			}
		}
	}
	return 0, ""
}
