package proxy

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Names knows the virtual addresses that were given to names matching a wildcard.
type Names interface {
	// Name returns the canonical name for which addr stands in the session with the given mark. Any error
	// means that the address is unknown.
	Name(ctx context.Context, mark uint32, addr netip.Addr) (string, error)
	// Claim counts a name among the session's wildcard names, of which there may only be so many. A refusal is
	// a *control.Error that carries the reason; any other error means that dnsfilter does not answer.
	Claim(ctx context.Context, mark uint32, name string) error
}

// Tokens swaps a session's token for the secret behind it.
type Tokens interface {
	// Resolve is asked anew for every use. A refusal is a *control.Error that carries the reason; any other
	// error means that credd does not answer.
	Resolve(ctx context.Context, req wire.ResolveRequest) (wire.ResolveReply, error)
}

// Processes knows which process of a kid opened a connection.
type Processes interface {
	Process(kid netip.AddrPort, proto uint8) (audit.Process, bool)
}

// Recorder takes audit records. It must not block.
type Recorder interface {
	Log(r audit.Record)
}

// Metrics is what the proxy counts.
type Metrics interface {
	Active(via string, delta int)
	Connection(via, outcome string, code reason.Code)
	Request(outcome string, code reason.Code)
	Bytes(up, down int64)
	Dialed(took time.Duration, ok bool)
	AcceptFailed()
}

// Config is what a Proxy needs. Fields are required unless their comment says otherwise.
type Config struct {
	Gateway  netip.Addr        // the address that both listeners are bound to
	Virtual  netip.Prefix      // the addresses that stand for names
	OwnsMark func(uint32) bool // nil: any mark but 0
	Names    Names
	Tokens   Tokens
	// Revocations tells what is revoked; see RevocationsOver. nil: nobody does, and nothing is cut for it.
	Revocations func(ctx context.Context, fn func(wire.Revoked)) error
	Processes   Processes // nil: records lack the process
	Audit       Recorder
	Metrics     Metrics
	Log         *slog.Logger
	CA          *CA
	Resolvers   []netip.AddrPort // none: every name fails to resolve
	Roots       *x509.CertPool   // what upstream certificates are checked against; nil: the system's
	Limits      Limits           // zero fields get defaults

	// Grantor returns the flag of `tagout grant` that says who grants something here, for refusals; nil: the usual one.
	Grantor func() string
	// OriginalDst returns where a connection was going before the firewall sent it here; nil: SO_ORIGINAL_DST.
	OriginalDst func(net.Conn) (netip.AddrPort, error)
	// Mark marks a socket before it is connected; nil: SO_MARK, which needs CAP_NET_RAW or CAP_NET_ADMIN.
	Mark func(fd uintptr, mark uint32) error
}

// Limits bound what one session, one connection and one wait may take.
type Limits struct {
	ConnsPerSession   int   // at once; default 1024
	NewConnsPerSecond int   // of one session, on average; twice as many at once; default 500
	BufferPerSession  int64 // bytes that the proxy keeps for a session's connections; default 128 MiB

	Hello     time.Duration // from accept to a whole ClientHello or HTTP head; default 10s
	Names     time.Duration // for dnsfilter's answer; default 250ms
	Tokens    time.Duration // for credd's answer; default 500ms
	Resolve   time.Duration // for the upstream resolvers, all of them; default 5s
	Connect   time.Duration // for all addresses of one name; default 10s
	KeepAlive time.Duration // between two requests of one connection; default 2m
	Idle      time.Duration // without a byte in either direction; default 30m
	Answer    time.Duration // for a TLS server's first bytes; default 30s
	Progress  time.Duration // between two records of a long connection; default 1m
}

func (l *Limits) fill() {
	if l.ConnsPerSession == 0 {
		l.ConnsPerSession = 1024
	}
	if l.NewConnsPerSecond == 0 {
		l.NewConnsPerSecond = 500
	}
	if l.BufferPerSession == 0 {
		l.BufferPerSession = 128 << 20
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&l.Hello, 10 * time.Second}, {&l.Names, 250 * time.Millisecond}, {&l.Tokens, 500 * time.Millisecond},
		{&l.Resolve, 5 * time.Second}, {&l.Connect, 10 * time.Second}, {&l.KeepAlive, 2 * time.Minute},
		{&l.Idle, 30 * time.Minute}, {&l.Progress, time.Minute}, {&l.Answer, 30 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
}

func (c *Config) check() error {
	switch {
	case !c.Gateway.Is4():
		return errors.New("no gateway address")
	case !c.Virtual.IsValid():
		return errors.New("no virtual network")
	case c.Names == nil || c.Tokens == nil || c.Audit == nil || c.Metrics == nil || c.Log == nil:
		return errors.New("names, tokens, audit, metrics and log must be set")
	case c.CA == nil:
		return errors.New("no inspection CA: run `tagout setup`")
	}
	if c.OwnsMark == nil {
		c.OwnsMark = func(mark uint32) bool { return mark != 0 }
	}
	if c.OriginalDst == nil {
		c.OriginalDst = originalDst
	}
	if c.Mark == nil {
		if err := probeMark(); err != nil {
			return fmt.Errorf("marking sockets: the proxy needs CAP_NET_RAW (Linux 5.17 or newer) or CAP_NET_ADMIN: %w", err)
		}
		c.Mark = setMark
	}
	c.Limits.fill()
	return nil
}
