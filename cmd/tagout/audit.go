package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/audit"
	"tagout/internal/audit/seal"
	"tagout/internal/auditview"
)

func (a *app) auditCommand() *cobra.Command {
	cmd := group("audit", "Search and check the audit logs")
	cmd.AddCommand(a.auditSearchCommand(), a.auditIndexCommand(), a.auditExportCommand(), a.auditVerifyCommand(), a.auditProofCommand(), a.auditCheckCommand(), a.auditKeysCommand())
	cmd.AddCommand(a.auditWitnessCommand())
	return cmd
}

// queryFlags are the fields of records that are wanted.
type queryFlags struct {
	q            auditview.Query
	since, until string
	identities
}

// identities are the files with what opens encrypted pieces of the logs.
type identities struct{ files []string }

func (i *identities) addTo(cmd *cobra.Command) {
	cmd.Flags().StringSliceVar(&i.files, "identity", nil, "an age identity file that opens encrypted pieces of the logs; may be given again")
}

func (i *identities) unseal() ([]audit.Unseal, error) {
	var out []audit.Unseal
	for _, file := range i.files {
		ids, err := seal.Identities(file)
		if err != nil {
			return nil, err
		}
		out = append(out, seal.With(ids...))
	}
	return out, nil
}

func (f *queryFlags) add(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringSliceVar(&f.q.Events, "event", nil, "events, such as conn.opened or conn.*; any of them")
	fl.StringVar(&f.q.Kid, "kid", "", "the kid's name")
	fl.StringVar(&f.q.Session, "session", "", "the session's id")
	fl.StringVar(&f.q.Stop, "stop", "", "the id of a stop")
	fl.StringVar(&f.q.Card, "card", "", "the card's name")
	fl.StringVar(&f.q.Reason, "reason", "", "the reason code, such as name-not-allowed")
	fl.StringVar(&f.q.Outcome, "outcome", "", "allow, deny, ok or fail")
	fl.StringVar(&f.q.Daemon, "daemon", "", "the daemon that wrote it")
	fl.StringVar(&f.q.Host, "host", "", "the destination's name or address; *.example.com is all below it")
	fl.StringVar(&f.q.Path, "path", "", "the file or program; /etc/* is all below it")
	fl.StringVar(&f.q.Actor, "actor", "", "who asked for it")
	fl.StringVar(&f.since, "since", "", "leave out what is older: a time such as 2026-11-30T09:00:00Z, or 15m ago")
	fl.StringVar(&f.until, "until", "", "leave out what is not older, likewise")
	f.identities.addTo(cmd)
}

// query returns what is asked for; words are the free text.
func (f *queryFlags) query(words []string, now time.Time) (auditview.Query, error) {
	q := f.q
	q.Text = strings.Join(words, " ")
	var err, err2 error
	q.Since, err = parseMoment(f.since, now)
	q.Until, err2 = parseMoment(f.until, now)
	return q, errors.Join(err, err2)
}

func (a *app) auditSearchCommand() *cobra.Command {
	var f queryFlags
	var limit int
	cmd := &cobra.Command{
		Use: "search [TEXT]", Short: "Find records by their fields and by text",
		Long: `Find records in all daemons' logs: by fields, all of which must hold, and by a text that stands anywhere in the
record, in capitals or not. The newest are shown, in the order in which they happened; --json prints them as they stand
in the logs.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := f.query(args, time.Now())
			if err != nil {
				return usage(err)
			}
			if limit < 0 {
				return usage(errors.New("--limit is a number from 0, which is all"))
			}
			unseal, err := f.unseal()
			if err != nil {
				return usage(err)
			}
			return a.search(cmd.Context(), q, limit, unseal)
		},
	}
	f.add(cmd)
	cmd.Flags().IntVar(&limit, "limit", 1000, "show so many, the newest; 0: all")
	return cmd
}

func (a *app) search(ctx context.Context, q auditview.Query, limit int, unseal []audit.Unseal) error {
	inst, err := a.named()
	if err != nil {
		return err
	}
	finder := a.finder(ctx, inst, unseal)
	lines, more, stats, err := auditview.Newest(ctx, finder, q, limit)
	if err != nil {
		return a.unfound(err)
	}
	a.tellStats(stats)
	w := a.lineWriter(true)
	for i := range lines {
		if err := a.showLine(w, &lines[i]); err != nil {
			return unread("records", err)
		}
	}
	if more > 0 {
		fmt.Fprintf(a.err, "tagout: %s not shown, all older: narrow the search, or give --limit 0\n", count(more, "more record")) // nobody is left to be told
	}
	return nil
}
