package bench

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

// AtLeast returns the metric of a figure that should be at least target.
func AtLeast(name string, value float64, unit string, target float64) Metric {
	return Metric{Metric: name, Value: value, Unit: unit, Target: target, Met: value >= target}
}

// times returns the metric of a figure that should be at least factor times a peer's in the same run. Without
// the peer's figure there is no target.
func times(name string, value float64, unit, peer string, theirs, factor float64, limits string) Metric {
	if theirs == 0 {
		m := AtLeast(name, value, unit, 0)
		m.Limits = peer + " was not measured"
		return m
	}
	m := AtLeast(fmt.Sprintf("%s, at least %.2g × %s", name, factor, peer), value, unit, factor*theirs).Beside(peer, theirs)
	if !m.Met {
		m.Limits = limits
	}
	return m
}

// atLeft is how much processor time a target leaves for what is between client and server, in microseconds for one
// piece of work: what this machine has, less what the work costs with nothing between them; 0 where that is more,
// as on a machine that others use too.
func atLeft(target, direct float64) float64 {
	all := float64(runtime.NumCPU()) * 1e6
	return max(all/target-all/direct, 0)
}

// others returns the figures of the peers, each beside base's.
func others(name, unit string, rs map[string][]loadResult, figure func(loadResult) float64, base string, except ...string) []Metric {
	var out []Metric
	skip := map[string]bool{base: true}
	for _, n := range except {
		skip[n] = true
	}
	for _, peer := range []string{wayExplicit, peerSplice, peerGoproxy, peerSmokescreen, peerSquid, peerTinyproxy} {
		if len(rs[peer]) > 0 && !skip[peer] {
			out = append(out, AtLeast(name+": "+peer, median(rs[peer], figure), unit, 0).Beside(base, median(rs[base], figure)))
		}
	}
	return out
}

// costs returns the processor time of Tagout's daemon for the work, beside each peer's.
func costs(name, unit string, rs map[string][]loadResult, figure func(loadResult) float64) []Metric {
	var out []Metric
	for _, peer := range []string{wayExplicit, peerSplice, peerGoproxy, peerSmokescreen, peerSquid, peerTinyproxy, peerBump, peerDnsmasq, peerCoredns} {
		if len(rs[peer]) > 0 {
			out = append(out, AtLeast("processor time for "+name, median(rs[wayTagout], figure), unit, 0).Beside(peer, median(rs[peer], figure)))
		}
	}
	return out
}

// throughput is one tunnel: a real ClientHello, then bytes that nobody encrypts.
func (e *egress) throughput(ctx context.Context) ([]Metric, error) {
	rs, err := e.compare(ctx, e.tunnels(), "pour")
	if err != nil {
		return nil, err
	}
	of := func(name string) float64 { return median(rs[name], loadResult.gigabytes) }
	const name, unit, limits = "one un-inspected tunnel", "GB/s", "the road: the kid's firewall and programs see every packet of the tunnel; a peer's client has none on its link"
	return append([]Metric{
		times(name, of(wayTagout), unit, peerSplice, of(peerSplice), 1, limits),
		times(name, of(wayTagout), unit, peerSmokescreen, of(peerSmokescreen), 1.4, limits),
		AtLeast(name, of(wayTagout), unit, 0).Beside(wayDirect, of(wayDirect)),
	}, slices.Concat(others(name, unit, rs, loadResult.gigabytes, wayDirect), costs("a gigabyte in a tunnel", "ms", rs, loadResult.costGB))...), nil
}

// openers is how many new tunnels are opened at a time.
const openers = 16

func (e *egress) openings(ctx context.Context) ([]Metric, error) {
	rs, err := e.compare(ctx, e.tunnels(), "open", "-workers", fmt.Sprint(openers))
	if err != nil {
		return nil, err
	}
	of := func(name string) float64 { return median(rs[name], loadResult.perSecond) }
	const name, unit = "new tunnels", "a second"
	limits := fmt.Sprintf("the processors: with the target they have %.0f µs for a tunnel besides its client and server; the splice relay, which checks and records nothing, takes %.0f µs and makes %.2f × smokescreen; Tagout takes %.0f µs",
		atLeft(2.5*of(peerSmokescreen), of(wayDirect)), median(rs[peerSplice], loadResult.cost), of(peerSplice)/of(peerSmokescreen), median(rs[wayTagout], loadResult.cost))
	return append([]Metric{
		times(name, of(wayTagout), unit, peerSmokescreen, of(peerSmokescreen), 2.5, limits),
		AtLeast(name, of(wayTagout), unit, 0).Beside(wayDirect, of(wayDirect)),
	}, slices.Concat(others(name, unit, rs, loadResult.perSecond, wayDirect), costs("a new tunnel", "µs", rs, loadResult.cost))...), nil
}

