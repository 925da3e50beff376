package main

import (
	"github.com/spf13/cobra"

	"tagout/sandboxd/api"
)

func (a *app) openapiCommand() *cobra.Command {
	return &cobra.Command{
		Use: "openapi", Short: "Print the HTTP API's description (OpenAPI 3.1)", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			raw, err := api.New(api.Config{}).Document()
			if err != nil {
				return err
			}
			_, err = a.out.Write(raw)
			return err
		},
	}
}
