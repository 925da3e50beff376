package killswitch

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"tagout/internal/wire"
)

// fireCredential has credd forget the tokens of every target. A credd that does not say in time that it has
// is killed: without credd no token is accepted anywhere, and a new credd asks for the hanging tags before it
// accepts one.
func (s *Switch) fireCredential(r *run, found *future) {
	req := wire.RevokeRequest{All: r.scope.All}
	if !req.All {
		blind := 0
		for _, t := range found.get() {
			if t.mark == 0 {
				blind++
				r.emit(t.kid, wire.LayerCredential, pointCredd, wire.StateFailed,
					fmt.Sprintf("its mark is not known (%v): stop everything to revoke its tokens", t.problem))
				continue
			}
			req.Marks = append(req.Marks, t.mark)
		}
		if len(req.Marks) == 0 {
			if blind == 0 {
				r.emit("", wire.LayerCredential, pointCredd, wire.StateObserved, "no kid in scope")
			}
			return
		}
	}
	n, err := s.revoke(req)
	if err == nil {
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateObserved, fmt.Sprintf("%d tokens revoked", n))
		return
	}
	s.killCredd(r, err)
}

// revoke is one bounded call; the bound holds even where the client forgets its own.
func (s *Switch) revoke(req wire.RevokeRequest) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.t.Credential)
	defer cancel()
	type answer struct {
		n   int
		err error
	}
	got := make(chan answer, 1)
	go func() {
		n, err := s.cfg.Credentials.Revoke(ctx, req)
		got <- answer{n, err}
	}()
	select {
	case a := <-got:
		return a.n, a.err
	case <-ctx.Done():
		return 0, fmt.Errorf("credd did not acknowledge within %v", s.t.Credential)
	}
}

func (s *Switch) killCredd(r *run, cause error) {
	err := s.cfg.Cgroups.Kill(s.cfg.CreddDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateFailed, fmt.Sprintf("%v; killing credd: %v", cause, err))
	} else {
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateFired, fmt.Sprintf("killing credd: %v", cause))
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.t.CreddDeath)
	defer cancel()
	if werr := s.cfg.Cgroups.WaitEmpty(ctx, s.cfg.CreddDir); werr != nil {
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateFailed,
			fmt.Sprintf("%v; credd was not seen to die: %v", cause, errors.Join(err, werr)))
		return
	}
	r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateObserved, fmt.Sprintf("credd killed: no credd, no token (%v)", cause))
}
