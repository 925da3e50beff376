package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/control"
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
	return c.Call(ctx, method, route, in, out)
}

// stream sends in and calls fn with each line of the answer. It has no deadline but the command's own end.
func (a *app) stream(ctx context.Context, daemon, route string, in any, fn func(json.RawMessage) error) error {
	inst, err := a.open()
	if err != nil {
		return err
	}
	c := control.NewClient(inst.Socket(daemon))
	defer c.CloseIdle()
	return c.Each(ctx, http.MethodPost, route, in, fn)
}

// needFlags refuses empty values of the named flags.
func needFlags(cmd *cobra.Command, names ...string) error {
	for _, n := range names {
		if v, err := cmd.Flags().GetString(n); err != nil || v == "" {
			return usage(fmt.Errorf("--%s is needed: see `%s --help`", n, cmd.CommandPath()))
		}
	}
	return nil
}
