package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) proveCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "prove",
		Short: "Prove now that each stop layer works, by stopping a canary kid",
		Long: `Have killswitchd spawn a canary kid and stop it, one layer after the other, as it does by itself
on a schedule (proof.every in the box's configuration). No other kid is touched. It ends with 0
only if every layer did what it must, and with 5 otherwise.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var rep wire.ProofReport
			if err := a.call(cmd, instance.Killswitchd, http.MethodPost, "/v1/proof", nil, &rep); err != nil {
				return err
			}
			if a.json {
				if err := a.printJSON(rep); err != nil {
					return err
				}
			} else {
				a.printProof(rep)
			}
			switch rep.Outcome {
			case wire.ProofPassed:
				return nil
			case wire.ProofMissed:
				return &coded{exitIncomplete, fmt.Errorf("the proof could not be carried out: %s", rep.Detail)}
			case wire.ProofInterrupted:
				return &coded{exitIncomplete, errors.New("a stop began and ended the proof: try again")}
			}
			return &coded{exitIncomplete, errors.New("not every layer did what it must")}
		},
	}
}

// firstProof bounds the wait for the proof that killswitchd makes when it starts.
const firstProof = 20 * time.Second

// awaitProof waits until that proof is over, so that its kid is in the way of nothing that is counted or timed. Whether
// it passed is for the lamps to say.
func awaitProof(ctx context.Context, inst instance.Instance) {
	ctx, cancel := context.WithTimeout(ctx, firstProof)
	defer cancel()
	c := control.NewClient(inst.Socket(instance.Killswitchd))
	defer c.CloseIdle()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for {
		var st wire.KillStatus
		if err := c.Call(ctx, http.MethodGet, "/v1/status", nil, &st); err == nil && !st.Busy {
			return
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return
		}
	}
}

func (a *app) printProof(rep wire.ProofReport) {
	for _, l := range wire.AllLayers() {
		lp, fired := rep.Layers[l]
		switch {
		case !fired:
		case lp.Passed:
			a.printf("%-10s passed, fired %s, observed %s\n", l, lp.Fired.Round(10*time.Microsecond), lp.Observed.Round(10*time.Microsecond))
		default:
			a.printf("%-10s FAILED at %s: %s\n", l, lp.Point, lp.Detail)
		}
	}
}
