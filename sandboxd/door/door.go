// Package door serves the API over TCP to those whom it knows: by an API key or by a client certificate. It promises
// that nobody else reaches a handler, that each call and each refusal is recorded with who asked, and that whoever
// asks too much, too slowly or with too many bytes is turned away before anything is done for them.
package door

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"time"

	"golang.org/x/net/netutil"

	"tagout/internal/apikey"
	"tagout/internal/control"
	"tagout/internal/tally"
	"tagout/sandboxd/api"
)

// Bounds of what strangers can take up.
const (
	maxConnections = 256
	maxHeader      = 16 << 10
	headLimit      = 5 * time.Second // for the TLS handshake, and for a request's head
	idleLimit      = time.Minute
	grace          = 2 * time.Second
	refusedLines   = 5 // refusals recorded one by one, each second and address
)

// Config is what a door needs. Without a certificate Listen is a loopback address.
type Config struct {
	Listen      netip.AddrPort
	Certificate string // PEM files; both or none
	Key         string
	ClientCA    string // PEM file; empty: certificates of clients do not count
	Clients     []Client
	Keys        *apikey.Book
	Handler     http.Handler // for callers who are known
	Audit       tally.Recorder
	Log         *slog.Logger
}

// Client gives roles to whoever has a certificate for a name.
type Client struct {
	Name  string
	Roles []apikey.Role
}

// Door is a listener that is open.
type Door struct {
	cfg      Config
	listener net.Listener
	refused  *tally.Tally
	known    *limiter // calls of known callers
	strange  *limiter // refusals, by address
}

// Open listens. Nothing is accepted before Run.
func Open(ctx context.Context, cfg Config) (*Door, error) {
	fail := func(err error) (*Door, error) {
		return nil, fmt.Errorf("serving the API on %s: change api in the box's configuration: %w", cfg.Listen, err)
	}
	if cfg.Certificate == "" && !cfg.Listen.Addr().IsLoopback() {
		return fail(errors.New("without a certificate only a loopback address is served"))
	}
	var security *tls.Config
	if cfg.Certificate != "" {
		var err error
		if security, err = cfg.tls(); err != nil {
			return fail(err)
		}
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", cfg.Listen.String())
	if err != nil {
		return fail(err)
	}
	l = netutil.LimitListener(l, maxConnections)
	if security != nil {
		l = tls.NewListener(l, security)
	}
	return &Door{cfg: cfg, listener: l, refused: tally.New(cfg.Audit, refusedLines), known: newLimiter(50, 100), strange: newLimiter(1, 20)}, nil
}

// Addr is where it listens.
func (d *Door) Addr() net.Addr { return d.listener.Addr() }

func (c Config) tls() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(c.Certificate, c.Key)
	if err != nil {
		return nil, err
	}
	out := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS13, NextProtos: []string{"http/1.1"}}
	if c.ClientCA == "" {
		return out, nil
	}
	raw, err := os.ReadFile(c.ClientCA)
	if err != nil {
		return nil, err
	}
	out.ClientCAs = x509.NewCertPool()
	if !out.ClientCAs.AppendCertsFromPEM(raw) {
		return nil, fmt.Errorf("%s holds no certificate", c.ClientCA)
	}
	out.ClientAuth = tls.VerifyClientCertIfGiven // who gives none needs a key
	return out, nil
}

// Run serves until ctx ends. Any other end is an error.
func (d *Door) Run(ctx context.Context) error {
	srv := &http.Server{
		Handler: control.Bounded(http.HandlerFunc(d.admit)), ReadHeaderTimeout: headLimit, IdleTimeout: idleLimit, MaxHeaderBytes: maxHeader,
		ErrorLog: log.New(quiet{d.cfg.Log}, "", 0),
	}
	flushed := make(chan struct{})
	go func() {
		d.refused.Run(ctx, tally.Window)
		close(flushed)
	}()
	done := make(chan error, 1)
	go func() { done <- srv.Serve(d.listener) }()
	select {
	case err := <-done:
		return fmt.Errorf("serving the API on %s: %w", d.cfg.Listen, err)
	case <-ctx.Done():
	}
	stop, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	err := srv.Shutdown(stop)
	if err != nil {
		err = srv.Close() // whoever still streams is cut off
	}
	<-flushed
	return err
}

// quiet keeps what strangers can provoke, such as broken handshakes, at the level of debugging.
type quiet struct{ log *slog.Logger }

func (q quiet) Write(p []byte) (int, error) {
	q.log.Debug("serving the API over TCP", "detail", string(p))
	return len(p), nil
}

// record notes one call.
func (d *Door) record(actor string, r *http.Request, call *api.Call, status int, took time.Duration) {
	d.cfg.Audit.Log(call.Record(actor, r, status, took))
}

func short(s string) string {
	const most = 256
	return s[:min(len(s), most)]
}
