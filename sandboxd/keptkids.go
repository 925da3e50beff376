package sandboxd

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// keptKids lets the keeper of the audit logs hold kids up. A stop goes the way of every stop: killswitchd fires it, and
// its tag hangs until somebody takes it off.
type keptKids struct {
	*kids.Manager
	client *control.Client
}

func (k keptKids) Running(ctx context.Context) []string {
	var out []string
	for _, kid := range k.List(ctx) {
		if kid.State == wire.KidRunning {
			out = append(out, kid.Name)
		}
	}
	return out
}

func (k keptKids) Stop(ctx context.Context, name, why string) error {
	done := false
	err := k.client.Each(ctx, http.MethodPost, "/v1/stop", wire.StopRequest{Scope: wire.Scope{Kid: name}, By: "sandboxd", Reason: why, Cause: "http"}, func(line json.RawMessage) error {
		var ev wire.StopEvent
		if err := json.Unmarshal(line, &ev); err != nil {
			return err
		}
		done = done || ev.Final != nil
		return nil
	})
	if err == nil && !done {
		err = fmt.Errorf("stopping %s: killswitchd did not say how it ended", name)
	}
	return err
}
