package credential

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

const (
	testBoot  = "6d2b1c4e-0000-4000-8000-1234567890ab"
	testMark  = 0x54300001
	otherMark = 0x54300002
	testValue = "vendor-s3cret-0123456789"
)

// recorder keeps records and the values that are to be redacted.
type recorder struct {
	mu      sync.Mutex
	recs    []audit.Record
	secrets []string
}

func (r *recorder) Log(rec audit.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.recs = append(r.recs, rec)
}

func (r *recorder) AddSecret(v string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.secrets = append(r.secrets, v)
}

// find returns the records of one event.
func (r *recorder) find(event string) []audit.Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []audit.Record
	for _, rec := range r.recs {
		if rec.Event == event {
			out = append(out, rec)
		}
	}
	return out
}

type noMetrics struct{}

func (noMetrics) Minted(int)                     {}
func (noMetrics) Issued()                        {}
func (noMetrics) Used(reason.Code)               {}
func (noMetrics) MintRefused(reason.Code)        {}
func (noMetrics) Revoked(int, time.Duration)     {}
func (noMetrics) Expired(int)                    {}
func (noMetrics) Held(int, int, int)             {}
func (noMetrics) Leases(map[wire.LeaseState]int) {}

// box is a credd with everything around it faked but its files and its socket.
type box struct {
	t      testing.TB
	dir    string
	rec    *recorder
	svc    *Service
	client *control.Client
	path   string
	tags   atomic.Pointer[[]wire.Tag] // nil: killswitchd does not answer
	now    atomic.Int64               // CLOCK_BOOTTIME
	stop   func()
}

func newBox(t testing.TB) *box {
	b := &box{t: t, dir: t.TempDir(), rec: &recorder{}}
	b.tags.Store(&[]wire.Tag{})
	return b
}

func (b *box) config() Config {
	return Config{
		Dir: b.dir, BootID: testBoot, OwnsMark: func(m uint32) bool { return m>>20 == testMark>>20 },
		Deny: []string{"root_*", "Master"},
		Tags: func(context.Context) ([]wire.Tag, error) {
			if tags := b.tags.Load(); tags != nil {
				return *tags, nil
			}
			return nil, errors.New("connection refused")
		},
		Peers: Peers{Root: os.Getuid(), Proxy: os.Getuid(), Killswitchd: os.Getuid(), Group: os.Getgid()},
		Audit: b.rec, Metrics: noMetrics{}, Log: slog.New(slog.DiscardHandler),
		Boottime: func() time.Duration { return time.Duration(b.now.Load()) },
	}
}

// start opens and serves credd; it waits until the gate is open unless killswitchd is silent.
func (b *box) start(change ...func(*Config)) *box {
	b.t.Helper()
	cfg := b.config()
	for _, fn := range change {
		fn(&cfg)
	}
	svc, err := Open(cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	sock, err := os.MkdirTemp("", "tcredd")
	if err != nil {
		b.t.Fatal(err)
	}
	b.path = filepath.Join(sock, "s")
	l, err := control.Listen(b.path, os.Getgid())
	if err != nil {
		b.t.Fatal(err)
	}
	mux := http.NewServeMux()
	svc.Routes(mux)
	serving, stopServing := context.WithCancel(context.Background())
	running, stopRunning := context.WithCancel(context.Background())
	var srv, run sync.WaitGroup
	srv.Go(func() { control.Serve(serving, l, mux, time.Second) }) // ends with the test
	run.Go(func() { svc.Run(running) })
	b.svc, b.client = svc, control.NewClient(b.path)
	b.stop = sync.OnceFunc(func() {
		b.client.CloseIdle()
		svc.EndStreams()
		stopServing()
		srv.Wait()
		stopRunning()
		run.Wait()
		os.RemoveAll(sock) // a temporary directory
	})
	b.t.Cleanup(b.stop)
	if b.tags.Load() != nil {
		b.wait("the gate to open", func() bool { return svc.Healthy() == nil })
	}
	return b
}

// wait polls until cond holds.
func (b *box) wait(what string, cond func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !cond() {
		if time.Now().After(deadline) {
			b.t.Fatalf("waited 10 s for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func (b *box) call(method, route string, in, out any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return b.client.Call(ctx, method, route, in, out)
}

func (b *box) put(name, value string, hosts ...string) {
	b.t.Helper()
	if err := b.call("PUT", "/v1/vault/"+name, wire.VaultEntry{Value: value, Hosts: hosts}, nil); err != nil {
		b.t.Fatal(err)
	}
}

func mintFor(kid string, mark uint32, secrets ...string) wire.MintRequest {
	req := wire.MintRequest{Kid: kid, Session: "01" + strings.ToUpper(kid), Card: "practice", Mark: mark}
	for _, name := range secrets {
		req.Secrets = append(req.Secrets, wire.MintSecret{Name: name})
	}
	return req
}

// mint returns the one token of the kid.
func (b *box) mint(kid string, mark uint32, secret string) string {
	b.t.Helper()
	var reply wire.MintReply
	if err := b.call("POST", "/v1/sessions", mintFor(kid, mark, secret), &reply); err != nil {
		b.t.Fatal(err)
	}
	return reply.Tokens[secret]
}

func (b *box) resolve(mark uint32, token, host string, port uint16) (wire.ResolveReply, error) {
	var reply wire.ResolveReply
	err := b.call("POST", "/v1/resolve", wire.ResolveRequest{Mark: mark, Token: token, Host: host, Port: port}, &reply)
	return reply, err
}

func (b *box) introspect(token string) wire.Introspection {
	b.t.Helper()
	c := formClient(b.path)
	defer c.CloseIdleConnections()
	out, err := introspect(c, token)
	if err != nil {
		b.t.Fatal(err)
	}
	return out
}

func formClient(path string) *http.Client {
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", path)
	}}}
}

func introspect(c *http.Client, token string) (wire.Introspection, error) {
	var out wire.Introspection
	resp, err := c.PostForm("http://credd/introspect", url.Values{"token": {token}})
	if err != nil {
		return out, err
	}
	defer resp.Body.Close() // read below
	raw, err := io.ReadAll(resp.Body)
	if err == nil {
		err = json.Unmarshal(raw, &out)
	}
	return out, err
}

// refusedWith fails unless err is a refusal with the code and status.
func refusedWith(t testing.TB, err error, status int, code reason.Code) {
	t.Helper()
	var e *control.Error
	if !errors.As(err, &e) || e.Problem.Reason != code || e.Problem.Status != status || e.Problem.Detail == "" {
		t.Errorf("got %v (%+v), want status %d with reason %s and a detail", err, e, status, code)
	}
}
