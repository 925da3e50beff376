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
	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Release does what a signed release asks for, which Accept has let through: it takes the tag off where the signer
// may do that alone or is the second of two, and keeps the signer's approval on the tag otherwise; then the tag that
// it returns is not released. A release restarts nothing: processes are dead, revoked tokens stay revoked and a
// stopped session stays stopped until it is destroyed. An error is a *Refusal, and the tag hangs on.
func (s *Switch) Release(o authority.Signed) (wire.Tag, error) {
	t, err := s.release(o)
	rec := audit.Record{
		Event: audit.EventTagReleased, Outcome: audit.OutcomeOK, Actor: o.By, Detail: o.Reason,
		Fields: map[string]string{"stop": o.Stop, "scope": scopeText(t.Scope), "placed_by": t.By, "order": o.ID, "key": o.Key, "note": o.Note},
	}
	switch {
	case err != nil:
		rec.Event, rec.Outcome, rec.Reason, rec.Detail = audit.EventReleaseRefused, audit.OutcomeDeny, reason.Tagged, err.Error()
	case t.Released.IsZero():
		rec.Event = audit.EventTagApproved
	default:
		rec.Fields["released_by"] = t.ReleasedBy
	}
	s.audit.send(rec)
	return t, err
}

// RefuseUnsigned is the answer to a release that nobody signed. It is on record.
func (s *Switch) RefuseUnsigned(req wire.ReleaseRequest, peer string) error {
	text := "a tag comes off by a signature, and this release has none: give --key FILE, made with `tagout key new`"
	if t, err := s.find(req.Stop); err != nil {
		text = err.Error()
	} else {
		text += "; " + s.whoCanNow(t)
	}
	s.audit.send(audit.Record{
		Event: audit.EventReleaseRefused, Outcome: audit.OutcomeDeny, Reason: reason.OrderUnsigned, Actor: req.By, Detail: text,
		Fields: map[string]string{"stop": req.Stop, "peer": peer},
	})
	return &Refusal{http.StatusForbidden, text}
}

// find returns a tag that hangs; an error, a *Refusal, says what became of it.
func (s *Switch) find(stop string) (wire.Tag, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.findHung(stop)
	if err != nil {
		return wire.Tag{}, err
	}
	return h.tag, nil
}

// findHung is find, for whoever holds s.mu.
func (s *Switch) findHung(stop string) (*hung, error) {
	if h := s.hanging[stop]; h != nil {
		return h, nil
	}
	if t, ok := s.released[stop]; ok {
		return nil, &Refusal{http.StatusConflict, fmt.Sprintf("tag %s was already released by %s at %s", t.Stop, t.ReleasedBy, t.Released.Format(time.RFC3339))}
	}
	return nil, &Refusal{http.StatusNotFound, fmt.Sprintf("no tag %q hangs here: `tagout tags` lists those that do", stop)}
}

func (s *Switch) release(o authority.Signed) (wire.Tag, error) {
	list, err := s.cfg.Authorities.List()
	if err != nil {
		return wire.Tag{}, &Refusal{http.StatusForbidden, err.Error()}
	}
	t, v, err := s.beginRelease(o, list)
	if err != nil {
		return t, err
	}
	if !v.release {
		return s.approve(t, v.kept)
	}
	if err := s.resume(t); err != nil {
		s.endRelease(t, false)
		return t, &Refusal{http.StatusServiceUnavailable, fmt.Sprintf("the tag stays: %v: try again when the network layer is armed (`tagout status`)", err)}
	}
	t.Released, t.ReleasedBy = time.Now().UTC(), v.names
	if err := s.cfg.Tags.Release(t); err != nil {
		s.endRelease(t, false)
		return t, &Refusal{http.StatusInsufficientStorage, fmt.Sprintf("the tag stays: noting its release on disk: %v", err)}
	}
	s.endRelease(t, true)
	return t, nil
}

// beginRelease judges a release and marks the tag as being released, or as being written where the release becomes
// an approval, so that a second one is refused meanwhile.
func (s *Switch) beginRelease(o authority.Signed, list authority.List) (wire.Tag, verdict, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	h, err := s.findHung(o.Stop)
	if err != nil {
		return wire.Tag{}, verdict{}, err
	}
	switch {
	case h.damaged:
		return h.tag, verdict{}, &Refusal{http.StatusConflict, h.tag.Reason}
	case s.underWay(h.tag.Stop):
		return h.tag, verdict{}, &Refusal{http.StatusConflict, fmt.Sprintf("stop %s is still under way: wait for its report", h.tag.Stop)}
	case h.writing || h.releasing:
		return h.tag, verdict{}, &Refusal{http.StatusConflict, fmt.Sprintf("tag %s is being written: try again", h.tag.Stop)}
	case h.tag.Cause == CauseSentinel && s.sentinelThere():
		return h.tag, verdict{}, &Refusal{http.StatusConflict, fmt.Sprintf("the file %s stops everything: remove it first", s.cfg.Sentinel)}
	}
	v, err := judgeRelease(h.tag, o, list, time.Now())
	if err != nil {
		return h.tag, verdict{}, err
	}
	h.releasing, h.writing = v.release, !v.release
	return h.tag, v, nil
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
