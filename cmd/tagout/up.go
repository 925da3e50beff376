package main

import (
	"context"
	"log/slog"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/supervise"
)

func (a *app) upCommand() *cobra.Command {
	var bin string
	cmd := &cobra.Command{
		Use:   "up",
		Short: "Run the daemons until this command is ended, starting again whichever dies",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inst, err := a.open()
			if err != nil {
				return err
			}
			if err := needRoot("running the daemons"); err != nil {
				return err
			}
			log := slog.New(slog.NewTextHandler(a.err, nil))
			return a.up(cmd.Context(), inst, bin, log, func() {
				a.printf("instance %s is up\n", inst.Name())
				tellSystemd(log, daemon.SdNotifyReady)
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the daemons' binaries (default: where tagout itself lies)")
	return cmd
}

// up runs the daemons until ctx ends.
func (a *app) up(ctx context.Context, inst instance.Instance, bin string, log *slog.Logger, ready func()) error {
	dir, err := binDir(bin)
	if err != nil {
		return err
	}
	layout, err := cgroup.Detect()
	if err != nil {
		return err
	}
	terms, err := lease.Load(inst)
	if err != nil {
		log.Error("going on with the default leases", "error", err)
	}
	return supervise.Up(ctx, supervise.Config{
		Inst: inst, BinDir: dir, Log: log, Cgroups: groups{layout}, Ready: ready, Watchdog: terms.Watchdog,
		Alive: func() { tellSystemd(log, daemon.SdNotifyWatchdog) },
	})
}

// tellSystemd does nothing where no systemd waits for a word (sd_notify(3)).
func tellSystemd(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("telling systemd", "state", state, "error", err)
	}
}
