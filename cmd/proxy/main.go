// Command proxy is the only road out of one Tagout instance's kids.
package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/leaks"
	"tagout/internal/metrics"
	"tagout/internal/session"
	"tagout/proxy"
)

func main() {
	if err := overwriteGarbage(); err != nil {
		fmt.Fprintln(os.Stderr, "proxy:", err)
		os.Exit(1)
	}
	daemon.Main(instance.Proxy, run)
}

// overwriteGarbage makes the garbage collector overwrite what it frees, secrets among it (invariant 3). The runtime reads
// the setting once: where it is not there, the process starts itself again.
func overwriteGarbage() error {
	settings := os.Getenv("GODEBUG")
	if slices.Contains(strings.Split(settings, ","), instance.Forgetful) {
		return nil
	}
	path, err := os.Executable()
	if err == nil {
		if settings != "" {
			settings += ","
		}
		err = syscall.Exec(path, os.Args, append(os.Environ(), "GODEBUG="+settings+instance.Forgetful))
	}
	return fmt.Errorf("starting again with GODEBUG=%s: %w", instance.Forgetful, err)
}

// heapFloor is memory that is never touched, and thus never resident. It keeps the garbage collector from running
// many times a second in a process that has next to nothing on its heap: it begins with as much garbage again.
const heapFloor = 32 << 20

func run(ctx context.Context, d *daemon.Daemon) error {
	floor := make([]byte, heapFloor)
	defer runtime.KeepAlive(floor)
	// Secrets pass through this process: no core dump, no ptrace by its own user (invariant 3).
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("turning core dumps off: %w", err)
	}
	log.SetOutput(io.Discard) // net/http quotes there what servers send unasked, secrets among it
	roots, err := upstreamRoots(d.Box.UpstreamCAs)
	if err != nil {
		return err
	}
	d.Audit.SetScan(leaks.NewRedactor(audit.Redacted).Text)
	ca, err := proxy.LoadCA(d.Inst.CADir(), os.Getenv("CREDENTIALS_DIRECTORY"))
	if err != nil {
		return err
	}
	processes, degraded := openProcesses(d)
	people := authority.NewBook(d.Inst.AuthorityFile(), 0)
	p, err := proxy.New(proxy.Config{
		Gateway: d.Inst.Gateway(), Virtual: d.Inst.VirtualNet(),
		OwnsMark: func(mark uint32) bool { return d.Inst.OwnsMark(mark) && mark != d.Inst.BoxMark() },
		Names:    proxy.NamesOver(control.NewClient(d.Inst.Socket(instance.DNSFilter))),
		Tokens:   proxy.TokensOver(control.NewForgetfulClient(d.Inst.Socket(instance.Credd))),

		Revocations: proxy.RevocationsOver(control.NewClient(d.Inst.Socket(instance.Credd))),

		Processes: processes, Audit: d.Audit, Metrics: metrics.NewProxy(d.Metrics), Log: d.Log,
		Grantor: func() string { return people.GrantorFlag(time.Now()) },
		CA:      ca, Resolvers: d.Box.Resolvers, Roots: roots,
		Limits: proxy.Limits{
			ConnsPerSession: d.Box.KidLimits.Connections, NewConnsPerSecond: d.Box.KidLimits.OpensPerSecond(),
			BufferPerSession: int64(d.Box.KidLimits.Buffered),
		},
	})
	if err != nil {
		return err
	}
	if err := p.Load(session.NewStore(d.Inst.SessionDir())); err != nil {
		d.Log.Error("some sessions stay denied", "error", err)
	}
	return serve(ctx, d, p, degraded)
}

// serve runs the listeners and the control socket until ctx ends or one of them fails.
func serve(ctx context.Context, d *daemon.Daemon, p *proxy.Proxy, degraded error) error {
	explicit, err := proxy.Listen(ctx, netip.AddrPortFrom(d.Inst.Gateway(), instance.PortExplicit))
	if err != nil {
		return err
	}
	transparent, err := proxy.Listen(ctx, netip.AddrPortFrom(d.Inst.Gateway(), instance.PortTransparent))
	if err != nil {
		explicit.Close() // already failing
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- p.Serve(ctx, explicit, transparent); stop() }()
	mux := http.NewServeMux()
	p.Routes(mux)
	err = d.Serve(ctx, mux, func() error { return degraded })
	stop()
	return errors.Join(err, <-ended)
}

// openProcesses opens the BPF maps that say which process opened a connection. Without them the proxy refuses
// as much as before, but its records lack the process, and its health says so.
func openProcesses(d *daemon.Daemon) (proxy.Processes, error) {
	maps, err := bpf.Open(d.Inst.PinDir())
	if err != nil {
		err = fmt.Errorf("degraded: records lack the process: %w", err)
		d.Log.Error("opening the BPF maps", "error", err)
		return nil, err
	}
	return maps, nil
}

// upstreamRoots returns the system's authorities with those of the box's configuration added.
func upstreamRoots(files []string) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, fmt.Errorf("reading the system's certificate authorities: %w", err)
	}
	for _, file := range files {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading upstreamCAs of the box's configuration: %w", err)
		}
		if !pool.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("reading upstreamCAs of the box's configuration: %s holds no PEM certificate", file)
		}
	}
	return pool, nil
}
