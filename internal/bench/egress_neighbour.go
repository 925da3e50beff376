package bench

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"time"

	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// EgressNeighbour names the part that RunNeighbour measures.
const EgressNeighbour = "neighbour"

// neighbourTarget is how many times as long the slowest hundredth of a quiet kid's requests may take while another
// kid asks for all that it can.
const neighbourTarget = 2

// How the noisy kid is noisy: nearly as many tunnels as one kid may hold, and new ones as fast as they are served or
// refused. It may open 500 a second.
const (
	noiseHeld    = 900
	noiseWorkers = 16
)

// noisyCard has the limits of an ordinary job: one processor.
var noisyCard = strings.Replace(egressCard, "cpus: 4", "cpus: 1", 1)

// quietPace is the pause between two requests of the quiet kid, which stays below its own caps.
const quietPace = 3 * time.Millisecond

// RunNeighbour measures how much longer a quiet kid's requests take while another kid is at its caps, and writes
// neighbour.json. The box must stand at its default limits for a kid: they are what is measured. Peers, Idle, Only
// and Hook but for the load command are not used. An error means that something could not be measured, or that a
// request of the quiet kid failed; a missed target is no error.
func RunNeighbour(ctx context.Context, c EgressConfig) (metrics []Metric, err error) {
	e := &egress{EgressConfig: c, box: drill.Sockets(c.Inst, c.Internet)}
	if e.Peers, err = filepath.Abs(e.Peers); err != nil {
		return nil, err
	}
	if !isFile(filepath.Join(e.Peers, "load")) {
		return nil, fmt.Errorf("the load command is not in %s: run `make bench-egress`", e.Peers)
	}
	if e.sink, err = newSink(e.Internet, netip.AddrPortFrom(e.Internet.TicksAddr(), portBulk)); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, e.sink.close()) }()
	e.Internet.DNS.SetHost(nameBulk, e.sink.at.Addr())
	if e.kid, err = e.spawn(ctx, "quiet"); err != nil {
		return nil, err
	}
	noisy, err := e.box.Spawn(ctx, wire.SpawnRequest{Name: "noisy", Purpose: "be a bad neighbour", Card: noisyCard, InputDir: e.Peers})
	if err != nil {
		return nil, err
	}
	for _, w := range []struct {
		name string
		work []string
	}{
		{"an inspected request", []string{"get", "-sni", practice.NameAPI, "-to", practice.NameAPI + ":443"}},
		{"a new tunnel", []string{"open", "-sni", nameBulk, "-to", nameBulk + ":443"}},
	} {
		ms, err := e.neighbour(ctx, noisy.Name, w.name, w.work)
		if err != nil {
			return nil, fmt.Errorf("measuring %s beside a noisy kid: %w", w.name, err)
		}
		metrics = append(metrics, ms...)
	}
	if err := Write(c.Dir, "neighbour", metrics); err != nil {
		return nil, err
	}
	fmt.Fprintln(e.Out, neighbourNotes)
	return metrics, Print(e.Out, metrics)
}

var neighbourNotes = fmt.Sprintf(`
A quiet kid beside one at its caps
  A quiet kid asks every %v, alone and beside a noisy kid, in turns; the medians of the rounds count, and of the ratios. The noisy kid holds
  %d tunnels and opens more with %d workers, as fast as %s serves or refuses them. All limits are the defaults. Client, server
  and daemons share the processors: the noisy kid's own share is bounded by its card (one processor), what it costs the daemons by the caps.
  A spinning kid calls connect as often as it can and is refused by the call: no daemon ever hears of it.
`, quietPace, noiseHeld, noiseWorkers, instance.Proxy)

