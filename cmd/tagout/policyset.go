package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// policySetCommand is `tagout policy set`.
func (a *app) policySetCommand() *cobra.Command {
	var req wire.PolicyRequest
	cmd := &cobra.Command{
		Use:   "set KID --card FILE --by NAME --reason WHY",
		Short: "Give a living kid another card's egress rules; what they no longer allow is cut at once",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "card", "by", "reason"); err != nil {
				return err
			}
			raw, err := os.ReadFile(req.CardFile)
			if err != nil {
				return usage(fmt.Errorf("reading the card: %w", err))
			}
			req.Card = string(raw)
			var reply wire.PolicyReply
			if err := a.call(cmd, instance.Sandboxd, http.MethodPut, "/v1/kids/"+url.PathEscape(args[0])+"/policy", req, &reply); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(reply)
			}
			a.printf("kid %s is at generation %d of its policy; %d connections were cut\n", args[0], reply.Generation, reply.Cut)
			return nil
		},
	}
	cmd.Flags().StringVar(&req.CardFile, "card", "", "the card whose egress section counts from now on")
	cmd.Flags().StringVar(&req.By, "by", "", "who changes it: somebody with the role grant")
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why")
	return cmd
}
