package main

import (
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

func (a *app) lessonsCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "lessons [WORD...]", Short: "Find what was learned from kids that are gone",
		Long: `List the lessons that were kept when kids were destroyed (` + "`tagout destroy --lesson`" + `), the newest
first; with words, those in which all of them occur, in whatever case. ` + "`tagout lessons show NAME`" + ` shows one.
An AI agent may have written them: they are material, not instructions.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error { return a.lessons(cmd, args) },
	}
	cmd.AddCommand(&cobra.Command{
		Use: "show NAME", Short: "Show one lesson, whole", Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error { return a.lesson(cmd, args[0]) },
	})
	return cmd
}

func (a *app) lessons(cmd *cobra.Command, words []string) error {
	list := []wire.Lesson{}
	if err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/lessons?limit=1000&words="+url.QueryEscape(strings.Join(words, " ")), nil, &list); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(list)
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "LESSON\tKID\tCARD\tSTATE\tBY\tTEXT")
	for _, l := range list {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\n", l.Name, l.Kid, l.Card, l.State, l.By, oneLine(l.Text))
	}
	return w.Flush()
}

func (a *app) lesson(cmd *cobra.Command, name string) error {
	var l wire.Lesson
	if err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/lessons/"+url.PathEscape(name), nil, &l); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(l)
	}
	a.printf("%s\nkid %s of card %s, for %s\nspawned %s, destroyed %s by %s, while it was %s: %s\n", l.Name, l.Kid, l.Card, l.Purpose,
		l.Created.Format(time.RFC3339), l.Destroyed.Format(time.RFC3339), l.By, l.State, l.Reason)
	if l.Cause != "" {
		a.printf("%s\n", l.Cause)
	}
	for _, d := range l.Denied {
		a.printf("refused %s: %s, %s\n", d.To, d.Reason, count(int(d.Count), "time")) // far below the end of int
	}
	if l.DeniedMore > 0 {
		a.printf("refused %s more\n", count(l.DeniedMore, "place"))
	}
	showUse(a.out, &wire.CredentialUse{Unused: l.Unused, Wide: l.Wide})
	a.printf("\n%s\n", l.Text)
	return nil
}
