package main

import (
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"
)

// destroyLimit bounds the removal of a kid after its command, which also happens when the run is called off.
const destroyLimit = 30 * time.Second

func (a *app) runCommand() *cobra.Command {
	var sf spawnFlags
	var ef execFlags
	cmd := &cobra.Command{
		Use: "run CARD [flags] -- CMD...", Short: "Spawn a kid, run a command in it, destroy it, end with the command's exit code",
		Args: func(cmd *cobra.Command, args []string) error { return commandArgs(cmd, args, "CARD") },
		RunE: func(cmd *cobra.Command, args []string) error {
			sf.held = true
			kid, err := a.spawn(cmd, args[0], &sf)
			if err != nil {
				return err
			}
			defer a.hold(context.WithoutCancel(cmd.Context()), kid.Name)()
			err = a.exec(cmd.Context(), kid.Name, args[1:], ef)
			// Not the command's context: it may be what ended.
			ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), destroyLimit)
			defer cancel()
			if sf.timings {
				err = errors.Join(err, a.timingsAfter(ctx, kid.Name))
			}
			done, gone := a.destroyWith(ctx, kid.Name, "its command ended", "")
			showUse(a.err, done.Credentials)
			return errors.Join(err, gone)
		},
	}
	sf.add(cmd)
	ef.add(cmd)
	return cmd
}
