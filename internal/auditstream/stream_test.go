package auditstream

import (
	"bufio"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	logspb "go.opentelemetry.io/proto/otlp/logs/v1"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/reason"
)

// counts is the metrics and the audit log of a test.
type counts struct {
	mu      sync.Mutex
	sent    map[string]int
	failed  map[string]int
	dropped map[string]uint64
	told    map[string]uint64 // by sink, in records
}

func newCounts() *counts {
	return &counts{sent: map[string]int{}, failed: map[string]int{}, dropped: map[string]uint64{}, told: map[string]uint64{}}
}

func (c *counts) do(fn func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	fn()
}

func (c *counts) StreamSent(s string, n int)       { c.do(func() { c.sent[s] += n }) }
func (c *counts) StreamFailed(s string)            { c.do(func() { c.failed[s]++ }) }
func (c *counts) StreamDropped(s string, n uint64) { c.do(func() { c.dropped[s] += n }) }
func (c *counts) StreamWaiting(string, int)        {}
func (c *counts) Log(r audit.Record) {
	c.do(func() {
		if r.Event == audit.EventStreamDropped {
			c.told[r.Fields["sink"]] += r.Count
		}
	})
}

func (c *counts) lost(sink string) (dropped, told uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dropped[sink], c.told[sink]
}

// place is a log and the streams of it.
type place struct {
	t   *testing.T
	cfg Config
	n   int
	*counts
}

func newPlace(t *testing.T, sinks ...Sink) *place {
	dir := t.TempDir()
	p := &place{t: t, counts: newCounts()}
	p.cfg = Config{Dir: filepath.Join(dir, "audit"), State: dir, Sinks: sinks, Version: "v1", Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Audit: p, Metrics: p}
	if err := os.MkdirAll(filepath.Join(p.cfg.Dir, "proxy"), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

// log appends records 0, 1, … of the log.
func (p *place) log(count int) {
	p.t.Helper()
	f, err := os.OpenFile(filepath.Join(p.cfg.Dir, "proxy", "proxy.jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	for range count {
		raw, err := json.Marshal(audit.Record{Version: 1, ID: fmt.Sprintf("R%06d", p.n), Time: time.Unix(1700000000, int64(p.n)).UTC(), Instance: "box", Daemon: "proxy", Event: audit.EventConnOpened, Kid: "k", Session: "S",
			Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed, Dst: &audit.Dst{Name: "evil.test", Port: 443}, Detail: "odd \"text\"]\n"})
		if err != nil {
			p.t.Fatal(err)
		}
		if _, err := f.Write(append(raw, '\n')); err != nil {
			p.t.Fatal(err)
		}
		p.n++
	}
}

// start runs the streams until the test ends, or until the function that it returns is called.
func (p *place) start() (stop func()) {
	p.t.Helper()
	s, err := New(p.cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); s.Run(ctx) }()
	stop = func() { cancel(); <-done }
	p.t.Cleanup(stop)
	for _, st := range s.all { // they follow from where the logs end now
		p.wait("a cursor", func() bool { _, err := os.Stat(st.file); return err == nil })
	}
	return stop
}

func (p *place) wait(what string, ok func() bool) {
	p.t.Helper()
	for end := time.Now().Add(15 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("%s did not come", what)
		}
	}
}

// got is what a receiver got, in order, without repeats.
type got struct {
	mu  sync.Mutex
	ids []string
}

func (g *got) add(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Contains(g.ids, id) {
		g.ids = append(g.ids, id)
	}
}

func (g *got) len() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.ids)
}

func ids(from, to int) []string {
	var out []string
	for n := from; n < to; n++ {
		out = append(out, fmt.Sprintf("R%06d", n))
	}
	return out
}

func (g *got) want(t *testing.T, want []string) {
	t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if !slices.Equal(g.ids, want) {
		t.Errorf("got %d records %.200q, want %d", len(g.ids), g.ids, len(want))
	}
}

func sink(kind, url string) Sink {
	return Sink{Name: kind, Kind: kind, URL: url, Timeout: 2 * time.Second, Patience: time.Minute, Queue: 256}
}

// A collector that decodes OTLP gets every record, whole and in order.
func TestRecordsArriveOverOTLP(t *testing.T) {
	var g got
	secret := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(secret, []byte("Bearer 0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := io.ReadAll(r.Body)
		var data logspb.LogsData // ExportLogsServiceRequest has the same form
		if err == nil {
			err = proto.Unmarshal(raw, &data)
		}
		if err != nil || r.URL.Path != "/v1/logs" || r.Header.Get("Content-Type") != "application/x-protobuf" || r.Header.Get("Authorization") != "Bearer 0123456789abcdef" {
			t.Errorf("%v %s %v", err, r.URL.Path, r.Header)
		}
		for _, res := range data.ResourceLogs {
			for _, scope := range res.ScopeLogs {
				for _, l := range scope.LogRecords {
					attributes := map[string]string{}
					for _, a := range l.Attributes {
						attributes[a.Key] = a.Value.GetStringValue() + strings.TrimSuffix(strconv.FormatInt(a.Value.GetIntValue(), 10), "0")
					}
					var rec audit.Record
					if err := json.Unmarshal([]byte(l.Body.GetStringValue()), &rec); err != nil || rec.Detail != "odd \"text\"]\n" || attributes["tagout.reason"] != "name-not-allowed" || attributes["server.address"] != "evil.test" ||
						attributes["server.port"] != "443" || l.EventName != "tagout.conn.opened" || l.SeverityText != "WARN" || l.TimeUnixNano/1e9 != 1700000000 || scope.Scope.Name != "tagout/proxy" {
						t.Errorf("%v %v", err, l)
					}
					g.add(attributes["tagout.record.id"])
				}
			}
		}
	}))
	defer srv.Close()
	s := sink(OTLP, srv.URL)
	s.SecretFile = secret
	p := newPlace(t, s)
	p.log(3) // the past
	p.start()
	p.log(700)
	p.wait("all records", func() bool { return g.len() == 700 })
	g.want(t, ids(3, 703))
}

