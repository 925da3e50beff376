package kids

import (
	"context"
	"errors"
	"io/fs"
	"time"

	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Stats says what the kid's processes use and have used. A kid that is just being made, or destroyed, may have nothing
// to count.
func (m *Manager) Stats(ctx context.Context, name string) (wire.KidStats, error) {
	k, err := m.Get(ctx, name)
	if err != nil {
		return wire.KidStats{}, err
	}
	s, err := m.cfg.Cgroups.Stats(m.cgroupRel(name))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return wire.KidStats{}, refuse(Conflict, reason.OK, "kid %s is %s: there is nothing of it to count", name, k.State)
	case err != nil:
		return wire.KidStats{}, refuse(Internal, reason.Internal, "counting what kid %s uses: %w", name, err)
	}
	out := wire.KidStats{
		Kid: name, State: k.State, Time: time.Now().UTC(),
		CPU:    wire.CPUStats{User: s.User, System: s.System, Throttled: s.Throttled, Limit: s.CPUs},
		Memory: wire.MemoryStats{Current: s.Memory, Peak: s.MemoryPeak, Limit: s.MemoryLimit},
		PIDs:   wire.PIDStats{Current: s.Tasks, Limit: s.TaskLimit},
	}
	if s.IO != nil {
		out.IO = &wire.IOStats{ReadBytes: s.IO.ReadBytes, WrittenBytes: s.IO.WrittenBytes, Reads: s.IO.Reads, Writes: s.IO.Writes}
	}
	return out, nil
}
