package practice

import (
	"context"
	"fmt"
	"time"
)

// pollEvery is how often Wait looks; observers are counters behind a mutex, so looking is cheap.
const pollEvery = 2 * time.Millisecond

// Wait looks at cond until it holds or ctx ends. what names the condition in the error.
func Wait(ctx context.Context, what string, cond func() bool) error {
	tick := time.NewTicker(pollEvery)
	defer tick.Stop()
	for !cond() {
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until %s: %w", what, ctx.Err())
		case <-tick.C:
		}
	}
	return nil
}
