package main

import (
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) grantCommand() *cobra.Command {
	var req wire.GrantRequest
	var sign signer
	cmd := &cobra.Command{
		Use:   "grant KID HOST:PORT --for DURATION (--key FILE | --by NAME) --reason WHY",
		Short: "Let a living kid reach one host and port for a while; a deny rule still wins",
		Long: `Let a living kid reach one host and port for a while. It takes the signature of somebody
with the role grant (--key); only on a box whose authority list has no key for that role
does a name do (--by).`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			signed, err := sign.needs(cmd, "for", "reason")
			if err != nil {
				return err
			}
			host, port, err := net.SplitHostPort(args[1])
			if err != nil {
				return usage(fmt.Errorf("%q: write HOST:PORT, like api.vendor.com:443", args[1]))
			}
			n, err := strconv.ParseUint(port, 10, 16)
			if err != nil || n == 0 {
				return usage(fmt.Errorf("port %q: write a number from 1 to 65535", port))
			}
			req.Host, req.Port = host, uint16(n)
			var g wire.Grant
			if signed {
				return a.changeSigned(cmd, &sign, authority.Order{Action: authority.ActionGrant, Kid: args[0], By: req.By, Reason: req.Reason,
					Door: authority.Door{Host: req.Host, Port: req.Port, Protocol: req.Protocol, For: req.For}}, wire.SignedOrder{})
			}
			if err := a.call(cmd, instance.Sandboxd, http.MethodPost, grantsRoute(args[0]), req, &g); err != nil {
				return err
			}
			return a.showGrant(g)
		},
	}
	cmd.Flags().DurationVar(&req.For, "for", 0, "how long, at most 24h")
	cmd.Flags().StringVar(&req.Protocol, "protocol", "", "tls, http or tcp (default: http on port 80, tls elsewhere)")
	cmd.Flags().StringVar(&req.By, "by", "", "who grants it: somebody with the role grant (with --key: whose key it is)")
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why")
	sign.flags(cmd)
	return cmd
}

func (a *app) showGrant(g wire.Grant) error {
	if a.json {
		return a.printJSON(g)
	}
	a.printf("%s:%d may be reached over %s until %s; take it back with `tagout ungrant KID %s --by NAME --reason WHY`\n",
		g.Host, g.Port, g.Protocol, g.Expires.Format(time.RFC3339), g.ID)
	return nil
}

func (a *app) grantsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "grants KID", Short: "List a kid's grants that hold", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var list []wire.Grant
			if err := a.call(cmd, instance.Sandboxd, http.MethodGet, grantsRoute(args[0]), nil, &list); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(list)
			}
			if len(list) == 0 {
				a.printf("kid %s has no grants\n", args[0])
				return nil
			}
			t := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(t, "GRANT\tHOST\tPROTOCOL\tUNTIL\tBY\tREASON")
			for _, g := range list {
				fmt.Fprintf(t, "%s\t%s:%d\t%s\t%s\t%s\t%s\n", g.ID, g.Host, g.Port, g.Protocol, g.Expires.Format(time.RFC3339), oneLine(g.By), oneLine(g.Reason))
			}
			return t.Flush()
		},
	}
}

func (a *app) ungrantCommand() *cobra.Command {
	var by, why string
	var sign signer
	cmd := &cobra.Command{
		Use: "ungrant KID GRANT (--by NAME | --key FILE) --reason WHY", Short: "Take a grant back and cut what lives on it", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			signed, err := sign.needs(cmd, "reason")
			if err != nil {
				return err
			}
			if signed {
				return a.changeSigned(cmd, &sign, authority.Order{Action: authority.ActionUngrant, Kid: args[0], Grant: args[1], By: by, Reason: why}, wire.SignedOrder{})
			}
			q := url.Values{"by": {by}, "reason": {why}}
			route := grantsRoute(args[0]) + "/" + url.PathEscape(args[1]) + "?" + q.Encode()
			if err := a.call(cmd, instance.Sandboxd, http.MethodDelete, route, nil, nil); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"grant": args[1]})
			}
			a.printf("grant %s of kid %s is gone; what lived on it is cut\n", args[1], args[0])
			return nil
		},
	}
	cmd.Flags().StringVar(&by, "by", "", "who takes it back (with --key: whose key it is)")
	cmd.Flags().StringVar(&why, "reason", "", "why")
	sign.flags(cmd)
	return cmd
}

func grantsRoute(kid string) string { return "/v1/kids/" + url.PathEscape(kid) + "/grants" }
