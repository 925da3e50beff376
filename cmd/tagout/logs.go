package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) logsCommand() *cobra.Command {
	var follow, events bool
	var exec string
	cmd := &cobra.Command{
		Use: "logs KID", Short: "Show the output of a kid's detached commands, or what happened to it",
		Long: `Show what is kept of the output of a kid's detached commands (` + "`tagout exec -d`" + `), the oldest command first: the
last MiB of each. Its bytes go to standard output and standard error as they are; before each command, standard error
says which it is. What a command wrote that somebody waited for went there and is not kept.

With --events it shows what the kid did and what was done to it instead, as ` + "`tagout timeline`" + ` does.`,
		Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if events && exec != "" {
				return usage(fmt.Errorf("--exec has a command's output, --events has none: leave out one"))
			}
			if events {
				return a.timeline(cmd.Context(), args[0], timelineFlags{follow: follow})
			}
			return a.logs(cmd.Context(), args[0], exec, follow)
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what follows, until the kid is gone")
	cmd.Flags().BoolVar(&events, "events", false, "show the audit records of the kid")
	cmd.Flags().StringVar(&exec, "exec", "", "show this command's output alone (`ID` from tagout execs)")
	return cmd
}

func (a *app) logs(ctx context.Context, kid, exec string, follow bool) error {
	inst, err := a.open()
	if err != nil {
		return err
	}
	c := control.NewClient(inst.Socket(instance.Sandboxd))
	defer c.CloseIdle()
	route := fmt.Sprintf("/v1/kids/%s/logs?follow=%t", url.PathEscape(kid), follow)
	p := &logPrinter{app: a, only: exec, argv: map[string]string{}}
	err = c.Each(ctx, http.MethodGet, route, nil, func(line json.RawMessage) error {
		var f wire.LogFrame
		if err := json.Unmarshal(line, &f); err != nil {
			return err
		}
		return p.frame(ctx, line, f)
	})
	if follow && ctx.Err() != nil {
		return &coded{code: exitInterrupted} // as it is meant to end
	}
	if err != nil {
		return unanswered(inst, instance.Sandboxd, err)
	}
	if exec != "" && len(p.argv) == 0 {
		return usage(fmt.Errorf("kid %s has no detached command %s: see `tagout execs %s`", kid, exec, kid))
	}
	return nil
}

// logPrinter shows the frames of several commands.
type logPrinter struct {
	*app
	only string            // a command's id; "": all
	argv map[string]string // by id
	last string            // id of the command that was shown last
}

func (p *logPrinter) frame(ctx context.Context, line json.RawMessage, f wire.LogFrame) error {
	if p.only != "" && f.ID != p.only {
		return nil
	}
	if f.Exec != nil {
		p.argv[f.ID] = strings.Join(f.Exec.Argv, " ")
	}
	if !p.json && p.only == "" && p.last != f.ID {
		p.last = f.ID
		fmt.Fprintf(p.err, "==> %s %q\n", f.ID, p.argv[f.ID]) // nobody is left to be told
	}
	if err := p.app.frame(ctx, line, wire.ExecFrame{Stdout: f.Stdout, Stderr: f.Stderr, Lost: f.Lost, Exit: f.Exit}); err != nil || p.json || f.Exit == nil {
		return err
	}
	if p.only == "" {
		fmt.Fprintf(p.err, "==> %s %s\n", f.ID, execState(wire.Exec{Exit: f.Exit})) // as above
	}
	return nil
}
