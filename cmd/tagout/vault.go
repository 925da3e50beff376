package main

import (
	"cmp"
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

func (a *app) vaultCommand() *cobra.Command {
	cmd := group("vault", "Set, list, rotate and remove secrets, and seal the vault; values are never shown")
	cmd.AddCommand(a.vaultSetCommand(), a.vaultListCommand(), a.vaultRemoveCommand(), a.vaultRotateCommand(), a.vaultRecipientsCommand(),
		a.vaultSealCommand(), a.vaultUnlockCommand())
	for _, sub := range cmd.Commands() {
		// What is wrong with a flag is said without the flag's text: somebody may have written a value there.
		sub.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
			if strings.HasPrefix(err.Error(), "flag needs an argument: --") {
				return err
			}
			return errors.New("a flag is unknown or cannot be read, and is not repeated here: it may be a secret in the wrong place, where others have seen it")
		})
	}
	return cmd
}

func (a *app) vaultRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use: "rm NAME", Short: "Remove a secret; its tokens stop working at once", Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.call(cmd, instance.Credd, http.MethodDelete, secretRoute(args[0]), nil, nil); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "stored": false})
			}
			a.printf("secret %s is gone, and its tokens work no more\n", args[0])
			return nil
		},
	}
}

func (a *app) vaultListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the secrets without their values", Args: wants(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			infos := []wire.VaultInfo{}
			if err := a.call(cmd, instance.Credd, http.MethodGet, "/v1/vault", nil, &infos); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(infos)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tHOSTS\tAS\tMETHODS\tPATHS\tLEASE\tVERSION\tUPDATED")
			for _, i := range infos {
				hosts := strings.Join(i.Hosts, ",")
				if i.Canary {
					hosts = "(canary)"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", i.Name, hosts, asText(i.Present), orAny(i.Methods), orAny(i.Paths), cmp.Or(i.Lease, "-"), i.Version, i.Updated.Format(time.RFC3339))
			}
			return w.Flush()
		},
	}
}

func orAny(list []string) string {
	if len(list) == 0 {
		return "any"
	}
	return strings.Join(list, ",")
}

func (a *app) vaultRecipientsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "export-recipients", Short: "Print the vault's public recipients, to which backups and others can encrypt (age -R)", Args: wants(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var state wire.VaultState
			if err := a.call(cmd, instance.Credd, http.MethodGet, "/v1/vault-state", nil, &state); err != nil {
				return err
			}
			if !state.Open {
				return &coded{exitUnreachable, errors.New("the vault is sealed: open it with `tagout vault unlock` first")}
			}
			if a.json {
				return a.printJSON(state)
			}
			for _, r := range state.Recipients {
				a.printf("%s\n", r)
			}
			return nil
		},
	}
}

func secretRoute(name string) string { return "/v1/vault/" + url.PathEscape(name) }