// Targets of the latency that the road adds, in microseconds.
const (
	addedP50 = 150
	addedP99 = 1000
)

// latency is what the road adds to a byte's way to the server and back, and to the opening of a tunnel.
func (e *egress) latency(ctx context.Context) ([]Metric, error) {
	var few []way
	for _, w := range e.tunnels() {
		switch w.name {
		case wayDirect, wayTagout, peerSplice, peerSmokescreen:
			few = append(few, w)
		}
	}
	var out []Metric
	for _, c := range []struct{ work, name, limits string }{
		{"ping", "added to a byte and its echo in an open tunnel", "two more wake-ups each way on processors that client, proxy and server share"},
		{"open", "added to a new tunnel until its first byte", "the upstream handshake begins when the ClientHello was judged, and the proxy is woken for the client and for the server's answer; the splice relay connects before it has read anything"},
	} {
		rs, err := e.compare(ctx, few, c.work)
		if err != nil {
			return nil, err
		}
		for _, p := range []struct {
			name   string
			figure func(loadResult) float64
			target float64
		}{
			{"p50", func(r loadResult) float64 { return r.P50 }, addedP50},
			{"p99", func(r loadResult) float64 { return r.P99 }, addedP99},
		} {
			m := AtMost(c.name+", "+p.name, added(rs[wayTagout], rs[wayDirect], p.figure), "µs", p.target)
			if !m.Met {
				m.Limits = fmt.Sprintf("%s; the splice relay adds %.0f µs", c.limits, added(rs[peerSplice], rs[wayDirect], p.figure))
			}
			peer := peerSmokescreen
			if len(rs[peer]) == 0 {
				peer = peerSplice
			}
			out = append(out, m.Beside(peer, added(rs[peer], rs[wayDirect], p.figure)))
		}
	}
	return out, nil
}

// inspection is HTTPS requests on connections that stay open.
func (e *egress) inspection(ctx context.Context) ([]Metric, error) {
	rs, err := e.compare(ctx, e.inspected(), "get", "-workers", fmt.Sprint(openers))
	if err != nil {
		return nil, err
	}
	of := func(name string) float64 { return median(rs[name], loadResult.perSecond) }
	const name, unit = "inspected HTTPS requests", "a second"
	limits := fmt.Sprintf("the processors: with the target they have %.0f µs for a request besides its client and server, for TLS twice, HTTP twice and two writes to sockets; squid takes %.0f µs, Tagout %.0f µs",
		atLeft(2*of(peerBump), of(wayDirect)), median(rs[peerBump], loadResult.cost), median(rs[wayTagout], loadResult.cost))
	return append([]Metric{
		times(name, of(wayTagout), unit, peerBump, of(peerBump), 2, limits),
		AtLeast(name, of(wayTagout), unit, 0).Beside(wayDirect, of(wayDirect)),
	}, costs("an inspected request", "µs", rs, loadResult.cost)...), nil
}

func (e *egress) dns(ctx context.Context) ([]Metric, error) {
	rs, err := e.compare(ctx, e.resolvers(), "dns", "-workers", "2", "-window", "64")
	if err != nil {
		return nil, err
	}
	of := func(name string) float64 { return median(rs[name], loadResult.perSecond) }
	const name, unit = "DNS answers", "a second"
	limits := dnsLimits(rs)
	return append([]Metric{
		times(name, of(wayTagout), unit, peerDnsmasq, of(peerDnsmasq), 0.9, limits),
		times(name, of(wayTagout), unit, peerCoredns, of(peerCoredns), 2.5, limits),
		AtLeast("refused DNS answers", of(wayRefused), unit, 0).Beside("allowed lookups", of(wayTagout)),
		AtLeast("processor time for a refused DNS answer", median(rs[wayRefused], loadResult.cost), "µs", 0).Beside("allowed lookups", median(rs[wayTagout], loadResult.cost)),
	}, costs("a DNS answer", "µs", rs, loadResult.cost)...), nil
}

// hook is what one run of the connect hook costs while tunnels are being opened, as the kernel counts it.
func (e *egress) hook(ctx context.Context) ([]Metric, error) {
	if e.Hook == nil {
		return nil, nil
	}
	meter, err := e.Hook()
	if err != nil {
		return nil, err
	}
	defer meter.Close()
	calls, spent, err := meter.Read()
	if err != nil {
		return nil, err
	}
	rs, err := e.compare(ctx, e.tunnels()[1:2], "open", "-workers", fmt.Sprint(openers))
	if err != nil {
		return nil, err
	}
	calls2, spent2, err := meter.Read()
	if err != nil {
		return nil, err
	}
	if calls2-calls < uint64(rs[wayTagout][0].Count) {
		return nil, fmt.Errorf("the hook ran %d times for %d connections", calls2-calls, rs[wayTagout][0].Count)
	}
	m := AtMost("connect hook", float64((spent2-spent).Nanoseconds())/float64(calls2-calls)/1e3, "µs", 1)
	if !m.Met {
		m.Limits = "map updates that note the process, with cold caches between two connections"
	}
	return []Metric{m}, nil
}

