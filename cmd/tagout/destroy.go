package main

import (
	"context"
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
)

func (a *app) destroyCommand() *cobra.Command {
	var why string
	cmd := &cobra.Command{
		Use: "destroy KID --reason WHY", Short: "Remove a kid with everything in it", Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "reason"); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), destroyLimit)
			defer cancel()
			if err := a.destroy(ctx, args[0], why); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"kid": args[0], "state": "gone"})
			}
			a.printf("there is no kid %s any more\n", args[0])
			return nil
		},
	}
	cmd.Flags().StringVar(&why, "reason", "", "why, for the record")
	return cmd
}

func (a *app) destroy(ctx context.Context, kid, why string) error {
	return a.callWith(ctx, instance.Sandboxd, http.MethodDelete, "/v1/kids/"+url.PathEscape(kid)+"?reason="+url.QueryEscape(why), nil, nil)
}
