package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/auditindex"
	"tagout/internal/auditview"
	"tagout/internal/instance"
)

func (a *app) auditIndexCommand() *cobra.Command {
	var rebuild bool
	cmd := &cobra.Command{
		Use: "index", Short: "Bring the index of the logs up to date",
		Long: `Bring the index of the audit logs up to date, through which timelines and searches find their records at once.
tagout up does so by itself. The index is a helper: what is found is read from the logs, evidence is gathered without
it, and where it is missing or damaged the logs are read through instead.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inst, err := a.named()
			if err == nil {
				err = needRoot("indexing the logs")
			}
			if err != nil {
				return err
			}
			if _, err := os.Stat(inst.AuditDir()); err != nil {
				return &coded{exitUnreachable, fmt.Errorf("indexing the audit logs: %w in %s: is this the right instance?", auditview.ErrNoLogs, inst.AuditDir())}
			}
			make := auditindex.Update
			if rebuild {
				make = auditindex.Rebuild
			}
			p, err := make(cmd.Context(), inst.AuditIndexDir(), inst.AuditDir())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"records": p.Lines, "bytes": p.Bytes, "forgotten": p.Dropped, "took_ns": p.Took})
			}
			a.printf("%s added in %v\n", count(int(p.Lines), "record"), p.Took.Round(time.Millisecond))
			return nil
		},
	}
	cmd.Flags().BoolVar(&rebuild, "rebuild", false, "throw the index away and make it again from the logs")
	return cmd
}

// indexLimit is how long a search brings the index up to date before it begins. What is not in it then is read through.
const indexLimit = 250 * time.Millisecond

// finder returns what searches the instance's logs.
func (a *app) finder(ctx context.Context, inst instance.Instance, unseal []audit.Unseal) auditview.Finder {
	through := auditview.Scanner{Dir: inst.AuditDir(), Unseal: unseal}
	if _, err := os.Stat(inst.AuditIndexDir()); err != nil { // nothing keeps one here
		return through
	}
	limited, cancel := context.WithTimeout(ctx, indexLimit)
	defer cancel()
	auditindex.Update(limited, inst.AuditIndexDir(), inst.AuditDir()) // whatever comes of it: what is not indexed is read through
	told := false
	return auditindex.Index{Dir: inst.AuditIndexDir(), Scanner: through, Trouble: func(err error) {
		if !told {
			fmt.Fprintf(a.err, "tagout: reading the logs through, which takes longer: %v\n", err) // nobody is left to be told
		}
		told = true
	}}
}

// indexEvery is how often tagout up brings the index up to date.
const indexEvery = 15 * time.Second

// keepIndexed brings the index up to date every now and then, in a process of its own, after all others: the index is
// nothing that a guard may wait for, or fail with.
func (a *app) keepIndexed(ctx context.Context, log *slog.Logger) {
	tick := time.NewTicker(indexEvery)
	defer tick.Stop()
	for failing := false; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		cmd := exec.CommandContext(ctx, "/proc/self/exe", "--instance", a.instance, "audit", "index")
		cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
		out, err := runIdle(cmd)
		if err != nil && ctx.Err() == nil && !failing {
			log.Warn("indexing the audit logs; timelines take longer", "error", err, "output", auditview.OneLine(out))
		}
		failing = err != nil
	}
}

// runIdle runs a command that may wait for everything else. It returns what it wrote, for messages.
func runIdle(cmd *exec.Cmd) (string, error) {
	var out limitedText
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		return "", err
	}
	err := unix.Setpriority(unix.PRIO_PROCESS, cmd.Process.Pid, 19)
	if errors.Is(err, unix.ESRCH) {
		err = nil // it has ended
	}
	return string(out), errors.Join(cmd.Wait(), err)
}

// limitedText keeps the beginning of what is written.
type limitedText []byte

func (t *limitedText) Write(p []byte) (int, error) {
	*t = append(*t, p[:min(len(p), 500-min(len(*t), 500))]...)
	return len(p), nil
}
