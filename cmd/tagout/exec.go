package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tagout/internal/wire"
)

// maxStdin bounds the input of a detached command: it travels in one request body (control.MaxBody) as base64.
const maxStdin = 3 << 20

// execFlags are what exec and run have in common.
type execFlags struct {
	shell   string
	env     []string
	workdir string
	timeout time.Duration
	stdin   bool
	tty     bool
	detach  bool // exec alone
	keys    detachKeys
}

func (f *execFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.shell, "shell", "", "run this line with /bin/sh, in place of a command after --")
	cmd.Flags().StringArrayVar(&f.env, "env", nil, "environment of the command, KEY=value; may be repeated")
	cmd.Flags().StringVarP(&f.workdir, "workdir", "w", "", "working directory (default: /workspace)")
	cmd.Flags().DurationVar(&f.timeout, "timeout", 0, "kill the command after this long (default: never)")
	cmd.Flags().BoolVarP(&f.stdin, "stdin", "i", false, "send this command's standard input as it comes, byte for byte, until it ends")
	cmd.Flags().BoolVarP(&f.tty, "tty", "t", false, "give the command a terminal; where standard input is one, what is typed and the size go to it")
}

func (a *app) execCommand() *cobra.Command {
	f := execFlags{keys: defaultDetachKeys()}
	cmd := &cobra.Command{
		Use: "exec KID [flags] -- CMD...", Short: "Run a command in a kid and end with its exit code",
		Example: `  tagout exec KID -t -- bash                  # a shell; ctrl-] d leaves it running: see attach
  tar c data | tagout exec KID -i -- tar x    # input goes in as it comes
  tagout exec KID --shell 'ls | wc -l'
  tagout exec KID -d -t -- bash               # nobody waits for it: attach goes there`,
		Args: func(cmd *cobra.Command, args []string) error { return commandArgs(cmd, args, "KID") },
		RunE: func(cmd *cobra.Command, args []string) error { return a.exec(cmd.Context(), args[0], args[1:], f) },
	}
	f.add(cmd)
	cmd.Flags().BoolVarP(&f.detach, "detach", "d", false, "print the command's id and let it run on: see execs, attach and end; -i sends up to 3 MiB first, -t leaves a terminal to attach to")
	f.keys.add(cmd)
	return cmd
}

// commandArgs wants one argument before "--" and a command after it, or none and --shell.
func commandArgs(cmd *cobra.Command, args []string, what string) error {
	if cmd.Flags().Changed("shell") {
		if len(args) != 1 {
			return fmt.Errorf("give %s and --shell alone: the line is the command", what)
		}
		return nil
	}
	if cmd.ArgsLenAtDash() != 1 || len(args) < 2 {
		return fmt.Errorf("give %s, then --, then the command", what)
	}
	return nil
}

// exec runs argv, or the shell's line, in the kid. The error carries the command's own exit code.
func (a *app) exec(ctx context.Context, kid string, argv []string, f execFlags) error {
	req, err := f.request(argv)
	if err != nil {
		return err
	}
	route := "/v1/kids/" + url.PathEscape(kid) + "/exec"
	term := a.terminal()
	if f.tty {
		req.TTY = term.size()
	}
	switch {
	case f.detach:
		req.Detach, req.Input = true, f.tty
		if req.Stdin, err = a.firstInput(f.stdin); err != nil {
			return err
		}
		return a.detached(ctx, route, req)
	case f.stdin || f.tty:
		t := talk{kid: kid, route: route, first: &req, keys: f.keys}
		if f.tty && term.in != nil {
			t.raw = term
		}
		req.Input = f.stdin || t.raw != nil
		return a.talk(ctx, t)
	}
	return a.frames(ctx, route, req)
}

func (f *execFlags) request(argv []string) (wire.ExecRequest, error) {
	req := wire.ExecRequest{Argv: argv, Shell: f.shell, Dir: f.workdir, Timeout: f.timeout, Env: map[string]string{}}
	for _, e := range f.env {
		name, value, ok := strings.Cut(e, "=")
		if !ok || name == "" {
			return wire.ExecRequest{}, usage(fmt.Errorf("--env: give KEY=value")) // the text may be a secret
		}
		req.Env[name] = value
	}
	if kind := os.Getenv("TERM"); f.tty && kind != "" && !slices.ContainsFunc(f.env, func(e string) bool { return strings.HasPrefix(e, "TERM=") }) {
		req.Env["TERM"] = kind
	}
	return req, nil
}

// firstInput is standard input as a whole, where it is wanted.
func (a *app) firstInput(wanted bool) ([]byte, error) {
	if !wanted {
		return nil, nil
	}
	raw, err := io.ReadAll(io.LimitReader(a.in, maxStdin+1))
	if err != nil {
		return nil, fmt.Errorf("reading standard input: %w", err)
	}
	if len(raw) > maxStdin {
		return nil, usage(fmt.Errorf("standard input is longer than %d bytes: `tagout put` takes it into the kid", maxStdin))
	}
	return raw, nil
}

// frame passes one frame on: as it came with --json, else as the command wrote it.
func (a *app) frame(ctx context.Context, line json.RawMessage, f wire.ExecFrame) error {
	if a.json {
		return unread("output", write(ctx, a.out, append(slices.Clip(line), '\n')))
	}
	if f.Lost > 0 {
		end := "\n"
		if a.terminal().out != nil {
			end = "\r\n" // it may be the command's
		}
		fmt.Fprintf(a.err, "tagout: %d bytes of the output are not kept%s", f.Lost, end) // nobody is left to be told
	}
	if f.Exit != nil && f.Exit.Cut {
		fmt.Fprintln(a.err, "tagout: something that the command left running still holds its output; what it writes from here on is not shown") // as above
	}
	if err := unread("output", write(ctx, a.out, f.Stdout)); err != nil {
		return err
	}
	return unread("errors", write(ctx, a.err, f.Stderr))
}

// write waits for whoever reads only as long as ctx lasts. p must not change any more.
func write(ctx context.Context, w io.Writer, p []byte) error {
	if len(p) == 0 {
		return nil
	}
	done := make(chan error, 1)
	go func() {
		_, err := w.Write(p)
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// unread ends the command whose output cannot be passed on; silently where its reader went away, as every
// program in a pipe does.
func unread(what string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.EPIPE):
		return &coded{code: exitSignal + int(unix.SIGPIPE)}
	case errors.Is(err, context.Canceled):
		return &coded{code: exitInterrupted}
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
	if e.Result == "unknown" {
		return &coded{exitFailure, errors.New(e.Detail)}
	}
	code := e.Code
	if code == 0 {
		code = exitFailure
	}
	return &coded{code, fmt.Errorf("the command could not be run: %s", e.Detail)}
}
