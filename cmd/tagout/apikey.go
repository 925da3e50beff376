package main

import (
	"errors"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/apikey"
	"tagout/internal/audit"
	"tagout/internal/instance"
)

func (a *app) apikeyCommand() *cobra.Command {
	cmd := group("apikey", "Make, list and remove the keys with which clients call the API over TCP")
	cmd.AddCommand(a.apikeyAddCommand(), a.apikeyListCommand(), &cobra.Command{
		Use: "rm NAME", Short: "Remove a key; it counts no more from the next request on", Args: wants("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			inst, err := a.openAsRoot("removing an API key")
			if err != nil {
				return err
			}
			found, err := apikey.Remove(inst.APIKeyFile(), args[0])
			if err == nil && !found {
				err = usage(fmt.Errorf("there is no key %s: see `tagout apikey ls`", args[0]))
			}
			if err != nil {
				return err
			}
			a.record(inst, audit.Record{Event: audit.EventKeyRemoved, Fields: map[string]string{"name": args[0]}})
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "kept": false})
			}
			a.printf("key %s counts no more\n", args[0])
			return nil
		},
	})
	return cmd
}

func (a *app) openAsRoot(what string) (instance.Instance, error) {
	if err := needRoot(what); err != nil {
		return instance.Instance{}, err
	}
	return a.open()
}

func (a *app) apikeyAddCommand() *cobra.Command {
	var roles []string
	var valid time.Duration
	cmd := &cobra.Command{
		Use: "add NAME --role ROLE...", Short: "Make a key and print it, once",
		Long: `Make a key for a client of the API and print it. It is kept nowhere: of a key that is
lost, make another. Roles are ` + roleWords() + `;
give a key no more than its client needs. docs/api.md says what each lets.`,
		Args: wants("NAME"),
		RunE: func(_ *cobra.Command, args []string) error {
			if len(roles) == 0 {
				return usage(errors.New("--role is needed: one of " + roleWords()))
			}
			if valid < 0 {
				return usage(errors.New("--for: give a positive duration, or none"))
			}
			inst, err := a.openAsRoot("making an API key")
			if err != nil {
				return err
			}
			var given []apikey.Role
			for _, r := range roles {
				given = append(given, apikey.Role(r))
			}
			var ends time.Time
			if valid > 0 {
				ends = time.Now().Add(valid).Truncate(time.Second)
			}
			secret, err := apikey.Add(inst.APIKeyFile(), args[0], given, ends)
			if err != nil {
				return usage(err)
			}
			fields := map[string]string{"name": args[0], "roles": strings.Join(roles, ",")}
			if !ends.IsZero() {
				fields["ends"] = ends.UTC().Format(time.RFC3339)
			}
			a.record(inst, audit.Record{Event: audit.EventKeyAdded, Fields: fields})
			if a.json {
				return a.printJSON(map[string]any{"name": args[0], "roles": roles, "key": secret})
			}
			a.printf("%s\n", secret)
			return nil
		},
	}
	cmd.Flags().StringSliceVar(&roles, "role", nil, "what the key lets; may be given again")
	cmd.Flags().DurationVar(&valid, "for", 0, "how long it is good (default: until it is removed)")
	return cmd
}

func roleWords() string {
	var words []string
	for _, r := range apikey.Roles() {
		words = append(words, string(r))
	}
	return strings.Join(words, ", ")
}

func (a *app) apikeyListCommand() *cobra.Command {
	return &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the keys by name; the keys themselves are kept nowhere", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			inst, err := a.openAsRoot("listing the API keys")
			if err != nil {
				return err
			}
			keys, err := apikey.Load(inst.APIKeyFile())
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(append([]apikey.Key{}, keys...))
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tROLES\tMADE\tENDS")
			for _, k := range keys {
				ends := "-"
				if !k.Ends.IsZero() {
					ends = k.Ends.Format(time.RFC3339)
				}
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", k.Name, strings.Join(strings.Fields(strings.Trim(fmt.Sprint(k.Roles), "[]")), ","), k.Made.Format(time.RFC3339), ends)
			}
			return w.Flush()
		},
	}
}
