package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"tagout/internal/audit"
	"tagout/internal/instance"
)

func (a *app) timelineCommand() *cobra.Command {
	return &cobra.Command{
		Use: "timeline KID|SESSION", Short: "Show what a kid did and what was done to it, from all daemons' logs in order",
		Args: wants("KID"),
		RunE: func(_ *cobra.Command, args []string) error { return a.timeline(args[0]) },
	}
}

// timeline needs no daemon, and no slot either: logs outlive both.
func (a *app) timeline(who string) error {
	if err := instance.CheckName(a.instance); err != nil {
		return usage(err)
	}
	inst, err := instance.New(a.instance, 0) // the state directory follows from the name alone
	if err != nil {
		return err
	}
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
	enc := json.NewEncoder(a.out)
	for _, r := range records {
		if a.json {
			if err := enc.Encode(r); err != nil {
				return err
			}
			continue
		}
		a.printf("%s\n", recordLine(r))
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
	return b.String()
}