// What a receiver took and will not keep is counted as lost.
func TestAPartialSuccessIsCounted(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		inner := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), 2)
		inner = protowire.AppendString(protowire.AppendTag(inner, 2, protowire.BytesType), "two are bad")
		w.Write(protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), inner))
	}))
	defer srv.Close()
	p := newPlace(t, sink(OTLP, srv.URL))
	p.start()
	p.log(5)
	p.wait("the count", func() bool { dropped, told := p.lost(OTLP); return dropped == 2 && told == 2 })
	for _, bad := range [][]byte{nil, {0x0a}, {0x0a, 0x05, 0x08}, {0xff}, []byte("<html>")} {
		if n := rejected(bad); n != 0 {
			t.Errorf("%x rejects %d", bad, n)
		}
	}
}

var syslogLine = regexp.MustCompile(`^<108>1 2023-11-14T22:13:20\.\d{6}Z \S+ tagout proxy conn\.opened \[tagout@32473 id="(R\d+)" instance="box" .*destination="evil\.test:443"\] (\{.*\})$`)

func takeSyslog(t *testing.T, g *got, msg string) {
	m := syslogLine.FindStringSubmatch(msg)
	if m == nil || !json.Valid([]byte(m[2])) || strings.ContainsAny(msg, "\n\x00") {
		t.Errorf("%q is no message", msg)
		return
	}
	g.add(m[1])
}

func TestRecordsArriveOverSyslog(t *testing.T) {
	var overTCP, overUDP got
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	go func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			in := bufio.NewReader(c)
			for {
				n, err := in.ReadString(' ')
				if err != nil {
					break
				}
				length, err := strconv.Atoi(strings.TrimSpace(n))
				msg := make([]byte, length)
				if err != nil {
					t.Errorf("%q is no length", n)
					return
				}
				if _, err := io.ReadFull(in, msg); err != nil {
					break
				}
				takeSyslog(t, &overTCP, string(msg))
			}
		}
	}()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	go func() {
		buf := make([]byte, 65536)
		for {
			n, _, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			takeSyslog(t, &overUDP, string(buf[:n]))
		}
	}()
	first, second := sink(Syslog, "tcp://"+tcp.Addr().String()), sink(Syslog, "udp://"+udp.LocalAddr().String())
	second.Name = "udp"
	p := newPlace(t, first, second)
	p.start()
	p.log(600)
	p.wait("all records over TCP", func() bool { return overTCP.len() == 600 })
	overTCP.want(t, ids(0, 600))
	p.wait("records over UDP", func() bool { return overUDP.len() > 0 })
}

func TestRecordsArriveSignedAtAWebhook(t *testing.T) {
	var g got
	secret := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(secret, []byte("0123456789abcdef0123456789abcdef\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	fail := 2
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		at, sig, _ := strings.Cut(strings.TrimPrefix(r.Header.Get("Tagout-Signature"), "t="), ",v1=")
		mac := hmac.New(sha256.New, []byte("0123456789abcdef0123456789abcdef"))
		fmt.Fprintf(mac, "%s.%s", at, raw)
		if hex.EncodeToString(mac.Sum(nil)) != sig {
			t.Errorf("the signature %s is wrong", r.Header)
		}
		mu.Lock()
		defer mu.Unlock()
		if fail--; fail >= 0 {
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
		var doc struct{ Records []audit.Record }
		if err := json.Unmarshal(raw, &doc); err != nil {
			t.Error(err)
		}
		for _, rec := range doc.Records {
			g.add(rec.ID)
		}
	}))
	defer srv.Close()
	s := sink(Webhook, srv.URL)
	s.SecretFile = secret
	p := newPlace(t, s)
	p.start()
	p.log(30)
	p.wait("all records", func() bool { return g.len() == 30 })
	g.want(t, ids(0, 30))
	if p.failed[Webhook] < 2 {
		t.Errorf("%d failures are counted", p.failed[Webhook])
	}
	s.SecretFile = filepath.Join(t.TempDir(), "none")
	if _, err := New(Config{Sinks: []Sink{s}, Log: p.cfg.Log, Metrics: p}); err == nil {
		t.Error("a sink without its key is started")
	}
}

