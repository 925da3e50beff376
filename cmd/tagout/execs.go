package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func execsRoute(kid string) string { return "/v1/kids/" + url.PathEscape(kid) + "/execs" }

func (a *app) execsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "execs KID", Short: "List a kid's commands: those that run, and detached ones that have ended", Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			list := []wire.Exec{}
			if err := a.call(cmd, instance.Sandboxd, http.MethodGet, execsRoute(args[0]), nil, &list); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "EXEC\tSTATE\tAGE\tBY\tCOMMAND")
			for _, e := range list {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%q\n", e.ID, execState(e), time.Since(e.Started).Round(time.Second), e.Actor, strings.Join(e.Argv, " "))
			}
			return w.Flush()
		},
	}
}

func execState(e wire.Exec) string {
	switch {
	case e.Exit != nil && e.Exit.Result == "exited":
		return fmt.Sprintf("exited %d", e.Exit.Code)
	case e.Exit != nil:
		return e.Exit.Result
	case !e.Detached:
		return "running"
	}
	state := "detached"
	if !e.Adopted.IsZero() {
		state = "adopted"
	}
	if !e.Outlives {
		state += " until restart"
	}
	return state
}

func (a *app) attachCommand() *cobra.Command {
	keys := defaultDetachKeys()
	stdin := false
	cmd := &cobra.Command{
		Use: "attach KID EXEC", Short: "Show what is kept of a detached command's output and what follows, and end with its exit code", Args: wants("KID", "EXEC"),
		Long: `Show what is kept of a detached command's output and what follows, and end with its exit code.

A command with a terminal is typed into where standard input is one, too; to look
on only, give it </dev/null.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.attach(cmd, args[0], args[1], stdin, keys)
		},
	}
	cmd.Flags().BoolVarP(&stdin, "stdin", "i", false, "send this command's standard input as it comes; its end is the end of the command's")
	keys.add(cmd)
	return cmd
}

func (a *app) attach(cmd *cobra.Command, kid, id string, stdin bool, keys detachKeys) error {
	route := execsRoute(kid) + "/" + url.PathEscape(id)
	var e wire.Exec
	if err := a.call(cmd, instance.Sandboxd, http.MethodGet, route, nil, &e); err != nil {
		return err
	}
	t := talk{kid: kid, route: route + "/attach", keys: keys}
	if term := a.terminal(); e.TTY && term.in != nil {
		t.raw = term
	}
	if e.Exit == nil && (stdin || t.raw != nil) {
		return a.talk(cmd.Context(), t)
	}
	return a.frames(cmd.Context(), t.route, nil)
}

func (a *app) endCommand() *cobra.Command {
	var why string
	cmd := &cobra.Command{
		Use: "end KID EXEC", Short: "End a command of a kid with all that it started, or forget one that has ended", Args: wants("KID", "EXEC"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.call(cmd, instance.Sandboxd, http.MethodDelete, execsRoute(args[0])+"/"+url.PathEscape(args[1])+"?reason="+url.QueryEscape(why), nil, nil)
		},
	}
	cmd.Flags().StringVar(&why, "reason", "", "why, for the record")
	return cmd
}

// frames shows a command's frames until its end. The error carries the command's own exit code.
func (a *app) frames(ctx context.Context, route string, in any) error {
	var exit *wire.ExecExit
	err := a.stream(ctx, instance.Sandboxd, route, in, func(line json.RawMessage) error {
		var frame wire.ExecFrame
		if err := json.Unmarshal(line, &frame); err != nil {
			return err
		}
		if frame.Exit != nil {
			exit = frame.Exit
		}
		return a.frame(ctx, line, frame)
	})
	if err != nil {
		return err
	}
	if exit == nil {
		return errors.New("the connection to sandboxd ended before the command did: see `tagout list`")
	}
	return exitOf(*exit)
}

// detached starts a command that nobody waits for, and prints its id.
func (a *app) detached(ctx context.Context, route string, req wire.ExecRequest) error {
	return a.stream(ctx, instance.Sandboxd, route, req, func(line json.RawMessage) error {
		var frame wire.ExecFrame
		if err := json.Unmarshal(line, &frame); err != nil {
			return err
		}
		if a.json {
			return a.frame(ctx, line, frame)
		}
		_, err := fmt.Fprintln(a.out, frame.ID)
		return err
	})
}
