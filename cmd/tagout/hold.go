package main

import (
	"context"
	"encoding/json"
	"net/url"
	"time"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// hold keeps a kid that was spawned as held alive until the returned function is called, or this process ends in
// whatever way: then sandboxd destroys the kid. A sandboxd that is restarted meanwhile is asked again.
func (a *app) hold(ctx context.Context, kid string) (letGo func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		again := time.NewTicker(wire.HoldAgain)
		defer again.Stop()
		for ctx.Err() == nil {
			// What went wrong shows in the command's own calls.
			a.stream(ctx, instance.Sandboxd, "/v1/kids/"+url.PathEscape(kid)+"/hold", nil, func(json.RawMessage) error { return nil })
			select {
			case <-ctx.Done():
			case <-again.C:
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}
