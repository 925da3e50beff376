package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/suggest"
)

func (a *app) suggestCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "suggest KID [--card FILE]",
		Short: "Turn what a kid was refused into the smallest additions to its card, as a diff to review",
		Long: `Turn what a kid was refused into the smallest additions to its card, as a unified
diff to review. Nothing is opened by it. Comments say what is not suggested and
why: addresses, metadata services, local names, what a deny rule closes.

The card is the one that is in force for the kid. After the kid is gone its
records remain: name the card with --card.`,
		Args: cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error { return a.suggest(args[0], file) },
	}
	cmd.Flags().StringVar(&file, "card", "", "the card to add to, instead of the living kid's")
	return cmd
}

// suggestion is what `tagout card suggest --json` prints.
type suggestion struct {
	Kid     string `json:"kid"`
	Session string `json:"session"`
	suggest.Result
}

// suggest needs no daemon: it reads the audit logs and the card.
func (a *app) suggest(kid, file string) error {
	if err := instance.CheckName(a.instance); err != nil {
		return usage(err)
	}
	if strings.ContainsAny(kid, "/.") {
		return usage(fmt.Errorf("there is no kid called %q: see `tagout list`", kid))
	}
	inst, err := instance.New(a.instance, 0) // the directories follow from the name alone
	if err != nil {
		return err
	}
	records, session, err := lastSession(inst, kid)
	if err != nil {
		return err
	}
	in := suggest.Input{File: file, Spawned: records[0].Time, Now: time.Now(), Records: records}
	path := file
	if path == "" {
		in.File, path = "card.yaml", inst.KidCard(kid)
	}
	in.Card, err = os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && file == "" {
		return usage(fmt.Errorf("kid %s is gone, and its card with it: name the card with --card", kid))
	}
	if err != nil {
		return usage(fmt.Errorf("reading the card: %w", err))
	}
	result, err := suggest.Suggest(in)
	if a.json {
		return errors.Join(a.printJSON(suggestion{Kid: kid, Session: session, Result: result}), usageOf(err))
	}
	a.printSuggestion(kid, session, in.File, result)
	return usageOf(err)
}

func usageOf(err error) error {
	if err == nil {
		return nil
	}
	return usage(err)
}

// lastSession returns the records of the last session that the logs know by the kid's name, never none.
func lastSession(inst instance.Instance, kid string) ([]audit.Record, string, error) {
	all, _, err := audit.Timeline(inst.AuditDir(), func(r *audit.Record) bool { return r.Kid == kid && r.Session != "" })
	if err != nil {
		return nil, "", &coded{exitUnreachable, err}
	}
	if len(all) == 0 {
		return nil, "", usage(fmt.Errorf("the logs of instance %s have no record of a kid %q: see `tagout list`", inst.Name(), kid))
	}
	session := all[len(all)-1].Session
	var records []audit.Record
	for _, r := range all {
		if r.Session == session {
			records = append(records, r)
		}
	}
	return records, session, nil
}

// printSuggestion prints comments and the diff; patch(1) and git apply pass over the comments.
func (a *app) printSuggestion(kid, session, file string, r suggest.Result) {
	switch {
	case len(r.Added)+len(r.Skipped) == 0:
		a.printf("# Session %s of kid %s was refused nothing that its card does not allow by now.\n", session, kid)
		return
	case len(r.Added) == 0:
		a.printf("# Nothing to add for what session %s of kid %s was refused.\n", session, kid)
	default:
		a.printf("# What session %s of kid %s was refused, as additions to its card. Nothing is open yet:\n"+
			"# review them, apply them to the card's file (patch FILE < this), run `tagout card check FILE`, and spawn\n"+
			"# the next kid with it, or give it to this one with `tagout policy set %s --card FILE`.\n", session, kid, kid)
	}
	if len(r.Skipped) > 0 {
		a.printf("#\n# Not suggested:\n")
	}
	for _, s := range r.Skipped {
		times := "once"
		if s.Count > 1 {
			times = fmt.Sprintf("%d times", s.Count)
		}
		a.printf("#   %s, refused %s (%s): %s\n", s.What, times, s.Reason, s.Why)
	}
	a.printf("%s", r.Diff)
}
