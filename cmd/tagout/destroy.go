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
		Use: "destroy KID --reason WHY", Short: "Remove a kid with everything in it", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "reason"); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), destroyLimit)
			defer cancel()
			return a.destroy(ctx, args[0], why)
		},
	}
	cmd.Flags().StringVar(&why, "reason", "", "why, for the record")
	return cmd
}

func (a *app) destroy(ctx context.Context, kid, why string) error {
	return a.callWith(ctx, instance.Sandboxd, http.MethodDelete, "/v1/kids/"+url.PathEscape(kid)+"?reason="+url.QueryEscape(why), nil, nil)
}
