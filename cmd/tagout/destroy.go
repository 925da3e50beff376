package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) destroyCommand() *cobra.Command {
	var why, lesson string
	cmd := &cobra.Command{
		Use: "destroy KID --reason WHY", Short: "Remove a kid with everything in it", Args: wants("KID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "reason"); err != nil {
				return err
			}
			if cmd.Flags().Changed("lesson") && strings.TrimSpace(lesson) == "" {
				return usage(errors.New("--lesson: there is nothing in it: say what was learned, or leave it out"))
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), destroyLimit)
			defer cancel()
			done, err := a.destroyWith(ctx, args[0], why, lesson)
			if err != nil {
				return err
			}
			if a.json {
				gone := map[string]any{"kid": args[0], "state": "gone"}
				if done.Lesson != "" {
					gone["lesson"] = done.Lesson
				}
				if done.Credentials != nil {
					gone["credentials"] = done.Credentials
				}
				return a.printJSON(gone)
			}
			a.printf("there is no kid %s any more\n", args[0])
			showUse(a.out, done.Credentials)
			if done.Lesson != "" {
				a.printf("its lesson is kept: tagout lessons show %s\n", done.Lesson)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&why, "reason", "", "why, for the record")
	cmd.Flags().StringVar(&lesson, "lesson", "", "what was learned, as Markdown: kept as a note, with secrets taken out")
	return cmd
}

// destroyWith destroys a kid, and keeps a lesson unless that is empty.
func (a *app) destroyWith(ctx context.Context, kid, why, lesson string) (wire.DestroyReply, error) {
	var done wire.DestroyReply
	err := a.callWith(ctx, instance.Sandboxd, http.MethodPost, "/v1/kids/"+url.PathEscape(kid)+"/destroy", wire.DestroyRequest{Reason: why, Lesson: lesson}, &done)
	return done, err
}

// showUse says what a kid was granted and did not need, a line each; nothing where all was needed, or nobody knows.
func showUse(w io.Writer, use *wire.CredentialUse) {
	if use == nil {
		return
	}
	if len(use.Unused) > 0 {
		fmt.Fprintf(w, "granted and never used: %s\n", oneLine(strings.Join(use.Unused, ", "))) // nobody is left to be told
	}
	for _, wide := range use.Wide {
		fmt.Fprintf(w, "wider than its use: %s\n", oneLine(wide.String())) // as above
	}
}

func (a *app) destroy(ctx context.Context, kid, why string) error {
	return a.callWith(ctx, instance.Sandboxd, http.MethodDelete, "/v1/kids/"+url.PathEscape(kid)+"?reason="+url.QueryEscape(why), nil, nil)
}
