package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/bpf"
	"tagout/internal/bench"
	"tagout/internal/config"
	"tagout/internal/instance"
)

// unlimited is what the egress benchmark lets one kid ask for, so that the road is measured and not its limits.
const unlimited = 10_000_000

// egressParts are what --only may name.
var egressParts = append(bench.EgressParts[:], bench.EgressNeighbour)

func (a *app) benchEgressCommand() *cobra.Command {
	var bin, peers, out string
	var only []string
	var rounds, idle int
	var during time.Duration
	var short bool
	cmd := &cobra.Command{
		Use: "egress", Short: "Measure the road out beside other proxies and resolvers, in a box of its own", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			for _, part := range only {
				if !slices.Contains(egressParts, part) {
					return usage(fmt.Errorf("no part is called %q: choose from %s", part, strings.Join(egressParts, ", ")))
				}
			}
			if short { // figures of no meaning, to see that all of them can be taken
				rounds, during, idle = 1, 100*time.Millisecond, 20
			}
			change := func(_ instance.Instance, box *config.Box) error {
				box.KidLimits = config.KidLimits{Queries: unlimited, Opens: unlimited}
				return nil
			}
			name := a.ownName(cmd, "egress")
			cfg := func(p practiceBox) bench.EgressConfig {
				return bench.EgressConfig{
					Inst: p.inst, Internet: p.net, Peers: peers, Dir: out, Out: a.out, Rounds: rounds, During: during, Idle: idle, Only: only,
					Hook: func() (bench.HookMeter, error) { return bpf.NewConnectMeter(p.inst.PinDir()) },
				}
			}
			var roadErr, neighbourErr error
			if only == nil || len(only) > 1 || only[0] != bench.EgressNeighbour {
				roadErr = a.withPracticeBoxOf(cmd.Context(), name, bin, "", change, func(p practiceBox) error {
					_, err := bench.RunEgress(cmd.Context(), cfg(p))
					return err
				})
			}
			if only == nil || slices.Contains(only, bench.EgressNeighbour) { // another box: it is about the limits that change takes away
				neighbourErr = a.withPracticeBox(cmd.Context(), name, bin, "", func(p practiceBox) error {
					_, err := bench.RunNeighbour(cmd.Context(), cfg(p))
					return err
				})
			}
			return errors.Join(roadErr, neighbourErr)
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&peers, "peers", "build/peers", "directory of the peers; those that are missing are left out")
	cmd.Flags().StringVar(&out, "out", "build/bench", "directory in which the figures are written as JSON")
	cmd.Flags().IntVar(&rounds, "rounds", 3, "how often each figure is taken; the median counts")
	cmd.Flags().DurationVar(&during, "for", 1500*time.Millisecond, "how long one measurement takes")
	cmd.Flags().IntVar(&idle, "idle", 10000, "how many idle tunnels are held")
	cmd.Flags().StringSliceVar(&only, "only", nil, "parts to measure: "+strings.Join(egressParts, ", ")+" (default: all)")
	cmd.Flags().BoolVar(&short, "short", false, "one short round with few tunnels")
	return cmd
}
