package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// Config says what to measure with. All fields must be set.
type Config struct {
	Inst     instance.Instance  // set up and running
	Internet *practice.Internet // the box is configured for it and its secret is in the vault
	Card     []byte             // of the hostile agent: deploy/cards/drill.yaml
	InputDir string             // holds the hostile binary
	Dir      string             // where NAME.json is written
	Out      io.Writer
	Runs     int // of each stop; the documentation says 20
	Spawns   int // the documentation says 50
}

// processes is how many hostile processes a stop is measured against.
const processes = 500

// Run measures and writes the first issue's numbers: spawn and the three layers of a stop. An error means
// that something could not be measured; a missed target is no error and stands in the table.
func Run(ctx context.Context, c Config) (metrics []Metric, err error) {
	peer, err := newRunc(ctx, c.Inst, c.Card, c.InputDir)
	if err != nil {
		return nil, fmt.Errorf("measuring: %w", err)
	}
	defer func() { err = errors.Join(err, peer.close(ctx)) }()
	metrics, err = c.spawns(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("measuring spawns: %w", err)
	}
	stops, err := c.stops(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("measuring stops: %w", err)
	}
	metrics = append(metrics, stops...)
	if err := Write(c.Dir, "bench", metrics); err != nil {
		return nil, err
	}
	return metrics, Print(c.Out, metrics)
}

// spawns measures from the request to the first byte that a command in the kid printed.
func (c Config) spawns(ctx context.Context, peer *runc) ([]Metric, error) {
	fmt.Fprintf(c.Out, "spawning %d kids, each beside a bare runc run\n", c.Spawns)
	var kids, bare []time.Duration
	for i := range c.Spawns {
		d, err := c.spawn(ctx, fmt.Sprintf("bench-%d", i))
		if err != nil {
			return nil, err
		}
		kids = append(kids, d)
		if d, err = peer.firstOutput(ctx); err != nil {
			return nil, err
		}
		bare = append(bare, d)
	}
	p50 := AtMost("spawn to first output, p50", Percentile(kids, 50), "ms", 250).Beside("runc run, no network", Percentile(bare, 50))
	if !p50.Met {
		p50.Limits = "creating the container and its namespaces, and the command's own runc exec"
	}
	return []Metric{p50, AtMost("spawn to first output, p99", Percentile(kids, 99), "ms", 0).Beside("runc run, no network", Percentile(bare, 99))}, nil
}

func (c Config) spawn(ctx context.Context, name string) (first time.Duration, err error) {
	box := drill.Sockets(c.Inst, nil)
	began := time.Now()
	kid, err := box.Spawn(ctx, wire.SpawnRequest{Name: name, Purpose: "measure a spawn", Card: string(c.Card), InputDir: c.InputDir})
	if err != nil {
		return 0, err
	}
	err = box.Exec(ctx, kid.Name, wire.ExecRequest{Argv: firstCommand}, func(f wire.ExecFrame) {
		if first == 0 && len(f.Stdout) > 0 {
			first = time.Since(began)
		}
	})
	if err == nil && first == 0 {
		err = fmt.Errorf("the command in %s printed nothing", name)
	}
	if destroyErr := box.Destroy(ctx, kid.Name, "measured"); err == nil {
		err = destroyErr
	}
	return first, err
}

// stops measures all three layers at once against the hostile agent, and runc kill against the same agent.
func (c Config) stops(ctx context.Context, peer *runc) ([]Metric, error) {
	fmt.Fprintf(c.Out, "stopping %d hostile agents with %d processes each\n", c.Runs, processes)
	report, err := drill.Run(ctx, drill.Config{
		Inst: c.Inst, Internet: c.Internet, Card: c.Card, CardFile: "deploy/cards/drill.yaml", InputDir: c.InputDir,
		Runs: c.Runs, Processes: processes, Prefix: "stop", Cases: []drill.Case{{Name: "all together", Layers: wire.AllLayers()}},
	})
	if err != nil {
		return nil, err
	}
	seen := map[wire.Layer][]time.Duration{}
	for _, res := range report.Results {
		for _, l := range res.Layers {
			if l.Verdict == drill.Void || !l.Stopped {
				return nil, fmt.Errorf("run %d of %s proves nothing: %s %s", res.Run, res.Case, res.Void, res.StopError)
			}
			seen[l.Layer] = append(seen[l.Layer], l.Observed)
		}
	}
	bare, err := peer.kills(ctx, c)
	if err != nil {
		return nil, err
	}
	session := AtMost("session: command to populated 0, p99", Percentile(seen[wire.LayerSession], 99), "ms", 500).
		Beside("runc kill --all KILL, same agent", Percentile(bare, 99))
	network := AtMost("network: command to last byte at the sink, p99", Percentile(seen[wire.LayerNetwork], 99), "ms", 50)
	credential := AtMost("credential: command to last accepted use, p99", Percentile(seen[wire.LayerCredential], 99), "ms", 50)
	for _, m := range []*Metric{&session, &network, &credential} {
		if !m.Met {
			m.Limits = fmt.Sprintf("the scheduler: %d runnable hostile processes on these processors", processes)
		}
	}
	return []Metric{session, network, credential}, nil
}

// scratch makes a directory for the peer, within the instance, so that a cleanup finds it too, and returns how to
// remove it.
func scratch(inst instance.Instance) (dir string, remove func(), err error) {
	dir, err = os.MkdirTemp(inst.RunDir(), "bench-")
	return dir, func() { os.RemoveAll(dir) }, err
}
