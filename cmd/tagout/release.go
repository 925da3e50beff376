package main

import (
	"fmt"
	"net/http"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) releaseCommand() *cobra.Command {
	var req wire.ReleaseRequest
	var sign signer
	cmd := &cobra.Command{
		Use:   "release STOP --key FILE --reason WHY",
		Short: "Take a tag off, with a signature; nothing is restarted by it",
		Long: `Take a tag off. Whoever placed it can do that alone; otherwise it takes two other people
with the role release: the first one's signature is kept on the tag, and the command
ends with 6; the second one's takes it off. ` + "`tagout tags`" + ` says who can release which tag.
Nothing is restarted by it.`,
		Args: wants("STOP"),
		RunE: func(cmd *cobra.Command, args []string) error {
			signed, err := sign.used(cmd)
			if err != nil {
				return err
			}
			if err := needFlags(cmd, "reason"); err != nil {
				return err
			}
			req.Stop = args[0]
			if !signed { // killswitchd says who could, and puts it on record
				return a.call(cmd, instance.Killswitchd, http.MethodPost, "/v1/release", req, nil)
			}
			return a.giveSigned(cmd, &sign, authority.Order{Action: authority.ActionRelease, Stop: req.Stop, By: req.By, Reason: req.Reason})
		},
	}
	cmd.Flags().StringVar(&req.By, "by", "", "whose key it is (default: as the box's list says)")
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why")
	sign.flags(cmd)
	return cmd
}

// showRelease says what a signed release came to.
func (a *app) showRelease(t wire.Tag) error {
	if a.json {
		if err := a.printJSON(t); err != nil {
			return err
		}
	}
	if t.Released.IsZero() {
		last := t.Approvals[len(t.Approvals)-1]
		return &coded{exitPending, fmt.Errorf("%s has approved, and the tag of stop %s on %s hangs on: %s", last.By, t.Stop, scopeText(t.Scope), t.CanRelease)}
	}
	if !a.json {
		a.printf("the tag of stop %s on %s is off, released by %s; nothing was restarted\n", t.Stop, scopeText(t.Scope), t.ReleasedBy)
	}
	return nil
}
