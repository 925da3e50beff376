package killswitch

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Release takes a tag off. It restarts nothing: processes are dead, revoked tokens stay revoked and a stopped
// session stays stopped until it is destroyed. Only whoever placed a tag can take it off. An error is a
// *Refusal, and the tag hangs on.
func (s *Switch) Release(req wire.ReleaseRequest) (wire.Tag, error) {
	t, err := s.release(req)
	rec := audit.Record{
		Event: audit.EventTagReleased, Outcome: audit.OutcomeOK, Actor: req.By, Detail: req.Reason,
		Fields: map[string]string{"stop": req.Stop, "scope": scopeText(t.Scope), "placed_by": t.By},
	}
	if err != nil {
		rec.Event, rec.Outcome, rec.Reason, rec.Detail = audit.EventReleaseRefused, audit.OutcomeDeny, reason.Tagged, err.Error()
	}
	s.audit.send(rec)
	return t, err
}

func (s *Switch) release(req wire.ReleaseRequest) (wire.Tag, error) {
	t, err := s.beginRelease(req)
	if err != nil {
		return t, err
	}
	if err := s.resume(t); err != nil {
		s.endRelease(t, false)
		return t, &Refusal{http.StatusServiceUnavailable, fmt.Sprintf("the tag stays: %v: try again when the network layer is armed (`tagout status`)", err)}
	}
	t.Released, t.ReleasedBy = time.Now().UTC(), req.By
	if err := s.cfg.Tags.Release(t); err != nil {
		s.endRelease(t, false)
		return t, &Refusal{http.StatusInsufficientStorage, fmt.Sprintf("the tag stays: noting its release on disk: %v", err)}
	}
	s.endRelease(t, true)
	return t, nil
}

// beginRelease judges a release and marks the tag, so that a second one is refused meanwhile.
func (s *Switch) beginRelease(req wire.ReleaseRequest) (wire.Tag, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := s.hanging[req.Stop]
	if h == nil {
		if t, ok := s.released[req.Stop]; ok {
			return t, &Refusal{http.StatusConflict, fmt.Sprintf("tag %s was already released by %s at %s", t.Stop, t.ReleasedBy, t.Released.Format(time.RFC3339))}
		}
		return wire.Tag{}, &Refusal{http.StatusNotFound, fmt.Sprintf("no tag %q hangs here: `tagout tags` lists those that do", req.Stop)}
	}
	switch {
	case h.damaged:
		return h.tag, &Refusal{http.StatusConflict, h.tag.Reason}
	case h.tag.By != req.By:
		return h.tag, &Refusal{http.StatusForbidden, fmt.Sprintf("tag %s was placed by %s: only %s can release it", h.tag.Stop, h.tag.By, h.tag.By)}
	case s.underWay(h.tag.Stop):
		return h.tag, &Refusal{http.StatusConflict, fmt.Sprintf("stop %s is still under way: wait for its report", h.tag.Stop)}
	case h.writing || h.releasing:
		return h.tag, &Refusal{http.StatusConflict, fmt.Sprintf("tag %s is being written: try again", h.tag.Stop)}
	case h.tag.Cause == CauseSentinel && s.sentinelThere():
		return h.tag, &Refusal{http.StatusConflict, fmt.Sprintf("the file %s stops everything: remove it first", s.cfg.Sentinel)}
	}
	h.releasing = true
	return h.tag, nil
}

// underWay says whether the stop has not reported yet. s.mu is held.
func (s *Switch) underWay(stop string) bool {
	for _, r := range s.running {
		if r.id == stop && !r.done() {
			return true
		}
	}
	return false
}

func (s *Switch) sentinelThere() bool {
	_, err := os.Lstat(s.cfg.Sentinel)
	return !errors.Is(err, fs.ErrNotExist)
}

func (s *Switch) endRelease(t wire.Tag, done bool) {
	s.mu.Lock()
	if done {
		delete(s.hanging, t.Stop)
		s.released[t.Stop] = t
	} else if h := s.hanging[t.Stop]; h != nil {
		h.releasing = false // enforcement sets the global flag again
	}
	n := len(s.hanging)
	s.mu.Unlock()
	s.cfg.Metrics.TagsHanging(n)
}

// resume clears the global stop flag where t was the last tag that needs it. Before that it stops every
// session that lives, each by itself: the flag may come off, a stopped session may not come back.
func (s *Switch) resume(t wire.Tag) error {
	if !t.Scope.All || !slices.Contains(t.Layers, wire.LayerNetwork) {
		return nil
	}
	s.flagMu.Lock()
	defer s.flagMu.Unlock()
	if s.flagDemanded() {
		return nil
	}
	known, err := s.cfg.Network.Sessions() // the kernel's own list: a document may be missing
	if err != nil {
		return fmt.Errorf("%w: %w", errNotPinned, err)
	}
	for _, m := range known {
		if err := s.cfg.Network.StopSession(m); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", errNotPinned, err)
		}
	}
	if err := s.cfg.Network.StopAll(false); err != nil {
		return fmt.Errorf("clearing the flag that stops everything: %w", err)
	}
	// A stop of everything does not wait for this lock. It hangs its tag before it sets the flag: either we
	// see its tag here, or its write comes after ours.
	if s.flagDemanded() {
		return s.cfg.Network.StopAll(true)
	}
	return nil
}

// flagDemanded says whether a tag on everything demands the network layer.
func (s *Switch) flagDemanded() bool {
	return slices.ContainsFunc(s.enforced(wire.LayerNetwork), func(t wire.Tag) bool { return t.Scope.All })
}
