package killswitch

import (
	"context"
	"errors"
	"fmt"
	"time"

	"tagout/internal/session"
	"tagout/internal/wire"
)

// secretCut is the sessions whose sockets that carry a secret pass nothing since at (CLOCK_BOOTTIME, read after the
// writes).
type secretCut struct {
	marks []uint32
	at    time.Duration
	err   error // of the writes
}

// cutSecrets has the kernel drop what the sessions' sockets still send that carry a secret. The proxy may have taken
// one from credd just before credd forgets the token, and be slow to send it, or hang: credd's word alone does not
// say that nothing goes out any more.
func (s *Switch) cutSecrets(r *run, marks []uint32) secretCut {
	c := secretCut{marks: marks}
	if r.scope.All {
		// The kernel's own list, which waits for no disk; whoever is not in it passes nothing anyway.
		c.marks, c.err = s.cfg.Network.Sessions()
	}
	for _, m := range c.marks {
		c.err = errors.Join(c.err, s.cfg.Network.RevokeSecrets(m))
	}
	c.at = bootTime()
	if c.err == nil {
		r.emit(r.single, wire.LayerCredential, pointSecrets, wire.StateFired, "")
	}
	return c
}

// seeSecrets looks, once credd has answered, whether the kernel holds the cut and nothing has passed since. A packet
// that was already past the check when the map was written may carry a later time; then the map is written again.
func (s *Switch) seeSecrets(r *run, c secretCut) {
	ctx, cancel := context.WithDeadline(context.Background(), r.from.Add(s.t.Network))
	defer cancel()
	for {
		why := s.lookSecrets(c)
		if why == nil {
			r.emit(r.single, wire.LayerCredential, pointSecrets, wire.StateObserved, "")
			break
		}
		if ctx.Err() != nil {
			r.emit(r.single, wire.LayerCredential, pointSecrets, wire.StatePartial,
				fmt.Sprintf("a use that was under way may still reach its server: %v", why))
			break
		}
		c = s.cutSecrets(r, c.marks)
		pause(ctx, s.t.Sample)
	}
	if !r.has(wire.LayerNetwork) { // which destroys all sockets of its sessions
		s.destroySecretSockets(ctx, r, c.marks)
	}
}

func (s *Switch) lookSecrets(c secretCut) error {
	if c.err != nil {
		return c.err
	}
	for _, m := range c.marks {
		on, last, err := s.cfg.Network.Secrets(m)
		switch {
		case err != nil:
			return fmt.Errorf("reading whether the secrets of session %#x are revoked: %w", m, err)
		case !on:
			return fmt.Errorf("the secrets of session %#x are not revoked in the kernel", m)
		case last > c.at:
			return fmt.Errorf("session %#x sent a packet of a socket that carries a secret %v after the cut", m, last-c.at)
		}
	}
	return nil
}

// destroySecretSockets ends what the kernel drops anyway, so that neither it nor the proxy goes on trying.
func (s *Switch) destroySecretSockets(ctx context.Context, r *run, marks []uint32) {
	if len(marks) == 0 {
		return
	}
	secret := make([]uint32, len(marks))
	for i, m := range marks {
		secret[i] = m | session.SecretBit
	}
	n, err := s.cfg.Sockets.Destroy(ctx, secret, nil)
	if err != nil {
		r.emit(r.single, wire.LayerCredential, pointSockets, wire.StatePartial, fmt.Sprintf("%d sockets destroyed, then: %v", n, err))
		return
	}
	r.emit(r.single, wire.LayerCredential, pointSockets, wire.StateObserved, fmt.Sprintf("%d sockets that carried secrets destroyed", n))
}
