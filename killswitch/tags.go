package killswitch

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"tagout/internal/wire"
)

// hung is a tag that hangs, in memory, which is what counts; the disk follows. Switch.mu guards it.
type hung struct {
	tag       wire.Tag
	run       *run // the stop that hung it, or that it joined; nil where a predecessor did
	kept      bool // on disk
	writing   bool // a goroutine is putting it there
	releasing bool // a release is under way: still refuses, is not enforced
	damaged   bool // stands for a file that cannot be read
}

// keeping is a tag, or the use of an order, on its way to the disk.
type keeping struct {
	done chan struct{}
	err  error // valid once done is closed
}

// keep puts a tag on disk from a goroutine of its own: a disk may hang for ever. The tag's hung must be marked
// as writing. A note that is still being written comes first, or it would outlast the tag; nil: there is none.
func (s *Switch) keep(t wire.Tag, noted <-chan struct{}) *keeping {
	k := &keeping{done: make(chan struct{})}
	go func() {
		if noted != nil {
			select {
			case <-noted:
			case <-time.After(s.t.Persist):
			}
		}
		k.err = s.cfg.Tags.Put(t)
		s.mu.Lock()
		var r *run
		if h := s.hanging[t.Stop]; h != nil {
			h.writing, h.kept = false, k.err == nil
			r = h.run
		}
		n := len(s.hanging)
		s.mu.Unlock()
		s.cfg.Metrics.TagsHanging(n)
		close(k.done)
		if k.err == nil && r != nil && r.id == t.Stop {
			s.keptLate(r)
		}
	}()
	return k
}

// wait returns the outcome, or that it took longer than d.
func (k *keeping) wait(d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-k.done:
		return k.err
	case <-t.C:
		return fmt.Errorf("no answer from the disk within %v", d)
	}
}

// reportTag says whether the stop's tag is on disk. Where it is not, the tag holds in memory and is tried
// again until the disk takes it.
func (s *Switch) reportTag(r *run, k *keeping) {
	if err := k.wait(s.t.Persist); err != nil {
		r.emit("", "", pointTag, wire.StatePartial,
			fmt.Sprintf("the tag hangs, but a restart of killswitchd would lose it until the disk takes it: %v", err))
		return
	}
	r.emit("", "", pointTag, wire.StateObserved, "")
}

// amend replaces a hanging tag's text in memory.
func (s *Switch) amend(t wire.Tag) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.hanging[t.Stop]; h != nil {
		h.tag = t
	}
}

// keepUnkept tries again what the disk refused.
func (s *Switch) keepUnkept() {
	s.mu.Lock()
	var again []wire.Tag
	for _, h := range s.hanging {
		if !h.kept && !h.writing && !h.releasing {
			h.writing = true
			again = append(again, h.tag)
		}
	}
	s.mu.Unlock()
	for _, t := range again {
		s.keep(t, nil)
	}
}

// Tags returns the tags that hang, oldest first.
func (s *Switch) Tags() []wire.Tag {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]wire.Tag, 0, len(s.hanging))
	for _, h := range s.hanging {
		out = append(out, h.tag)
	}
	slices.SortFunc(out, func(a, b wire.Tag) int { return a.Placed.Compare(b.Placed) })
	return out
}

// enforced returns the hanging tags that demand a layer.
func (s *Switch) enforced(l wire.Layer) []wire.Tag {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []wire.Tag
	for _, h := range s.hanging {
		if !h.releasing && slices.Contains(h.tag.Layers, l) {
			out = append(out, h.tag)
		}
	}
	return out
}

// demanded says whether a tag that hangs demands a layer of a kid.
func (s *Switch) demanded(l wire.Layer, kid, card string) bool {
	return slices.ContainsFunc(s.enforced(l), func(t wire.Tag) bool { return inScope(t.Scope, kid, card) })
}

// Clear returns a tag that hangs on the scope; ok is true where none does. Kid and Card may both be set, and
// then a tag on either counts. A tag on everything always counts.
func (s *Switch) Clear(sc wire.Scope) (t wire.Tag, ok bool) {
	for _, t := range s.Tags() {
		if t.Scope.All || inScope(t.Scope, sc.Kid, sc.Card) {
			return t, false
		}
	}
	if t, hangs := s.proofTag(sc); hangs {
		return t, false
	}
	return wire.Tag{}, true
}

// Refusal is a release that was not done, with an HTTP status for it.
type Refusal struct {
	Status int
	Detail string
}

func (r *Refusal) Error() string { return r.Detail }

var errNotPinned = errors.New("a session of the tag could not be pinned as stopped")
