package main

import (
	"fmt"
	"net/http"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) listCommand() *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use: "list", Short: "List the living kids", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.list(cmd, all) },
	}
	cmd.Flags().BoolVar(&all, "all", false, "list also the kids with which killswitchd proves its stop layers")
	return cmd
}

func (a *app) list(cmd *cobra.Command, all bool) error {
	kids := []wire.Kid{}
	route := "/v1/kids"
	if all {
		route += "?all=1"
	}
	if err := a.call(cmd, instance.Sandboxd, http.MethodGet, route, nil, &kids); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(kids)
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KID\tSTATE\tCARD\tADDRESS\tAGE\tPURPOSE")
	for _, k := range kids {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", k.Name, k.State, k.Card, address(k), time.Since(k.Created).Round(time.Second), oneLine(k.Purpose))
	}
	return w.Flush()
}

// address is where the kid is, for people.
func address(k wire.Kid) string {
	switch {
	case k.Approval != nil:
		return "the machine's, approved by " + k.Approval.By
	case !k.Addr.IsValid():
		return "none"
	}
	return k.Addr.String()
}
