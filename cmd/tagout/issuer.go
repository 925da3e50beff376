package main

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) issuerCommand() *cobra.Command {
	cmd := group("issuer", "See and change the box's issuer of tokens for services of your own")
	client := group("client", "Make and remove the keys with which services ask the issuer over TCP")
	client.AddCommand(a.issuerClientAddCommand(), a.issuerClientRemoveCommand())
	cmd.AddCommand(a.issuerStatusCommand(), a.issuerRotateCommand(), client)
	return cmd
}

func (a *app) issuerStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the issuer, its signing keys and its clients; no key itself is shown", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var info wire.IssuerInfo
			if err := a.call(cmd, instance.Credd, http.MethodGet, "/v1/issuer", nil, &info); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(info)
			}
			a.printf("issuer        %s\ntrust domain  %s\nlifetime      %s at most\nlive tokens   %d\n\n", info.Issuer, info.TrustDomain, info.Lifetime, info.Live)
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "KEY\tALGORITHM\tSTATE\tSINCE")
			for _, k := range info.Keys {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", k.ID, k.Algorithm, k.State, k.Since.Format(time.RFC3339))
			}
			fmt.Fprintln(w, "\nCLIENT\tROLES\tMADE\tENDS")
			for _, c := range info.Clients {
				ends := "-"
				if !c.Ends.IsZero() {
					ends = c.Ends.Format(time.RFC3339)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", c.Name, strings.Join(c.Roles, ","), c.Made.Format(time.RFC3339), ends)
			}
			return w.Flush()
		},
	}
}

func (a *app) issuerRotateCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rotate-keys", Short: "Sign with the next key from now on; tokens of the old one stay good for their time", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var turn wire.IssuerRotation
			if err := a.call(cmd, instance.Credd, http.MethodPost, "/v1/issuer/rotate", nil, &turn); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(turn)
			}
			a.printf("key %s signs from now on\n", turn.Current)
			return nil
		},
	}
}

func (a *app) issuerClientAddCommand() *cobra.Command {
	var roles []string
	var valid time.Duration
	cmd := &cobra.Command{
		Use: "add NAME --role ROLE...", Short: "Make a key for a service and print it, once",
		Long: `Make a key for a service that asks the issuer over TCP, and print it. It is kept nowhere: of a
key that is lost, make another. Roles are introspect (ask whether a token is active) and revoke
(revoke tokens). docs/credentials.md says how a service uses it.`,
		Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(roles) == 0 {
				return usage(errors.New("--role is needed: introspect, revoke, or both"))
			}
			if valid < 0 {
				return usage(errors.New("--for: give a positive duration, or none"))
			}
			req := wire.IssuerClientRequest{Name: args[0], Roles: roles}
			if valid > 0 {
				req.Ends = time.Now().Add(valid).Truncate(time.Second)
			}
			var reply wire.IssuerClientReply
			if err := a.call(cmd, instance.Credd, http.MethodPost, "/v1/issuer/clients", req, &reply); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "roles": roles, "key": reply.Key})
			}
			a.printf("%s\n", reply.Key)
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&roles, "role", nil, "what the key lets: introspect, revoke; may be given again")
	cmd.Flags().DurationVar(&valid, "for", 0, "how long it is good (default: until it is removed)")
	return cmd
}

func (a *app) issuerClientRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Remove a service's key; it counts no more from the next request on", Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.call(cmd, instance.Credd, http.MethodDelete, "/v1/issuer/clients/"+url.PathEscape(args[0]), nil, nil); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "kept": false})
			}
			a.printf("client %s counts no more\n", args[0])
			return nil
		},
	}
}
