package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/instance"
	"tagout/internal/logtail"
)

// timelineFlags are what of a story is shown, and how.
type timelineFlags struct {
	follow bool
	since  string
	only   []string
	html   string
	identities
}

func (a *app) timelineCommand() *cobra.Command {
	var f timelineFlags
	cmd := &cobra.Command{
		Use: "timeline KID|SESSION|STOP", Short: "Show what a kid did and what was done to it, from all daemons' logs in order",
		Long: `Show what happened, from all daemons' logs, in the order in which it happened: of a kid (every session that had
the name), of one session, or of every kid that a stop met. It needs no daemon, and finds what lies in closed pieces of
the logs too. What is missing from a log in that time is shown as audit.gap.

--json prints the records as they stand in the logs, one a line. --html writes one page that needs nothing else, to
attach to an incident.`,
		Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error { return a.timeline(cmd.Context(), args[0], f) },
	}
	cmd.Flags().BoolVarP(&f.follow, "follow", "f", false, "go on with what follows, until the kid is gone")
	cmd.Flags().StringVar(&f.since, "since", "", "leave out what is older: a time such as 2026-11-30T09:00:00Z, or 15m ago")
	cmd.Flags().StringSliceVar(&f.only, "only", nil, "show these topics only: network, files, tools, processes, identity, stop, life")
	f.identities.addTo(cmd)
	cmd.Flags().StringVar(&f.html, "html", "", "write one self-contained page to this file")
	return cmd
}

// timeline needs no daemon, and no slot either: logs outlive both. With follow it goes on until the kid is gone.
func (a *app) timeline(ctx context.Context, who string, f timelineFlags) error {
	inst, err := a.named()
	if err != nil {
		return err
	}
	want, err := f.filter(time.Now())
	if err != nil {
		return usage(err)
	}
	unseal, err := f.unseal()
	if err != nil {
		return usage(err)
	}
	if f.follow && f.html != "" {
		return usage(errors.New("a page is written once and follows nothing: leave out --follow or --html"))
	}
	ends := logtail.Ends(inst.AuditDir()) // before it is read, so that nothing is between
	finder := a.finder(ctx, inst, unseal)
	story, err := auditview.Tell(ctx, finder, who)
	if err != nil {
		return a.unfound(err)
	}
	if story == nil {
		return usage(fmt.Errorf("the logs of instance %s have no record of a kid, session or stop %q: see `tagout list` and `tagout audit search`", a.instance, who))
	}
	a.tellStats(story.Stats)
	shown, gone := map[string]bool{}, false
	for i := range story.Lines {
		l := &story.Lines[i]
		shown[l.ID] = true
		gone = gone && l.Event != audit.EventKidSpawned || isGone(&l.Record)
	}
	story.Filter(want)
	if f.html != "" {
		return a.writePage(f.html, story)
	}
	w := a.lineWriter(len(story.Kids) > 1)
	for i := range story.Lines {
		if err := a.showLine(w, &story.Lines[i]); err != nil {
			return unread("records", err)
		}
	}
	if !f.follow || gone {
		return nil
	}
	follower := storyFollower{story: story, shown: shown, want: want, show: func(l *auditview.Line) error { return unread("records", a.showLine(w, l)) }}
	return follower.run(ctx, inst.AuditDir(), ends)
}

// named is the instance that --instance names, whether it is set up or not: its state directory follows from the name.
func (a *app) named() (instance.Instance, error) {
	if err := instance.CheckName(a.instance); err != nil {
		return instance.Instance{}, usage(err)
	}
	return instance.New(a.instance, 0)
}

// unfound says why the logs could not be searched.
func (a *app) unfound(err error) error {
	if errors.Is(err, context.Canceled) {
		return err
	}
	// Who may not look into the directories finds nothing in them.
	return errors.Join(needRoot("reading the logs"), &coded{exitUnreachable, err})
}

// tellStats warns of what was not read.
func (a *app) tellStats(s auditview.Stats) {
	if s.Unreadable > 0 {
		fmt.Fprintf(a.err, "tagout: %d lines of the logs are no records\n", s.Unreadable) // nobody is left to be told
	}
	if s.Sealed > 0 {
		fmt.Fprintf(a.err, "tagout: %s of the logs left out: name who can read them with --identity\n", count(s.Sealed, "encrypted piece")) // as above
	}
}

// filter returns which records are shown.
func (f timelineFlags) filter(now time.Time) (func(*auditview.Line) bool, error) {
	topics, err := auditview.ParseTopics(f.only)
	if err != nil {
		return nil, err
	}
	since, err := parseMoment(f.since, now)
	if err != nil {
		return nil, err
	}
	return func(l *auditview.Line) bool {
		return (len(topics) == 0 || topics[auditview.Topic(l.Event)] || l.Event == audit.EventGap) && (since.IsZero() || !l.Time.Before(since))
	}, nil
}

// parseMoment reads a time, a day, or how long ago it was; zero for nothing.
func parseMoment(s string, now time.Time) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	if days, ok := strings.CutSuffix(s, "d"); ok {
		if n, err := strconv.Atoi(days); err == nil && n >= 0 && n < 100_000 {
			return now.AddDate(0, 0, -n), nil
		}
	}
	for _, form := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05", "2006-01-02 15:04", time.DateOnly} {
		if t, err := time.Parse(form, s); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is no time: write 2026-11-30T09:00:00Z, 2026-11-30 (UTC), or 15m or 7d for that long ago", s)
}

// lineWriter shows colours on a terminal only, and nowhere where NO_COLOR is set.
func (a *app) lineWriter(kids bool) *auditview.Writer {
	f, ok := a.out.(*os.File)
	return &auditview.Writer{Colour: ok && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && term.IsTerminal(int(f.Fd())), Kids: kids}
}

// showLine shows one record: as it stands in the log with --json.
func (a *app) showLine(w *auditview.Writer, l *auditview.Line) error {
	if a.json {
		_, err := a.out.Write(append(l.Raw[:len(l.Raw):len(l.Raw)], '\n'))
		return err
	}
	_, err := fmt.Fprintln(a.out, w.Line(l))
	return err
}

// writePage writes the story's page, whole or not at all.
func (a *app) writePage(file string, story *auditview.Story) error {
	err := a.writeWhole(file, func(f *os.File) error { return story.HTML(f) })
	if err == nil && !a.json {
		fmt.Fprintf(a.err, "%s in %s\n", count(len(story.Lines), "record"), file) // nobody is left to be told
	}
	return err
}

// writeWhole makes or replaces a file of the operator's, whole or not at all; nobody else can read it.
func (a *app) writeWhole(file string, write func(*os.File) error) error {
	tmp, err := os.CreateTemp(filepath.Dir(file), ".new-"+filepath.Base(file)+"-*") // mode 0600
	if err != nil {
		return fmt.Errorf("writing %s: %w", file, err)
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	err = errors.Join(write(tmp), tmp.Sync())
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), file)
	}
	if err != nil {
		return fmt.Errorf("writing %s: %w", file, err)
	}
	return nil
}

func isGone(r *audit.Record) bool {
	return r.Event == audit.EventKidDestroyed && r.Outcome == audit.OutcomeOK
}
