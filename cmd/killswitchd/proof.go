package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/daemon"
	"tagout/internal/instance"
	"tagout/internal/metrics"
	"tagout/internal/wire"
	"tagout/killswitch"
)

// proofs is what killswitchd proves its layers with: the kids of sandboxd, its own socket, credd and the kernel.
func proofs(d *daemon.Daemon, net *network) *killswitch.ProofConfig {
	return &killswitch.ProofConfig{
		Every:   every(filepath.Join(d.Inst.StateDir(), instance.ProofFile), d.Log),
		Kids:    killswitch.NewSandboxdProofs(d.Inst.Socket(instance.Sandboxd)),
		Orders:  killswitch.NewSocketOrders(d.Inst.Socket(d.Name)),
		Network: net,
		Tokens:  killswitch.NewCredd(d.Inst.Socket(instance.Credd)),
	}
}

// every returns what reads the period of proofs, each time anew: `tagout setup` may have written another. What cannot
// be read is the default.
func every(file string, log *slog.Logger) func() time.Duration {
	return func() time.Duration {
		raw, err := os.ReadFile(file)
		if errors.Is(err, fs.ErrNotExist) {
			return wire.DefaultProofEvery
		}
		var s wire.ProofSettings
		if err == nil {
			err = json.Unmarshal(raw, &s)
		}
		if err == nil && s.Every < time.Second {
			err = errors.New("the period is too short")
		}
		if err != nil {
			log.Error("reading how often to prove the layers; taking the default", "file", file, "error", err)
			return wire.DefaultProofEvery
		}
		return s.Every
	}
}

// gaugesLimit bounds what a scrape of the metrics costs.
const gaugesLimit = time.Second

// lamps tells the metrics what the lamps show, at each scrape.
func lamps(sw *killswitch.Switch) func() metrics.Lamps {
	return func() metrics.Lamps {
		ctx, cancel := context.WithTimeout(context.Background(), gaugesLimit)
		defer cancel()
		layers, every := sw.Gauges(ctx)
		out := metrics.Lamps{Every: every}
		for _, l := range layers {
			out.Layers = append(out.Layers, metrics.Lamp{Layer: l.Layer, Armed: l.Armed, ProofAge: l.Age})
		}
		return out
	}
}

// Flow is what the programs saw of a kid's packets on their way out.
func (n *network) Flow(mark uint32) (killswitch.Flow, error) {
	m, err := n.maps()
	if err != nil {
		return killswitch.Flow{}, err
	}
	c, err := m.Counters(mark)
	if err != nil {
		return killswitch.Flow{}, unknown(err)
	}
	return killswitch.Flow{
		KidPassed: c.Kid.PassedUp.Packets, KidDropped: c.Kid.DroppedUp.Packets, LinkPassed: c.Link.PassedUp.Packets,
		DaemonPassed: c.Upstream.PassedUp.Packets, DaemonDropped: c.Upstream.DroppedUp.Packets,
	}, nil
}
