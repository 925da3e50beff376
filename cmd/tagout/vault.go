package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// maxSecret bounds a secret's value.
const maxSecret = 64 << 10

func (a *app) vaultCommand() *cobra.Command {
	cmd := group("vault", "Set, list and remove secrets; their values are never shown")
	cmd.AddCommand(a.vaultSetCommand(), a.vaultListCommand(), &cobra.Command{
		Use: "rm NAME", Short: "Remove a secret; its tokens stop working at once", Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := a.call(cmd, instance.Credd, http.MethodDelete, "/v1/vault/"+url.PathEscape(args[0]), nil, nil); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "stored": false})
			}
			a.printf("secret %s is gone, and its tokens work no more\n", args[0])
			return nil
		},
	})
	return cmd
}

func (a *app) vaultSetCommand() *cobra.Command {
	var hosts []string
	var canary bool
	cmd := &cobra.Command{
		Use:     "set NAME --host HOST:PORT",
		Aliases: []string{"put"},
		Short:   "Put the secret that standard input holds into the vault, for the named hosts only",
		Long: `Put a secret into the vault. Its value is read from standard input, never from the
command line, where every user of the machine could see it; one line end at its end
is left off.`,
		Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(hosts) == 0 && !canary {
				return usage(errors.New("--host is needed: a secret is bound to the hosts that it is for, as name:port"))
			}
			value, err := a.readSecret()
			if err != nil {
				return usage(err)
			}
			if err := a.call(cmd, instance.Credd, http.MethodPut, "/v1/vault/"+url.PathEscape(args[0]), wire.VaultEntry{Value: value, Hosts: hosts, Canary: canary}, nil); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "hosts": hosts, "canary": canary, "stored": true})
			}
			if canary {
				a.printf("secret %s is in the vault as a canary: every use is refused, and trips the rules on it\n", args[0])
				return nil
			}
			a.printf("secret %s is in the vault, for %s\n", args[0], strings.Join(hosts, ", "))
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&hosts, "host", nil, "host:port that the secret is for; may be given again")
	cmd.Flags().BoolVar(&canary, "canary", false, "a honeytoken: nobody has a reason to use it, so a trip rule on canaries stops whoever does")
	return cmd
}

// readSecret reads the value. A terminal is refused: what is typed there would be shown.
func (a *app) readSecret() (string, error) {
	if f, ok := a.in.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			return "", errors.New("the secret's value is read from standard input, which is a terminal: use `tagout vault set NAME --host HOST:PORT < FILE`")
		}
	}
	raw, err := io.ReadAll(io.LimitReader(a.in, maxSecret+1))
	if err != nil {
		return "", fmt.Errorf("reading the secret's value: %w", err)
	}
	raw = bytes.TrimSuffix(bytes.TrimSuffix(raw, []byte("\n")), []byte("\r"))
	switch {
	case len(raw) == 0:
		return "", errors.New("the secret's value is empty: pipe it into this command")
	case len(raw) > maxSecret:
		return "", fmt.Errorf("the secret's value is longer than %d bytes", maxSecret)
	}
	return string(raw), nil
}

func (a *app) vaultListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the secrets without their values", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			infos := []wire.VaultInfo{}
			if err := a.call(cmd, instance.Credd, http.MethodGet, "/v1/vault", nil, &infos); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(infos)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tHOSTS\tUPDATED")
			for _, i := range infos {
				hosts := strings.Join(i.Hosts, ",")
				if i.Canary {
					hosts = "(canary)"
				}
				fmt.Fprintf(w, "%s\t%s\t%s\n", i.Name, hosts, i.Updated.Format(time.RFC3339))
			}
			return w.Flush()
		},
	}
}
