package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tagout/internal/wire"
)

// maxStdin bounds the input of a command: it travels in one request body (control.MaxBody) as base64.
const maxStdin = 3 << 20

// execFlags are what exec and run have in common.
type execFlags struct {
	env     map[string]string
	dir     string
	timeout time.Duration
	stdin   bool
	detach  bool // exec alone
}

func (f *execFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringToStringVar(&f.env, "env", nil, "environment of the command, KEY=value")
	cmd.Flags().StringVar(&f.dir, "dir", "", "working directory (default: /workspace)")
	cmd.Flags().DurationVar(&f.timeout, "timeout", 0, "kill the command after this long (default: never)")
	cmd.Flags().BoolVarP(&f.stdin, "stdin", "i", false, "send this command's standard input, up to 3 MiB")
}

func (a *app) execCommand() *cobra.Command {
	var f execFlags
	cmd := &cobra.Command{
		Use: "exec KID [flags] -- CMD...", Short: "Run a command in a kid and end with its exit code",
		Args: func(cmd *cobra.Command, args []string) error { return dashArgs(cmd, args, "KID") },
		RunE: func(cmd *cobra.Command, args []string) error { return a.exec(cmd.Context(), args[0], args[1:], f) },
	}
	f.add(cmd)
	cmd.Flags().BoolVarP(&f.detach, "detach", "d", false, "print the command's id and let it run on: see execs, attach and end")
	return cmd
}

// dashArgs wants one argument before "--" and a command after it.
func dashArgs(cmd *cobra.Command, args []string, what string) error {
	if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
		return fmt.Errorf("give %s, then --, then the command", what)
	}
	return nil
}

// exec runs argv in the kid. The error carries the command's own exit code.
func (a *app) exec(ctx context.Context, kid string, argv []string, f execFlags) error {
	req := wire.ExecRequest{Argv: argv, Env: f.env, Dir: f.dir, Timeout: f.timeout}
	if f.stdin {
		raw, err := io.ReadAll(io.LimitReader(a.in, maxStdin+1))
		if err != nil {
			return fmt.Errorf("reading standard input: %w", err)
		}
		if len(raw) > maxStdin {
			return usage(fmt.Errorf("standard input is longer than %d bytes: put it into the card's inputs", maxStdin))
		}
		req.Stdin = raw
	}
	route := "/v1/kids/" + url.PathEscape(kid) + "/exec"
	if f.detach {
		req.Detach = true
		return a.detached(ctx, route, req)
	}
	return a.frames(ctx, route, req)
}

// frame passes one frame on: as it came with --json, else as the command wrote it.
func (a *app) frame(line json.RawMessage, f wire.ExecFrame) error {
	if a.json {
		if _, err := fmt.Fprintf(a.out, "%s\n", line); err != nil {
			return unread("output", err)
		}
		return nil
	}
	if f.Lost > 0 {
		fmt.Fprintf(a.err, "tagout: %d bytes of the output are not kept\n", f.Lost) // nobody is left to be told
	}
	if f.Exit != nil && f.Exit.Cut {
		fmt.Fprintln(a.err, "tagout: something that the command left running still holds its output; what it writes from here on is not shown") // as above
	}
	if _, err := a.out.Write(f.Stdout); err != nil {
		return unread("output", err)
	}
	if _, err := a.err.Write(f.Stderr); err != nil {
		return unread("errors", err)
	}
	return nil
}

// unread ends the command whose output cannot be passed on; silently where its reader went away, as every
// program in a pipe does.
func unread(what string, err error) error {
	if errors.Is(err, unix.EPIPE) {
		return &coded{code: exitSignal + int(unix.SIGPIPE)}
	}
	return fmt.Errorf("writing the command's %s: %w", what, err)
}

// exitOf turns how a command ended into our own end. Only what the command itself did not say is told.
func exitOf(e wire.ExecExit) error {
	switch e.Result {
	case "exited":
		if e.Code == 0 {
			return nil
		}
		return &coded{code: e.Code}
	case "signaled":
		code := exitFailure
		if n := unix.SignalNum(e.Signal); n != 0 {
			code = exitSignal + int(n)
		}
		return &coded{code, fmt.Errorf("the command was ended by %s", e.Signal)}
	case "timeout":
		return &coded{exitTimeout, errors.New("the command took too long and was killed with all that it started")}
	case "killed":
		return &coded{e.Code, fmt.Errorf("the command was %s", e.Detail)}
	case "stopped":
		text := "the kid was stopped"
		if e.Detail != "" {
			text += ": " + e.Detail
		}
		return &coded{exitRefused, errors.New(text + ": see `tagout tags`")}
	}
	code := e.Code
	if code == 0 {
		code = exitFailure
	}
	return &coded{code, fmt.Errorf("the command could not be run: %s", e.Detail)}
}
