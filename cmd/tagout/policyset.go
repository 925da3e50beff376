package main

import (
	"fmt"
	"net/http"
	"net/url"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// policySetCommand is `tagout policy set`.
func (a *app) policySetCommand() *cobra.Command {
	var req wire.PolicyRequest
	var sign signer
	cmd := &cobra.Command{
		Use:   "set KID --card FILE (--key FILE | --by NAME) --reason WHY",
		Short: "Give a living kid another card's egress rules; what they no longer allow is cut at once",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			signed, err := sign.needs(cmd, "card", "reason")
			if err != nil {
				return err
			}
			raw, err := os.ReadFile(req.CardFile)
			if err != nil {
				return usage(fmt.Errorf("reading the card: %w", err))
			}
			req.Card = string(raw)
			if signed {
				return a.changeSigned(cmd, &sign, authority.Order{Action: authority.ActionPolicy, Kid: args[0], Card: authority.CardSum(req.Card), By: req.By, Reason: req.Reason},
					wire.SignedOrder{Card: req.Card, CardFile: req.CardFile})
			}
			var reply wire.PolicyReply
			if err := a.call(cmd, instance.Sandboxd, http.MethodPut, "/v1/kids/"+url.PathEscape(args[0])+"/policy", req, &reply); err != nil {
				return err
			}
			return a.showPolicy(reply)
		},
	}
	cmd.Flags().StringVar(&req.CardFile, "card", "", "the card whose egress section counts from now on")
	cmd.Flags().StringVar(&req.By, "by", "", "who changes it: somebody with the role grant (with --key: whose key it is)")
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why")
	sign.flags(cmd)
	return cmd
}

func (a *app) showPolicy(reply wire.PolicyReply) error {
	if a.json {
		return a.printJSON(reply)
	}
	a.printf("the kid is at generation %d of its policy; %d connections were cut\n", reply.Generation, reply.Cut)
	return nil
}
