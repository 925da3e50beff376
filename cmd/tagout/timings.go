package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"text/tabwriter"
	"time"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// timings shows how long the stages of a kid's spawn took. They are no output of the command: they go to standard error.
func (a *app) timings(kid wire.Kid) error {
	if a.json {
		raw, err := json.Marshal(map[string]any{"kid": kid.Name, "timings_ns": kid.Timings})
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(a.err, "%s\n", raw)
		return err
	}
	w := tabwriter.NewWriter(a.err, 0, 0, 2, ' ', tabwriter.AlignRight)
	for _, stage := range append(wire.SpawnStages(), wire.StageTotal, wire.StageFirstCommand) {
		if took, ok := kid.Timings[stage]; ok {
			fmt.Fprintf(w, "%s\t%.1f ms\t\n", stage, float64(took)/float64(time.Millisecond))
		}
	}
	return w.Flush()
}

// timingsAfter shows them with the first command that ran in the kid since.
func (a *app) timingsAfter(ctx context.Context, name string) error {
	var kid wire.Kid
	err := a.callWith(ctx, instance.Sandboxd, http.MethodGet, "/v1/kids/"+url.PathEscape(name), nil, &kid)
	if err != nil {
		return fmt.Errorf("asking how long the spawn took: %w", err)
	}
	return a.timings(kid)
}
