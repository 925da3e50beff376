package practice

import (
	"context"
	"net/url"
	"sync"
	"time"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// Introspect asks credd whether it accepts a token (RFC 7662).
func Introspect(ctx context.Context, credd *control.Client, token string) (bool, error) {
	var answer wire.Introspection
	err := credd.Form(ctx, "/introspect", url.Values{"token": {token}}, &answer)
	return answer.Active, err
}

// Uses asks credd about a token again and again, each time anew, as services of the user's own do, past every
// firewall of the box. Safe for concurrent use.
type Uses struct {
	stop func()

	mu   sync.Mutex
	seen UsesSeen // guarded by mu
}

// UsesSeen is what came of the uses so far. Moments are CLOCK_MONOTONIC; 0: no use was accepted yet.
type UsesSeen struct {
	Answered int           // uses, accepted or not
	Asked    time.Duration // when the latest use that was accepted began
	Accepted time.Duration // when the answer to an accepted use last came
}

// UseToken uses a token perSecond times a second, which must be above 0, from eight callers until Stop or the end of
// ctx. A use without an answer is no use.
func UseToken(ctx context.Context, creddSocket, token string, perSecond int) *Uses {
	const callers = 8
	ctx, cancel := context.WithCancel(ctx)
	credd := control.NewClient(creddSocket)
	var wg sync.WaitGroup
	u := &Uses{stop: sync.OnceFunc(func() { cancel(); wg.Wait(); credd.CloseIdle() })}
	for i := range callers {
		wg.Go(func() {
			time.Sleep(time.Duration(i) * time.Second / time.Duration(perSecond)) // evenly, and not all at once
			tick := time.NewTicker(time.Second * callers / time.Duration(perSecond))
			defer tick.Stop()
			for ctx.Err() == nil {
				<-tick.C
				u.use(ctx, credd, token)
			}
		})
	}
	return u
}

func (u *Uses) use(ctx context.Context, credd *control.Client, token string) {
	asked := Now()
	active, err := Introspect(ctx, credd, token)
	if err != nil {
		return // the end, or no credd: no token either
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen.Answered++
	if active {
		u.seen.Asked, u.seen.Accepted = max(u.seen.Asked, asked), Now()
	}
}

// Seen returns what came of the uses so far.
func (u *Uses) Seen() UsesSeen {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.seen
}

// Stop ends the uses and returns when the last caller has ended. It may be called again.
func (u *Uses) Stop() { u.stop() }
