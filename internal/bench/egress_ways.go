package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// loadResult is what the load command printed; see its Result.
type loadResult struct {
	Count   int64   `json:"count"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
	Errors  int64   `json:"errors"`
	Example string  `json:"example"`
	P50     float64 `json:"p50_us"`
	P99     float64 `json:"p99_us"`
	CPU     float64 `json:"cpu_us"` // of the load command

	cpu time.Duration // that the program under test used meanwhile
}

func (r loadResult) perSecond() float64 { return float64(r.Count) / r.Seconds }

// cost is the processor time of the program under test for one piece of work, in microseconds; costGB that for a
// gigabyte, in milliseconds. Unlike rates they hardly depend on what else the machine does.
func (r loadResult) cost() float64 { return float64(r.cpu.Nanoseconds()) / 1e3 / float64(r.Count) }
func (r loadResult) costGB() float64 {
	return float64(r.cpu.Nanoseconds()) / 1e6 / (float64(r.Bytes) / 1e9)
}

func (r loadResult) gigabytes() float64 { return float64(r.Bytes) / r.Seconds / 1e9 }

// check fails where too much went wrong for the figure to mean anything.
func (r loadResult) check() error {
	if r.Count == 0 || r.Errors*50 > r.Count {
		return fmt.Errorf("%d times done, %d times failed: %s", r.Count, r.Errors, r.Example)
	}
	return nil
}

// way is one road to a server: through Tagout, through a peer, or straight.
type way struct {
	name string
	run  func(ctx context.Context, argv ...string) (loadResult, error)
	args []string              // of the load command: where to connect to
	must bool                  // without its figure there is nothing to say
	pids func() ([]int, error) // of the program under test; nil: there is none
}

// Names of the ways that are no peer's.
const (
	wayDirect   = "no proxy"
	wayTagout   = "Tagout"
	wayExplicit = "Tagout, explicit proxy"
	wayRefused  = "Tagout, refusing"
)

// nameBulk is the name of the sink, on the card as un-inspected TLS.
const nameBulk = "bulk.vendor.test"

// nameOffCard is on no card.
const nameOffCard = "bulk.evil.test"

// tunnels lists the ways to the sink. Peers that can are told its name and resolve it at the practice
// internet's name server, as Tagout does for each connection; the others are told its address.
func (e *egress) tunnels() []way {
	name, addr := nameBulk+":443", e.sink.at.String()
	sni := []string{"-sni", nameBulk}
	ways := []way{
		{wayDirect, e.inPlace, append(sni, "-to", addr), true, nil},
		{wayTagout, e.inKid, append(sni, "-to", name), true, e.daemon(instance.Proxy)},
		{wayExplicit, e.inKid, append(sni, "-to", netip.AddrPortFrom(e.Inst.Gateway(), instance.PortExplicit).String(), "-connect", name), true, e.daemon(instance.Proxy)},
	}
	for _, p := range []struct{ name, connect string }{
		{peerSplice, ""}, {peerGoproxy, addr}, {peerSmokescreen, name}, {peerSquid, name}, {peerTinyproxy, addr},
	} {
		if at, ok := e.peers.at[p.name]; ok {
			args := append(sni[:2:2], "-to", at.String())
			if p.connect != "" {
				args = append(args, "-connect", p.connect)
			}
			ways = append(ways, way{p.name, e.inPlace, args, false, e.peers.of(p.name)})
		}
	}
	return ways
}

// inspected lists the ways to the vendor API on which somebody reads the requests, and the straight one.
func (e *egress) inspected() []way {
	name, addr := practice.NameAPI+":443", netip.AddrPortFrom(e.Internet.APIAddr(), 443).String()
	sni := []string{"-sni", practice.NameAPI}
	ways := []way{
		{wayDirect, e.inPlace, append(sni, "-to", addr, "-ca", e.Internet.CAFile()), true, nil},
		{wayTagout, e.inKid, append(sni, "-to", name), true, e.daemon(instance.Proxy)},
	}
	if at, ok := e.peers.at[peerBump]; ok {
		ways = append(ways, way{peerBump, e.inPlace, append(sni, "-to", at.String(), "-connect", name, "-ca", e.peers.caFile()), false, e.peers.of(peerBump)})
	}
	return ways
}

func (e *egress) resolvers() []way {
	sni := []string{"-sni", nameBulk}
	gateway := netip.AddrPortFrom(e.Inst.Gateway(), instance.PortDNS).String()
	ways := []way{
		{wayTagout, e.inKid, append(sni[:2:2], "-to", gateway), true, e.daemon(instance.DNSFilter)},
		{wayRefused, e.inKid, []string{"-sni", nameOffCard, "-refused", "-to", gateway}, true, e.daemon(instance.DNSFilter)},
	}
	for _, name := range []string{peerDnsmasq, peerCoredns} {
		if at, ok := e.peers.at[name]; ok {
			ways = append(ways, way{name, e.inPlace, append(sni, "-to", at.String()), false, e.peers.of(name)})
		}
	}
	return ways
}

// inKid runs the load command in the kid.
func (e *egress) inKid(ctx context.Context, argv ...string) (loadResult, error) {
	ended, first := e.startInKid(ctx, e.kid, argv...)
	if err := <-ended; err != nil {
		return loadResult{}, err
	}
	select {
	case r := <-first:
		return r, nil
	default:
		return loadResult{}, errors.New("the load command printed nothing")
	}
}

// startInKid starts the load command in a kid. first gets what it printed, ended how it ended.
func (e *egress) startInKid(ctx context.Context, kid string, argv ...string) (ended chan error, first chan loadResult) {
	ended, first = make(chan error, 1), make(chan loadResult, 1)
	go func() {
		var out, said bytes.Buffer
		exit := -1
		err := e.box.Exec(ctx, kid, wire.ExecRequest{Argv: append([]string{"/workspace/load"}, argv...)}, func(f wire.ExecFrame) {
			out.Write(f.Stdout)
			said.Write(f.Stderr)
			if f.Exit != nil {
				exit = f.Exit.Code
			}
			var r loadResult
			if bytes.HasSuffix(out.Bytes(), []byte("\n")) && json.Unmarshal(out.Bytes(), &r) == nil {
				out.Reset()
				first <- r
			}
		})
		if err == nil && exit != 0 {
			err = fmt.Errorf("load %s in the kid ended with %d: %s", strings.Join(argv, " "), exit, said.Bytes())
		}
		ended <- err
	}()
	return ended, first
}

// inPlace runs the load command beside the kid, without any limit on it.
func (e *egress) inPlace(ctx context.Context, argv ...string) (loadResult, error) {
	var out, said bytes.Buffer
	cmd := exec.CommandContext(ctx, filepath.Join(e.Peers, "load"), argv...)
	cmd.Stdout, cmd.Stderr = &out, &said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: unix.SIGKILL, UseCgroupFD: true, CgroupFD: int(e.peers.fd.Fd())}
	err := e.place.inside.do(func() error {
		if err := cmd.Start(); err != nil {
			return err
		}
		return cgroup.Join(e.peers.clients, cmd.Process.Pid)
	})
	if err != nil {
		return loadResult{}, err
	}
	if err := cmd.Wait(); err != nil {
		return loadResult{}, fmt.Errorf("load %s: %w: %s", strings.Join(argv, " "), err, said.Bytes())
	}
	var r loadResult
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		return r, fmt.Errorf("reading what load printed: %w", err)
	}
	return r, nil
}

// compare does the same work on all ways, one after the other, as often as there are rounds. A peer that
// fails is left out from then on.
func (e *egress) compare(ctx context.Context, ways []way, work string, args ...string) (map[string][]loadResult, error) {
	fmt.Fprintf(e.Out, "%s: %d ways, %d rounds\n", work, len(ways), e.Rounds)
	results := map[string][]loadResult{}
	failed := map[string]bool{}
	for range e.Rounds {
		for _, w := range ways {
			if failed[w.name] {
				continue
			}
			one, cancel := context.WithTimeout(ctx, e.During+30*time.Second)
			r, err := w.measure(one, slices.Concat([]string{work}, w.args, args, []string{"-for", e.During.String()})...)
			cancel()
			if err == nil {
				err = r.check()
			}
			if err == nil {
				results[w.name] = append(results[w.name], r)
				continue
			}
			if w.must {
				return nil, fmt.Errorf("%s through %s: %w", work, w.name, err)
			}
			fmt.Fprintf(e.Out, "%s is left out of %s: %v\n", w.name, work, err)
			failed[w.name] = true
			delete(results, w.name)
		}
	}
	return results, nil
}

// measure runs the load command, and notes what the program under test used meanwhile.
func (w way) measure(ctx context.Context, argv ...string) (loadResult, error) {
	if w.pids == nil {
		return w.run(ctx, argv...)
	}
	before, err := used(w.pids)
	if err != nil {
		return loadResult{}, err
	}
	r, err := w.run(ctx, argv...)
	if err != nil {
		return r, err
	}
	after, err := used(w.pids)
	r.cpu = after - before
	return r, err
}

// daemon returns how to find the processes of one of the instance's daemons.
func (e *egress) daemon(name string) func() ([]int, error) {
	return func() ([]int, error) { return cgroup.Procs(e.layout.V2(e.Inst.DaemonCgroupRel(name))) }
}

// tick is the unit of times in /proc/PID/stat: USER_HZ, 100 on every architecture that Linux has for us.
const tick = 10 * time.Millisecond

// used is the processor time that processes have used, threads that have ended included.
func used(pids func() ([]int, error)) (time.Duration, error) {
	all, err := pids()
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, pid := range all {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			return 0, fmt.Errorf("reading the processor time of a process: %w", err)
		}
		// Behind the name, which may hold anything: state, ten more, utime, stime (proc(5)).
		var user, system int64
		rest := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
		if _, err := fmt.Sscan(strings.Join(rest[11:13], " "), &user, &system); err != nil {
			return 0, fmt.Errorf("reading the processor time of process %d: %w", pid, err)
		}
		sum += time.Duration(user+system) * tick
	}
	return sum, nil
}

// median of the rounds; 0 where there are none.
func median(rs []loadResult, figure func(loadResult) float64) float64 {
	var all []float64
	for _, r := range rs {
		all = append(all, figure(r))
	}
	return middle(all)
}

func middle(all []float64) float64 {
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}

// added is the median over the rounds of how much more a figure is than in the same round of base.
func added(rs, base []loadResult, figure func(loadResult) float64) float64 {
	var all []float64
	for i := range min(len(rs), len(base)) {
		all = append(all, figure(rs[i])-figure(base[i]))
	}
	return middle(all)
}

// resident is the memory of processes, in MB.
func resident(pids ...int) (float64, error) {
	total := 0
	for _, pid := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		if err != nil {
			return 0, fmt.Errorf("reading the memory of a process: %w", err)
		}
		_, rest, ok := strings.Cut(string(raw), "VmRSS:")
		var kib int
		if _, err := fmt.Sscan(rest, &kib); !ok || err != nil {
			return 0, fmt.Errorf("reading the memory of process %d: no VmRSS", pid)
		}
		total += kib
	}
	return float64(total) / 1000 * 1.024, nil
}
