package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/lease"
	"tagout/internal/supervise"
)

func (a *app) upCommand() *cobra.Command {
	var bin, unlock string
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
			if unlock == "" {
				unlock = systemdCredential(instance.UnlockCredential)
			}
			ctx, cancel := context.WithCancel(cmd.Context())
			var indexer sync.WaitGroup
			defer indexer.Wait()
			defer cancel()
			return a.up(ctx, inst, bin, unlock, log, func() {
				a.printf("instance %s is up\n", inst.Name())
				tellSystemd(log, daemon.SdNotifyReady)
				indexer.Go(func() { a.keepIndexed(ctx, log) })
			})
		},
	}
	cmd.Flags().StringVar(&bin, "bin-dir", "", "directory of the daemons' binaries (default: where tagout itself lies)")
	cmd.Flags().StringVar(&unlock, "unlock-file", "", "file that holds what opens a sealed vault, read at each start of credd (default: systemd's credential "+instance.UnlockCredential+", where there is one)")
	return cmd
}

// systemdCredential returns the file of a credential that systemd gave this service; empty where there is none.
func systemdCredential(name string) string {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	if dir == "" {
		return ""
	}
	path := filepath.Join(dir, name)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// up runs the daemons until ctx ends. unlock is the file of --unlock-file; empty: none.
func (a *app) up(ctx context.Context, inst instance.Instance, bin, unlock string, log *slog.Logger, ready func()) error {
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
		Inst: inst, BinDir: dir, Log: log, Cgroups: groups{layout}, Ready: ready, Watchdog: terms.Watchdog, Unlock: unlock,
		Alive: func() { tellSystemd(log, daemon.SdNotifyWatchdog) },
	})
}

// tellSystemd does nothing where no systemd waits for a word (sd_notify(3)).
func tellSystemd(log *slog.Logger, state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		log.Warn("telling systemd", "state", state, "error", err)
	}
}
