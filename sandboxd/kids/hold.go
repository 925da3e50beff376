package kids

import (
	"context"

	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// holdGrace is how long a held kid waits for whoever spawned it to hold it.
const holdGrace = 10 * wire.HoldAgain

const goneHolder = "holder gone: it was to live as long as whoever spawned it, and nobody holds it any more"

// Hold keeps a kid that was spawned as held alive until ctx ends, and then destroys it where nobody else holds it:
// whoever held it went away. held is called once it is held. When ending is closed first, it is left as it is: a
// successor gives its holder time to come back. It returns nil when the kid is gone before.
func (m *Manager) Hold(ctx context.Context, name, actor string, ending <-chan struct{}, held func() error) error {
	k, err := m.grip(name)
	if err != nil {
		return err
	}
	left := false
	if held() == nil {
		select {
		case <-ctx.Done():
		case <-ending:
			left = true
		case <-k.released:
		}
	}
	select {
	case <-ending: // the connection breaks then too
		left = true
	default:
	}
	if !m.letGo(k, left) {
		return nil
	}
	return m.Destroy(context.WithoutCancel(ctx), name, actor, goneHolder)
}

// grip makes the caller one of the kid's holders.
func (m *Manager) grip(name string) (*kid, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.kids[name]
	switch {
	case k == nil:
		return nil, notFound(name)
	case !k.rec.Held:
		return nil, refuse(Conflict, reason.OK, "kid %s lives until it is destroyed: only a kid that was spawned as held can be held", name)
	case k.state.Is(wire.KidDestroying):
		return nil, refuse(Conflict, reason.OK, "kid %s is being destroyed", name)
	}
	k.time.holders++
	return k, nil
}

// letGo says whether the kid has to go now. left: nobody knows whether its holder is still there.
func (m *Manager) letGo(k *kid, left bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	k.time.holders--
	k.time.lease = bootclock.Now() + holdGrace
	if left || k.time.holders > 0 || k.state.Is(wire.KidDestroying) {
		return false
	}
	k.time.gone = true // Run destroys it, should that be interrupted here
	return true
}
