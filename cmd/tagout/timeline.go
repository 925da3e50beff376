package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/logtail"
)

func (a *app) timelineCommand() *cobra.Command {
	return &cobra.Command{
		Use: "timeline KID|SESSION", Short: "Show what a kid did and what was done to it, from all daemons' logs in order",
		Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error { return a.timeline(cmd.Context(), args[0], false) },
	}
}

// timeline needs no daemon, and no slot either: logs outlive both. With follow it goes on until the kid is gone.
func (a *app) timeline(ctx context.Context, who string, follow bool) error {
	if err := instance.CheckName(a.instance); err != nil {
		return usage(err)
	}
	inst, err := instance.New(a.instance, 0) // the state directory follows from the name alone
	if err != nil {
		return err
	}
	ends := logtail.Ends(inst.AuditDir()) // before it is read, so that nothing is between
	records, unreadable, err := audit.Timeline(inst.AuditDir(), func(r *audit.Record) bool { return r.Kid == who || r.Session == who })
	if err != nil {
		// Who may not look into the directories finds nothing in them.
		return errors.Join(needRoot("reading the logs"), &coded{exitUnreachable, err})
	}
	if unreadable > 0 {
		fmt.Fprintf(a.err, "tagout: %d lines of the logs are no records\n", unreadable) // nobody is left to be told
	}
	if len(records) == 0 {
		return usage(fmt.Errorf("the logs of instance %s have no record of a kid or session %q: see `tagout list`", a.instance, who))
	}
	shown, gone := map[string]bool{}, false
	for _, r := range records {
		if err := a.record(&r); err != nil {
			return unread("records", err)
		}
		shown[r.ID] = true
		gone = gone && r.Event != audit.EventKidSpawned || isGone(&r)
	}
	if !follow || gone {
		return nil
	}
	return a.followRecords(ctx, inst.AuditDir(), ends, who, shown)
}

// record shows one record.
func (a *app) record(r *audit.Record) error {
	if a.json {
		return json.NewEncoder(a.out).Encode(r)
	}
	_, err := fmt.Fprintln(a.out, recordLine(*r))
	return err
}

func isGone(r *audit.Record) bool {
	return r.Event == audit.EventKidDestroyed && r.Outcome == audit.OutcomeOK
}

// followEvery is how often the logs are looked at.
const followEvery = 200 * time.Millisecond

// followRecords shows the records of a kid or session that come, but those that are shown already, until it is gone or
// ctx ends.
func (a *app) followRecords(ctx context.Context, dir string, from map[string]logtail.Mark, who string, shown map[string]bool) error {
	tail := logtail.New(dir, from, fmt.Appendf(nil, "%q", who))
	look := time.NewTicker(followEvery)
	defer look.Stop()
	for gone := false; !gone; {
		var failed error
		tail.Poll(ctx, logtail.Handler{Line: func(line []byte, _ string, _ int64) { // a log that cannot be read is tried again
			var r audit.Record
			if failed != nil || json.Unmarshal(line, &r) != nil || r.Kid != who && r.Session != who || shown[r.ID] {
				return
			}
			failed = a.record(&r)
			gone = gone || isGone(&r)
		}})
		if failed != nil {
			return unread("records", failed)
		}
		if !gone {
			select {
			case <-look.C:
			case <-ctx.Done():
				return &coded{code: exitInterrupted} // as it is meant to end
			}
		}
	}
	return nil
}

// recordLine is one record for people.
func recordLine(r audit.Record) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %-11s %-18s", r.Time.Format("15:04:05.000"), r.Daemon, r.Event)
	if r.Outcome != "" {
		b.WriteString(" " + r.Outcome)
	}
	if r.Reason != 0 {
		b.WriteString(" " + r.Reason.String())
	}
	if d := r.Dst; d != nil {
		b.WriteString(" -> " + d.Name)
		if d.Name == "" && d.Addr.IsValid() {
			b.WriteString(d.Addr.String())
		}
		if d.Port != 0 {
			fmt.Fprintf(&b, ":%d", d.Port)
		}
		if d.Proto != "" {
			b.WriteString("/" + d.Proto)
		}
	}
	if p := r.Process; p != nil {
		fmt.Fprintf(&b, " by %s[%d]", p.Comm, p.PID)
	}
	if by := r.Bytes; by != nil {
		fmt.Fprintf(&b, " up %d down %d", by.Up, by.Down)
	}
	if r.Count > 1 {
		fmt.Fprintf(&b, " x%d", r.Count)
	}
	if r.Actor != "" {
		b.WriteString(" (" + r.Actor + ")")
	}
	for _, k := range slices.Sorted(maps.Keys(r.Fields)) {
		b.WriteString(" " + k + "=" + r.Fields[k])
	}
	if r.Detail != "" {
		b.WriteString(" " + r.Detail)
	}
	return oneLine(b.String()) // names, programs and arguments are the kid's own words
}
