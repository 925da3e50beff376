package killswitch

import (
	"context"
	"fmt"
	"slices"

	"tagout/internal/wire"
)

// fireCredential has the kernel drop the uses that are under way, and credd forget the tokens of every target. A credd that does not say in time that it has
// is killed: without credd no token is accepted anywhere, and a new credd asks for the hanging tags before it
// accepts one.
func (s *Switch) fireCredential(r *run, found *future) {
	req := wire.RevokeRequest{All: r.scope.All, Nonce: r.nonce, Tag: tagText(r.currentTag())}
	if r.proof {
		req.Tag = "" // it hangs none
	}
	if !req.All {
		blind := 0
		for _, t := range found.get() {
			if t.unborn {
				blind++
				r.emit(t.kid, wire.LayerCredential, pointCredd, wire.StateObserved, unbornText)
				continue
			}
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
	cut := s.cutSecrets(r, req.Marks) // the first action of the layer: one write for each session
	defer s.seeSecrets(r, cut)
	n, err := s.revoke(req)
	if err == nil {
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateObserved, fmt.Sprintf("%d tokens revoked", n))
		return
	}
	if r.proof { // credd's death would take the tokens of real kids
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateFailed, fmt.Sprintf("%v: a stop would have killed it", err))
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

// killCredd ends every credd that may know a token. What counts is that the processes which were there are
// gone, and not that none is there: a supervisor starts a new one at once, and that one knows no token.
func (s *Switch) killCredd(r *run, cause error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.t.CreddDeath)
	defer cancel()
	r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateFired, fmt.Sprintf("killing credd: %v", cause))
	n, err := s.cfg.Cgroups.KillAndWait(ctx, s.cfg.CreddDir)
	if err == nil {
		err = s.strangerAsCredd(ctx)
	}
	switch {
	case err != nil:
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateFailed, fmt.Sprintf("%v; credd was not seen to die: %v", cause, err))
	case n == 0:
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateObserved, fmt.Sprintf("credd is not running: no credd, no token (%v)", cause))
	default:
		r.emit(r.single, wire.LayerCredential, pointCredd, wire.StateObserved, fmt.Sprintf("credd killed: no credd, no token (%v)", cause))
	}
}

// strangerAsCredd returns an error where credd's socket is served by a process outside credd's cgroup, which
// no stop can reach.
func (s *Switch) strangerAsCredd(ctx context.Context) error {
	pid, err := s.cfg.Credentials.Server(ctx)
	if err != nil || pid == 0 {
		return err
	}
	procs, err := s.cfg.Cgroups.Survivors(s.cfg.CreddDir)
	if err != nil {
		return err
	}
	if slices.Contains(pids(procs), pid) {
		return nil
	}
	if again, err := s.cfg.Credentials.Server(ctx); err != nil || again != pid {
		return err // it went while we looked
	}
	return fmt.Errorf("process %d serves credd's socket from outside the cgroup %s: kill it and start credd with `tagout up`", pid, s.cfg.CreddDir)
}
