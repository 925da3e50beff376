package main

import (
	"net/http"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) releaseCommand() *cobra.Command {
	var req wire.ReleaseRequest
	cmd := &cobra.Command{
		Use: "release STOP --by NAME --reason WHY", Short: "Take a tag off; nothing is restarted by it", Args: wants("STOP"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "by", "reason"); err != nil {
				return err
			}
			req.Stop = args[0]
			var tag wire.Tag
			if err := a.call(cmd, instance.Killswitchd, http.MethodPost, "/v1/release", req, &tag); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(tag)
			}
			a.printf("the tag of stop %s on %s is off; nothing was restarted\n", tag.Stop, scopeText(tag.Scope))
			return nil
		},
	}
	cmd.Flags().StringVar(&req.By, "by", "", "who releases it: whoever placed it")
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why")
	return cmd
}