// One sink that hangs slows nothing: the other gets every record, while the first loses what it has no room for, and the
// loss is counted exactly. When it answers again it gets what is written from then on.
func TestAHangingSinkSlowsNothingAndItsLossIsCounted(t *testing.T) {
	var good, bad got
	hang := make(chan struct{})
	receive := func(g *got, wait <-chan struct{}) *httptest.Server {
		return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var doc struct{ Records []audit.Record }
			err := json.NewDecoder(r.Body).Decode(&doc)
			select {
			case <-wait:
			case <-r.Context().Done():
				return
			}
			if err != nil {
				t.Error(err)
			}
			for _, rec := range doc.Records {
				g.add(rec.ID)
			}
		}))
	}
	open := make(chan struct{})
	close(open)
	goodSrv, badSrv := receive(&good, open), receive(&bad, hang)
	defer goodSrv.Close()
	defer badSrv.Close()
	healthy, hung := sink(Webhook, goodSrv.URL), sink(Webhook, badSrv.URL)
	hung.Name, hung.Timeout, hung.Patience, hung.Queue = "hung", 200*time.Millisecond, 500*time.Millisecond, 64
	p := newPlace(t, healthy, hung)
	p.start()
	const all = 3000
	p.log(all)
	p.wait("everything at the healthy sink", func() bool { return good.len() == all })
	good.want(t, ids(0, all))
	p.wait("a loss on record", func() bool { _, told := p.lost("hung"); return told > 0 })
	p.wait("the end of the loss", func() bool { dropped, _ := p.lost("hung"); return dropped >= all-64-batchMost })
	close(hang)
	p.wait("what had been waiting", func() bool { return bad.len() > 64 })
	p.log(1)
	p.wait("the newest record at the sink that hung", func() bool {
		bad.mu.Lock()
		defer bad.mu.Unlock()
		return slices.Contains(bad.ids, fmt.Sprintf("R%06d", all))
	})
	dropped, _ := p.lost("hung")
	if int(dropped)+bad.len() != all+1 {
		t.Errorf("%d arrived and %d are counted as lost, of %d", bad.len(), dropped, all+1)
	}
	p.wait("the whole loss on record", func() bool { d, told := p.lost("hung"); return d == told })
}

// What a receiver will never take is given up and counted; what follows arrives.
func TestWhatIsRefusedForGoodIsGivenUp(t *testing.T) {
	var g got
	first := true
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var doc struct{ Records []audit.Record }
		json.NewDecoder(r.Body).Decode(&doc)
		if first {
			first = false
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		for _, rec := range doc.Records {
			g.add(rec.ID)
		}
	}))
	defer srv.Close()
	p := newPlace(t, sink(Webhook, srv.URL))
	p.start()
	p.log(1)
	p.wait("the refusal", func() bool { dropped, _ := p.lost(Webhook); return dropped == 1 })
	p.log(4)
	p.wait("the rest", func() bool { return g.len() == 4 })
	g.want(t, ids(1, 5))
}

// Over a restart nothing is lost, also where a piece of the log was closed meanwhile.
func TestNothingIsLostOverARestart(t *testing.T) {
	var g got
	var mu sync.Mutex
	down := false
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if down {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		var doc struct{ Records []audit.Record }
		json.NewDecoder(r.Body).Decode(&doc)
		for _, rec := range doc.Records {
			g.add(rec.ID)
		}
	}))
	defer srv.Close()
	set := func(v bool) { mu.Lock(); down = v; mu.Unlock() }
	p := newPlace(t, sink(Webhook, srv.URL))
	stop := p.start()
	p.log(10)
	p.wait("the first", func() bool { return g.len() == 10 })
	set(true)
	p.log(50) // queued, and not sent
	p.wait("a failure", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.failed[Webhook] > 0 })
	stop()
	p.log(20)
	live := filepath.Join(p.cfg.Dir, "proxy", "proxy.jsonl")
	closed := filepath.Join(p.cfg.Dir, "proxy", "shards", "000000000000-20260504T120000Z.jsonl")
	if err := os.MkdirAll(filepath.Dir(closed), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(live, closed); err != nil {
		t.Fatal(err)
	}
	p.log(20)
	set(false)
	p.start()
	p.wait("the rest", func() bool { return g.len() == 100 })
	g.want(t, ids(0, 100))
}

func TestALongRecordFitsADatagram(t *testing.T) {
	l := audit.Record{Version: 1, ID: "R1", Event: audit.EventToolCalled, Daemon: "sandboxd", Fields: map[string]string{"arguments": strings.Repeat("é\n", 5000)}}
	raw, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	line, _ := auditview.Decode(raw)
	if m := message(&line, "host", false); len(m) > datagramMost || strings.ContainsAny(string(m), "\n\x00") || !json.Valid([]byte(strconv.Quote(string(m)))) {
		t.Errorf("%d bytes: %q", len(m), m)
	}
	if m := message(&line, "host", true); !strings.HasSuffix(string(m), string(raw)) {
		t.Error("over a connection it is cut")
	}
}
