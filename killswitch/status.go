package killswitch

import (
	"context"
	"time"

	"tagout/internal/wire"
)

// creddLook is how long credd may take to show that it is there.
const creddLook = 200 * time.Millisecond

// Status really tries what each layer needs, without stopping anything.
func (s *Switch) Status(ctx context.Context) wire.KillStatus {
	look, cancel := context.WithTimeout(ctx, creddLook)
	defer cancel()
	st := wire.KillStatus{Tags: s.Tags(), Layers: map[wire.Layer]wire.LayerStatus{
		wire.LayerSession:    armed(s.cfg.Cgroups.CanKill(s.cfg.KidsDir), "run `tagout setup` again"),
		wire.LayerNetwork:    armed(s.cfg.Network.Armed(), "run `tagout setup` again"),
		wire.LayerCredential: armed(s.creddArmed(look), "start credd; a stop would kill it, and without credd no token is accepted"),
	}}
	s.light(&st)
	return st
}

// Gauges returns what the metrics of the layers show now, and the period of proofs.
func (s *Switch) Gauges(ctx context.Context) (layers []Gauge, every time.Duration) {
	st := s.Status(ctx)
	return s.gauges(st), st.Every
}

// creddArmed is about credd's word and about the way to kill it.
func (s *Switch) creddArmed(ctx context.Context) error {
	if err := s.cfg.Cgroups.CanKill(s.cfg.CreddDir); err != nil {
		return err
	}
	return s.cfg.Credentials.Reachable(ctx)
}

func armed(err error, hint string) wire.LayerStatus {
	if err != nil {
		return wire.LayerStatus{Detail: err.Error() + ": " + hint}
	}
	return wire.LayerStatus{Armed: true}
}

// Healthy returns nil while processes can be killed. The other layers may wait for daemons that start later.
func (s *Switch) Healthy() error { return s.cfg.Cgroups.CanKill(s.cfg.KidsDir) }
