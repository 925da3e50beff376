package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// spawnFlags are what spawn and run have in common.
type spawnFlags struct {
	name, purpose, inputDir string
	approval                string // file
	timings                 bool
	held                    bool // not a flag: the kid goes when this command does
	sign                    signer
}

func (f *spawnFlags) add(cmd *cobra.Command) {
	f.sign.keyFlags(cmd)
	cmd.Flags().StringVar(&f.name, "name", "", "the kid's name (default: one is made up)")
	cmd.Flags().StringVar(&f.purpose, "purpose", "", "why it runs, for the record (default: the card's task)")
	cmd.Flags().StringVar(&f.inputDir, "input-dir", "", "directory of the card's inputs (default: the card's own)")
	cmd.Flags().StringVar(&f.approval, "approval", "", "file with what `tagout approve` printed (- for standard input), for a card with `network: host`")
	cmd.Flags().BoolVar(&f.timings, "timings", false, "show on standard error how long each stage of the spawn took")
}

func (a *app) spawnCommand() *cobra.Command {
	var f spawnFlags
	cmd := &cobra.Command{
		Use: "spawn CARD", Short: "Make a kid from a job card, with nothing running in it yet", Args: wants("CARD"),
		RunE: func(cmd *cobra.Command, args []string) error {
			kid, err := a.spawn(cmd, args[0], &f)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(kid) // its timings among the rest
			}
			a.printf("%s\n", kid.Name)
			if f.timings {
				return a.timings(kid)
			}
			return nil
		},
	}
	f.add(cmd)
	return cmd
}

func (a *app) spawn(cmd *cobra.Command, file string, f *spawnFlags) (wire.Kid, error) {
	c, raw, err := readCard(file)
	if err != nil {
		return wire.Kid{}, err
	}
	dir := f.inputDir
	if dir == "" {
		dir = filepath.Dir(file)
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return wire.Kid{}, err
	}
	req := wire.SpawnRequest{Name: f.name, Purpose: f.purpose, Card: string(raw), CardFile: file, InputDir: dir, Held: f.held}
	if err := a.approved(f.approval, &req); err != nil {
		return wire.Kid{}, err
	}
	if req.Purpose == "" {
		req.Purpose = c.Task
	}
	if err := a.vouch(cmd, f, &req); err != nil {
		return wire.Kid{}, err
	}
	return a.spawnNow(cmd.Context(), req)
}

// vouch signs the request, where it is to be signed: its card, the kid's name and the purpose, which becomes one line.
func (a *app) vouch(cmd *cobra.Command, f *spawnFlags, req *wire.SpawnRequest) error {
	signed, err := f.sign.used(cmd)
	if err != nil || !signed {
		return err
	}
	req.Purpose = authority.Purpose(req.Purpose)
	order, err := f.sign.sign(a, authority.Order{Action: authority.ActionSpawn, Kid: req.Name, Card: authority.CardSum(req.Card), Reason: req.Purpose})
	req.Order = order.Note
	return err
}

// spawnNow is called off in one way only: the kid is made, and destroyed again. Whoever hung up while it is made
// could not know whether there is one.
func (a *app) spawnNow(ctx context.Context, req wire.SpawnRequest) (wire.Kid, error) {
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	var kid wire.Kid
	if err := a.callWith(call, instance.Sandboxd, http.MethodPost, "/v1/kids", req, &kid); err != nil {
		return kid, err
	}
	if ctx.Err() != nil {
		gone, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyLimit)
		defer cancel()
		return kid, errors.Join(&coded{code: exitInterrupted}, a.destroy(gone, kid.Name, "its spawn was interrupted"))
	}
	if n := len(kid.SameCard); n > 0 {
		fmt.Fprintf(a.err, "tagout: the card %s has %s already: %s\n", kid.Card, count(n, "kid"), strings.Join(kid.SameCard, ", ")) // nobody is left to be told
	}
	return kid, nil
}
