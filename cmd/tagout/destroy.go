package main

import (
	"context"
	"errors"
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
			kept, err := a.destroyWith(ctx, args[0], why, lesson)
			if err != nil {
				return err
			}
			if a.json {
				gone := map[string]string{"kid": args[0], "state": "gone"}
				if kept != "" {
					gone["lesson"] = kept
				}
				return a.printJSON(gone)
			}
			a.printf("there is no kid %s any more\n", args[0])
			if kept != "" {
				a.printf("its lesson is kept: tagout lessons show %s\n", kept)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&why, "reason", "", "why, for the record")
	cmd.Flags().StringVar(&lesson, "lesson", "", "what was learned, as Markdown: kept as a note, with secrets taken out")
	return cmd
}

// destroyWith returns the name of the note that was kept.
func (a *app) destroyWith(ctx context.Context, kid, why, lesson string) (string, error) {
	if lesson == "" {
		return "", a.destroy(ctx, kid, why)
	}
	var done wire.DestroyReply
	err := a.callWith(ctx, instance.Sandboxd, http.MethodPost, "/v1/kids/"+url.PathEscape(kid)+"/destroy", wire.DestroyRequest{Reason: why, Lesson: lesson}, &done)
	return done.Lesson, err
}

func (a *app) destroy(ctx context.Context, kid, why string) error {
	return a.callWith(ctx, instance.Sandboxd, http.MethodDelete, "/v1/kids/"+url.PathEscape(kid)+"?reason="+url.QueryEscape(why), nil, nil)
}
