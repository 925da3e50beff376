package main

import (
	"fmt"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) tagsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "tags", Short: "List the tags that hang, with who placed them and why", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			tags := []wire.Tag{}
			if err := a.call(cmd, instance.Killswitchd, http.MethodGet, "/v1/tags", nil, &tags); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(tags)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "STOP\tSCOPE\tLAYERS\tSTATE\tBY\tPLACED\tREASON\tRELEASE")
			for _, t := range tags {
				state := string(t.State)
				if state == "" {
					state = "-" // under way, or older than this killswitchd
				}
				fmt.Fprintf(w, "%s\t%s\t%v\t%s\t%s\t%s\t%s\t%s\n", t.Stop, scopeText(t.Scope), t.Layers, state, placedBy(t), t.Placed.Format(time.RFC3339), oneLine(t.Reason), t.CanRelease)
			}
			return w.Flush()
		},
	}
}

// placedBy says who or what placed a tag, and what vouches for the name.
func placedBy(t wire.Tag) string {
	switch {
	case t.Order != "":
		return oneLine(t.By) + " (signed)"
	case t.Peer != "":
		return fmt.Sprintf("%s (unsigned, %s)", oneLine(t.By), t.Peer)
	}
	return fmt.Sprintf("%s (%s)", oneLine(t.By), t.Cause)
}

// oneLine makes a text that anybody may have written fit for a terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}

func scopeText(s wire.Scope) string {
	switch {
	case s.Kid != "":
		return "kid " + s.Kid
	case s.Card != "":
		return "card " + s.Card
	}
	return "the whole box"
}