// neighbour measures one kind of work alone and beside the noise, in turns.
func (e *egress) neighbour(ctx context.Context, noisy, name string, work []string) ([]Metric, error) {
	fmt.Fprintf(e.Out, "%s of a quiet kid: alone and beside a noisy one, %d rounds\n", name, e.Rounds)
	args := append(work[:len(work):len(work)], "-workers", "1", "-pace", quietPace.String(), "-for", e.During.String())
	var alone, beside, noise, spinning []loadResult
	for range e.Rounds {
		r, err := e.faultless(ctx, args)
		if err != nil {
			return nil, err
		}
		alone = append(alone, r)
		work := func() (err error) {
			r, err = e.faultless(ctx, args)
			return err
		}
		n, err := e.amidNoise(ctx, noisy, portBulk, work)
		if err != nil {
			return nil, err
		}
		beside, noise = append(beside, r), append(noise, n)
		if _, err := e.amidNoise(ctx, noisy, portRefused, work); err != nil {
			return nil, err
		}
		spinning = append(spinning, r)
	}
	p50, p99 := func(r loadResult) float64 { return r.P50 }, func(r loadResult) float64 { return r.P99 }
	var ratios, refusals []float64
	for i := range alone {
		ratios = append(ratios, beside[i].P99/alone[i].P99)
		refusals = append(refusals, float64(noise[i].Errors))
	}
	m := AtMost("p99 of "+name+" beside a kid at its caps, as a multiple of alone", middle(ratios), "×", neighbourTarget)
	if middle(refusals) == 0 {
		m.Met, m.Limits = false, "nothing that was measured: the machine was too busy for the noisy kid to reach its caps"
	} else if !m.Met {
		m.Limits = fmt.Sprintf("the scheduler: beside a spinning kid it is %.3g ×; served %.0f, refused %.0f times a second",
			median(spinning, p99)/median(alone, p99),
			median(noise, loadResult.perSecond), median(noise, func(r loadResult) float64 { return float64(r.Errors) / r.Seconds }))
	}
	return []Metric{
		m,
		AtMost(name+" beside a kid at its caps, p99", median(beside, p99), "µs", 0).Beside("alone", median(alone, p99)),
		AtMost("the same", median(beside, p99), "µs", 0).Beside("beside a spinning kid", median(spinning, p99)),
		AtMost(name+" beside a kid at its caps, p50", median(beside, p50), "µs", 0).Beside("alone", median(alone, p50)),
	}, nil
}

// faultless runs the load command in the quiet kid. All that it asks for must be served.
func (e *egress) faultless(ctx context.Context, args []string) (loadResult, error) {
	r, err := e.inKid(ctx, args...)
	if err == nil && (r.Errors != 0 || r.Count == 0) {
		err = fmt.Errorf("%d served, %d failed: %s", r.Count, r.Errors, r.Example)
	}
	return r, err
}

// portRefused is on no rule: the call itself refuses.
const portRefused = 1

// amidNoise runs fn while the noisy kid holds what it may and opens more, towards port, and returns what it got.
func (e *egress) amidNoise(ctx context.Context, noisy string, port uint16, fn func() error) (loadResult, error) {
	ctx, cancel := context.WithTimeout(ctx, e.During+time.Minute)
	defer cancel()
	to := []string{"-sni", nameBulk, "-to", nameBulk + ":443"}
	held, stand := e.startInKid(ctx, noisy, append([]string{"hold", "-count", fmt.Sprint(noiseHeld)}, to...)...)
	select {
	case <-stand:
	case err := <-held:
		return loadResult{}, fmt.Errorf("the noisy kid holds nothing: %w", err)
	}
	during := e.During + e.During/2 // longer than fn
	ended, result := e.startInKid(ctx, noisy, "open", "-workers", fmt.Sprint(noiseWorkers), "-for", during.String(), "-sni", nameBulk, "-to", fmt.Sprintf("%s:%d", nameBulk, port))
	err := fn()
	noiseErr := <-ended
	e.sink.hangUp()
	<-held // the server has hung up: how the client ends says nothing
	if err = errors.Join(err, noiseErr); err != nil {
		return loadResult{}, err
	}
	return <-result, nil
}
