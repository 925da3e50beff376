// Command dnsfilter is the only resolver that the kids of one Tagout instance can reach.
package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"runtime"

	"tagout/bpf"
	"tagout/dnsfilter"
	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/metrics"
	"tagout/internal/session"
)

func main() { daemon.Main(instance.DNSFilter, run) }

func run(ctx context.Context, d *daemon.Daemon) error {
	maps, err := bpf.Open(d.Inst.PinDir())
	if err != nil {
		return fmt.Errorf("opening the BPF maps, which name the process behind each query: %w", err)
	}
	defer maps.Close() // only file descriptors
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	rate, burst := queryLimit(d.Box.KidLimits.Queries)
	filter, err := dnsfilter.New(ctx, dnsfilter.Config{
		Listen:    netip.AddrPortFrom(d.Inst.Gateway(), instance.PortDNS),
		Virtual:   d.Inst.VirtualNet(),
		StateDir:  d.Inst.DNSStateDir(),
		Load:      session.NewStore(d.Inst.SessionDir()).Load,
		Check:     func(s *session.Session) error { return belongs(d.Inst, s) },
		Processes: maps, Audit: d.Audit, Metrics: metrics.NewDNSFilter(d.Metrics), Log: d.Log,
		Sandboxd: d.Inst.UID(instance.Sandboxd), Proxy: d.Inst.UID(instance.Proxy),
		Sockets: runtime.GOMAXPROCS(0), Rate: rate, Burst: burst,
	})
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	filter.Routes(mux)
	done := make(chan error, 1)
	go func() {
		err := filter.Run(ctx)
		cancel(err) // without its sockets the daemon must not look alive
		done <- err
	}()
	err = d.Serve(ctx, mux, func() error { return context.Cause(ctx) })
	cancel(nil)
	return errors.Join(err, <-done)
}

// queryLimit is how many queries a second one kid may send, and how many at once; 0 asks for the default.
func queryLimit(perSecond int) (rate, burst float64) {
	if perSecond == 0 {
		return dnsfilter.DefaultRate, dnsfilter.DefaultBurst
	}
	return float64(perSecond), 2 * float64(perSecond)
}

// belongs says whether the session is one of the instance's: its mark, and the addresses of its index.
func belongs(inst instance.Instance, s *session.Session) error {
	if !inst.OwnsMark(s.Mark) || s.Mark == inst.BoxMark() {
		return fmt.Errorf("session %s: mark %#x is not one of instance %s's", s.ID, s.Mark, inst.Name())
	}
	if s.Index < 1 || s.Index > instance.MaxKids {
		return fmt.Errorf("session %s: index %d is outside 1-%d", s.ID, s.Index, instance.MaxKids)
	}
	if host, kid := inst.KidAddrs(s.Index); host != s.HostAddr || kid != s.Addr {
		return fmt.Errorf("session %s: index %d has the addresses %s and %s, not %s and %s", s.ID, s.Index, host, kid, s.HostAddr, s.Addr)
	}
	return nil
}
