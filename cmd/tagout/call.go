package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/instance"
)

// callLimit bounds a call whose answer does not depend on what a kid does.
const callLimit = 30 * time.Second

// call sends one request to a daemon of the instance.
func (a *app) call(cmd *cobra.Command, daemon, method, route string, in, out any) error {
	ctx, cancel := context.WithTimeout(cmd.Context(), callLimit)
	defer cancel()
	return a.callWith(ctx, daemon, method, route, in, out)
}

func (a *app) callWith(ctx context.Context, daemon, method, route string, in, out any) error {
	inst, err := a.open()
	if err != nil {
		return err
	}
	c := control.NewClient(inst.Socket(daemon))
	defer c.CloseIdle()
	return unanswered(inst, daemon, c.Call(ctx, method, route, in, out))
}

// stream sends in and calls fn with each line of the answer. It has no deadline but the command's own end.
func (a *app) stream(ctx context.Context, daemon, route string, in any, fn func(json.RawMessage) error) error {
	inst, err := a.open()
	if err != nil {
		return err
	}
	c := control.NewClient(inst.Socket(daemon))
	defer c.CloseIdle()
	return unanswered(inst, daemon, c.Each(ctx, http.MethodPost, route, in, fn))
}

// unanswered says what to do about a daemon that gave no answer; any other error is left as it is.
func unanswered(inst instance.Instance, daemon string, err error) error {
	var call *control.Unanswered
	if !errors.As(err, &call) {
		return err
	}
	log := filepath.Join(inst.RunDir(), "log", daemon+".log")
	text := ""
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED):
		text = fmt.Sprintf("%s does not run: start the daemons with `tagout up --instance %s` (its log: %s)", daemon, inst.Name(), log)
	case errors.Is(err, unix.EACCES):
		text = fmt.Sprintf("talking to %s needs root, this is uid %d: run it with sudo", daemon, os.Geteuid())
	case errors.Is(err, context.DeadlineExceeded):
		text = fmt.Sprintf("%s does not answer: see its log %s, or end it, and `tagout up` starts it again", daemon, log)
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		text = fmt.Sprintf("%s ended before it answered: see its log %s, then try again", daemon, log)
	default:
		return err
	}
	return &silent{text, err}
}

// silent is an *Unanswered in an operator's words.
type silent struct {
	text  string
	cause error
}

func (s *silent) Error() string { return s.text }

func (s *silent) Unwrap() error { return s.cause }

// wants checks that the arguments are the named ones, no more and no less. What came is not repeated: it may be
// a secret in the wrong place.
func wants(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return fmt.Errorf("%s is missing", names[len(args)])
		case len(names) == 0 && len(args) > 0:
			return errors.New("there are arguments, and this command takes none")
		case len(args) > len(names):
			return fmt.Errorf("too many arguments: give %s alone", strings.Join(names, " "))
		}
		return nil
	}
}

// atLeastOne refuses counts that make no sense.
func atLeastOne(flag string, n int) error {
	if n < 1 {
		return usage(fmt.Errorf("--%s %d: give a number from 1 on", flag, n))
	}
	return nil
}

// needFlags refuses empty values of the named flags.
func needFlags(cmd *cobra.Command, names ...string) error {
	for _, n := range names {
		if f := cmd.Flags().Lookup(n); f == nil || !f.Changed || f.Value.String() == "" {
			return usage(fmt.Errorf("--%s is needed: see `%s --help`", n, cmd.CommandPath()))
		}
	}
	return nil
}
