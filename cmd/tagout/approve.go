package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/session"
	"tagout/internal/wire"
)

func (a *app) approveCommand() *cobra.Command {
	var s signer
	var name, purpose, by string
	cmd := &cobra.Command{
		Use:   "approve CARD --name KID --key FILE",
		Short: "Sign that one kid may live on the machine's own network",
		Long: `Sign that one kid of a card with ` + "`network: host`" + ` may live on the machine's own network, and
print that. ` + "`tagout spawn --approval`" + ` and ` + "`tagout run --approval`" + ` take it: for this card, name and
purpose, on this box, once, and within two minutes. Whoever signs needs the role
host-network on the box's authority list. Away from the box, give --box and --by.`,
		Args: wants("CARD"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "name", "key"); err != nil {
				return err
			}
			c, raw, err := readCard(args[0])
			if err != nil {
				return err
			}
			if c.Network != session.NetworkHost {
				return usage(fmt.Errorf("%s: the card does not say `network: host`: its kids need no approval", args[0]))
			}
			if purpose == "" {
				purpose = c.Task
			}
			order, err := s.sign(a, authority.Order{
				Action: authority.ActionHost, Kid: name, Card: authority.CardSum(string(raw)), By: by, Reason: authority.Purpose(purpose),
			})
			if err != nil {
				return err
			}
			return a.printOrder(order)
		},
	}
	s.keyFlagsFor(cmd, authority.HostLife, authority.HostLife)
	cmd.Flags().StringVar(&name, "name", "", "the kid's name")
	cmd.Flags().StringVar(&purpose, "purpose", "", "why it runs, for the record (default: the card's task)")
	cmd.Flags().StringVar(&by, "by", "", "whose key it is (default: the box's list says)")
	return cmd
}

// approved puts an approval into the request, and takes from it what the request does not say.
func (a *app) approved(file string, req *wire.SpawnRequest) error {
	if file == "" {
		return nil
	}
	raw, err := a.readInput(file, authority.MaxNote+1)
	if err != nil {
		return usage(fmt.Errorf("reading the approval: %w", err))
	}
	req.Approval = string(raw)
	req.Purpose = authority.Purpose(req.Purpose)
	o := authority.PeekOrder(raw) // sandboxd judges it
	if req.Name == "" {
		req.Name = o.Kid
	}
	if req.Purpose == "" {
		req.Purpose = o.Reason
	}
	return nil
}
