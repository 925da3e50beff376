package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/auditexport"
	"tagout/internal/auditview"
)

func (a *app) auditExportCommand() *cobra.Command {
	var f queryFlags
	var format, file string
	cmd := &cobra.Command{
		Use: "export [KID|SESSION|STOP]", Short: "Write records in the form that another system reads",
		Long: `Write records, one a line and in the order in which they happened: all of them, those of a kid, a session or a stop,
or those that the fields below choose.

  jsonl  as they stand in the logs
  ocsf   events of the Open Cybersecurity Schema Framework 1.8: process, file, network, HTTP and DNS activity,
         authentication, and API activity for everything else
  csv    for spreadsheets; what looks like a formula gets an apostrophe
  cef    ArcSight's Common Event Format`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := f.query(nil, time.Now())
			if err != nil {
				return usage(err)
			}
			if !slices.Contains(auditexport.Formats(), format) {
				return usage(fmt.Errorf("--format is one of %s", strings.Join(auditexport.Formats(), ", ")))
			}
			who := ""
			if len(args) > 0 {
				who = args[0]
			}
			write := func(out io.Writer) error { return a.export(cmd.Context(), f, q, who, format, out) }
			if file == "" {
				return write(a.out)
			}
			return a.writeWhole(file, func(out *os.File) error { return write(out) })
		},
	}
	f.add(cmd)
	cmd.Flags().StringVar(&format, "format", auditexport.JSONL, "jsonl, ocsf, csv or cef")
	cmd.Flags().StringVarP(&file, "out", "o", "", "write to this file, whole or not at all (default: standard output)")
	return cmd
}

func (a *app) export(ctx context.Context, f queryFlags, q auditview.Query, who, format string, out io.Writer) error {
	inst, err := a.named()
	if err != nil {
		return err
	}
	unseal, err := f.unseal()
	if err != nil {
		return usage(err)
	}
	w, err := auditexport.New(format, out, version)
	if err != nil {
		return err
	}
	var stats auditview.Stats
	each := func(l *auditview.Line) error { return unread("records", w.Write(l)) }
	if who == "" {
		stats, err = auditview.Scanner{Dir: inst.AuditDir(), Unseal: unseal}.Stream(ctx, q, each)
	} else {
		var story *auditview.Story
		if story, err = auditview.Tell(ctx, a.finder(ctx, inst, unseal), who); err == nil && story == nil {
			return usage(fmt.Errorf("the logs of instance %s have no record of a kid, session or stop %q", a.instance, who))
		}
		if err == nil {
			stats = story.Stats
			err = eachOf(story, &q, each)
		}
	}
	var coded *coded
	switch {
	case errors.As(err, &coded):
		return err
	case err != nil:
		return a.unfound(err)
	}
	a.tellStats(stats)
	return unread("records", w.Close())
}

// eachOf calls each with the story's records that are wanted.
func eachOf(story *auditview.Story, q *auditview.Query, each func(*auditview.Line) error) error {
	for i := range story.Lines {
		if l := &story.Lines[i]; q.Match(l) {
			if err := each(l); err != nil {
				return err
			}
		}
	}
	return nil
}
