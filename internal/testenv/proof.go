package testenv

import (
	"context"
	"fmt"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// Lamps asks killswitchd what it shows of itself.
func (b *Box) Lamps() wire.KillStatus {
	b.T.Helper()
	st, err := b.lamps(b.Client(instance.Killswitchd))
	if err != nil {
		b.T.Fatalf("asking killswitchd for its lamps: %v", err)
	}
	return st
}

func (b *Box) lamps(c *control.Client) (st wire.KillStatus, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	return st, c.Call(ctx, http.MethodGet, "/v1/status", nil, &st)
}

// waitProven waits until the proof that killswitchd makes when it starts is over, so that its kid is not among those
// that a test looks at. Under a tag on everything there is none.
func (b *Box) waitProven() {
	b.T.Helper()
	c := control.NewClient(b.Inst.Socket(instance.Killswitchd))
	defer c.CloseIdle()
	b.Until(startLimit, "the stop layers are proven", func() error {
		st, err := b.lamps(c)
		if err != nil {
			return err
		}
		for _, t := range st.Tags {
			if t.Scope.All {
				return nil
			}
		}
		for l, ls := range st.Layers {
			if st.Busy || ls.Proof == nil {
				return fmt.Errorf("%s is %s: %s", l, ls.State, ls.Detail)
			}
		}
		return nil
	})
}
