package main

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"tagout/bpf"
	"tagout/internal/bench"
)

func (a *app) benchStopCommand() *cobra.Command {
	var bin, out string
	var runs int
	var short bool
	cmd := &cobra.Command{
		Use: "stop", Short: "Measure stops beside cgroup.kill, docker kill and podman kill, in a box of its own", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if short { // figures of no meaning, to see that all of them can be taken
				runs = 2
			}
			if err := atLeastOne("runs", runs); err != nil {
				return err
			}
			dir, err := binDir(bin)
			if err != nil {
				return err
			}
			return a.withPracticeBox(cmd.Context(), a.ownName(cmd, "benchstop"), bin, "", func(p practiceBox) error {
				maps, err := bpf.Open(p.inst.PinDir())
				if err != nil {
					return fmt.Errorf("opening the packet counters: %w", err)
				}
				defer maps.Close() // only read
				_, err = bench.RunStop(cmd.Context(), bench.StopConfig{
					Inst: p.inst, Internet: p.net, Tagout: filepath.Join(dir, "tagout"), InputDir: p.inputDir, Dir: out, Out: a.out, Runs: runs, Short: short,
					LastPass: func(mark uint32) (time.Duration, error) {
						c, err := maps.Counters(mark)
						return c.LastPass, err
					},
				})
				return err
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&out, "out", "build/bench", "directory in which stop.json is written")
	cmd.Flags().IntVar(&runs, "runs", 30, "how often each stop of one layer is measured")
	cmd.Flags().BoolVar(&short, "short", false, "take every figure from tiny counts; they mean nothing")
	return cmd
}