// idlePerKid keeps below what the proxy lets one kid open.
const idlePerKid = 1000

// idleTarget is what 10,000 idle tunnels may cost the proxy, in MB.
const (
	idleTunnels = 10000
	idleTarget  = 300
)

// idle is what the proxy has resident while tunnels stand that carried one byte and are still.
func (e *egress) idle(ctx context.Context) ([]Metric, error) {
	before, err := e.proxyMemory()
	if err != nil {
		return nil, err
	}
	alone, err := e.inKid(ctx, append([]string{"pour", "-for", e.During.String()}, e.tunnels()[1].args...)...)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	stand, why, holders, err := e.holdAll(ctx)
	if err != nil {
		return nil, err
	}
	with, err := e.proxyMemory()
	if err != nil {
		return nil, err
	}
	beside, pourErr := e.inKid(ctx, append([]string{"pour", "-for", e.During.String()}, e.tunnels()[1].args...)...)
	e.sink.hangUp()
	for _, h := range holders {
		<-h // the server has hung up: how the client ends says nothing
	}
	if pourErr != nil {
		return nil, fmt.Errorf("one tunnel beside the idle ones: %w", pourErr)
	}
	m := AtMost(fmt.Sprintf("memory of the proxy with %d idle tunnels", idleTunnels), before+(with-before)*idleTunnels/float64(stand), "MB", idleTarget)
	m = m.Beside("the proxy before", before)
	if stand < idleTunnels {
		m.Limits = fmt.Sprintf("worked out from %d tunnels", stand)
		if why != "" {
			m.Limits += ": " + why
		}
	} else if !m.Met {
		m.Limits = "goroutines and their stacks: two a tunnel"
	}
	return []Metric{m, AtLeast("one un-inspected tunnel beside the idle ones", beside.gigabytes(), "GB/s", 0).Beside("alone", alone.gigabytes())}, nil
}

// holdAll opens the idle tunnels, from as many kids as it takes, and stops early where one would not open.
func (e *egress) holdAll(ctx context.Context) (stand int64, why string, holders []chan error, err error) {
	want, limit := e.idleWanted()
	fmt.Fprintf(e.Out, "hold: %d tunnels\n", want)
	args := e.tunnels()[1].args
	for left := want; left > 0 && why == ""; left -= idlePerKid {
		kid, err := e.spawn(ctx, fmt.Sprintf("idle-%d", len(holders)))
		if err != nil {
			return 0, "", nil, err
		}
		ended, first := e.startInKid(ctx, kid, append([]string{"hold", "-count", fmt.Sprint(min(left, idlePerKid))}, args...)...)
		holders = append(holders, ended)
		select {
		case r := <-first:
			stand += r.Count
			why = r.Example
		case err := <-ended:
			return 0, "", nil, fmt.Errorf("holding tunnels: %w", err)
		}
	}
	if stand == 0 {
		return 0, "", nil, fmt.Errorf("no tunnel stands: %s", why)
	}
	if why == "" && want < e.Idle {
		why = fmt.Sprintf("a process may have %d files open here", limit)
	}
	return stand, why, holders, nil
}

// idleWanted is how many tunnels to hold: no more than the proxy's file descriptors allow, two each and some
// for itself. Daemons inherit the limit of this process.
func (e *egress) idleWanted() (want int, limit uint64) {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		return e.Idle, 0
	}
	const own = 200
	return min(e.Idle, int(min(r.Max, 1<<30)-own)/2), r.Max
}

// print writes the table and what the figures include.
func (e *egress) print(metrics []Metric) error {
	fmt.Fprintln(e.Out, egressNotes)
	return Print(e.Out, metrics)
}

// egressNotes say what was measured.
var egressNotes = fmt.Sprintf(`
What the figures include
  Tagout   the client is a command in a kid: its seccomp filter and limits, the connect hook and the packet programs on its
           cgroup, its veth pair with the packet programs, the firewall's DNAT, then %s or %s with every check, record and
           alert on; a name's upstream answer is kept for its TTL. "Explicit proxy" is CONNECT, everything else needs no proxy setting.
  peers    the client runs in a network namespace of its own behind a plain veth pair: no filter, program, rule or limit.
           Peers listen at the host's end of it; those that can resolve the name at the same name server.
  both     the same client, the same server behind the same veth pair to the practice internet, in the same run, interleaved;
           medians of the rounds. Processor time is that of the proxy or resolver alone. Tunnels carry a real ClientHello and then bytes without encryption.
`, instance.Proxy, instance.DNSFilter)
