package main

import (
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) pauseCommand() *cobra.Command {
	return a.changeCommand("pause", "paused", "Freeze a kid: nothing in it runs until it is resumed; it can be stopped and destroyed")
}

func (a *app) resumeCommand() *cobra.Command {
	return a.changeCommand("resume", "running", "Let a paused kid go on, unless a tag hangs on it")
}

func (a *app) changeCommand(verb, state, short string) *cobra.Command {
	var why string
	cmd := &cobra.Command{
		Use: verb + " KID", Short: short, Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			route := "/v1/kids/" + url.PathEscape(args[0]) + "/" + verb
			if err := a.call(cmd, instance.Sandboxd, http.MethodPost, route, wire.ChangeRequest{Reason: why}, nil); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"kid": args[0], "state": state})
			}
			a.printf("kid %s is %s\n", args[0], state)
			return nil
		},
	}
	cmd.Flags().StringVar(&why, "reason", "", "why, for the record")
	return cmd
}
