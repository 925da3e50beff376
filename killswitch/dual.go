package killswitch

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"tagout/internal/authority"
	"tagout/internal/wire"
)

// byHand says whether a person gave the order: the tags of every other cause were placed by nobody.
func byHand(cause string) bool {
	return cause == CauseOrder || cause == CauseHTTP || cause == CauseFleet
}

// placer returns who can take the tag off alone, if that person signs; "" where nobody can. A name that nobody
// signed for counts as well: whoever typed it gave the named person a say, and took nobody's away.
func placer(t wire.Tag) string {
	if byHand(t.Cause) {
		return t.By
	}
	return ""
}

// approvals returns those of a tag's approvals that still count: their givers hold the role, with the key that they
// signed with.
func approvals(t wire.Tag, list authority.List, now time.Time) []wire.Approval {
	return slices.DeleteFunc(slices.Clone(t.Approvals), func(a wire.Approval) bool {
		p, ok := list.Find(a.By)
		return !ok || !p.MaySign(authority.RoleRelease, now) || authority.KeyID(p.Key) != a.Key
	})
}

// verdict is what a signed release comes to.
type verdict struct {
	release bool
	names   string          // by whom, where it is released
	kept    []wire.Approval // otherwise: what the tag carries from now on
}

// judgeRelease says whether by's signature takes the tag off, alone or as the second of two, or is the first of two.
func judgeRelease(t wire.Tag, o authority.Signed, list authority.List, now time.Time) (verdict, error) {
	if placer(t) == o.By {
		return verdict{release: true, names: o.By}, nil
	}
	have := approvals(t, list, now)
	for _, a := range have {
		if a.By == o.By {
			return verdict{}, &Refusal{http.StatusConflict, fmt.Sprintf("%s has approved the release of tag %s already: %s", o.By, t.Stop, whoCan(t, list, now))}
		}
	}
	if len(have) > 0 {
		return verdict{release: true, names: have[0].By + " and " + o.By}, nil
	}
	return verdict{kept: append(have, wire.Approval{By: o.By, Key: o.Key, Order: o.ID, Reason: o.Reason, At: now.UTC()})}, nil
}

// whoCan says in words who can take a tag off.
func whoCan(t wire.Tag, list authority.List, now time.Time) string {
	if t.Cause == causeDamaged {
		return "no signature takes it off"
	}
	names := list.Signers(authority.RoleRelease, now)
	var alone string
	if p := placer(t); slices.Contains(names, p) {
		alone = p
		names = slices.DeleteFunc(names, func(n string) bool { return n == p })
	}
	have := approvals(t, list, now)
	for _, a := range have {
		names = slices.DeleteFunc(names, func(n string) bool { return n == a.By })
	}
	var ways []string
	if alone != "" {
		ways = append(ways, alone)
	}
	switch {
	case len(have) > 0 && len(names) > 0:
		ways = append(ways, "one more of "+strings.Join(names, ", ")+" ("+have[0].By+" has approved)")
	case len(have) == 0 && len(names) == 2:
		ways = append(ways, names[0]+" and "+names[1]+" together")
	case len(have) == 0 && len(names) > 2:
		ways = append(ways, "two of "+strings.Join(names, ", ")+" together")
	}
	if len(ways) == 0 {
		return "nobody can release it as things are: give two people the role release and a key under authorities in the box's configuration, and run `tagout setup`"
	}
	return strings.Join(ways, ", or ") + " can release it"
}

// whoCanNow is whoCan with the list as it is.
func (s *Switch) whoCanNow(t wire.Tag) string {
	list, err := s.cfg.Authorities.List()
	if err != nil {
		return "nobody can release it as things are: " + err.Error()
	}
	return whoCan(t, list, time.Now())
}

// approve keeps an approval on the tag, on disk before it is acknowledged. The tag is marked as being written.
func (s *Switch) approve(t wire.Tag, kept []wire.Approval) (wire.Tag, error) {
	t.Approvals = kept
	if err := s.keep(t, nil).wait(s.t.Persist); err != nil {
		return t, &Refusal{http.StatusInsufficientStorage, fmt.Sprintf("the approval may not be kept: %v: sign it again when the disk works", err)}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if h := s.hanging[t.Stop]; h != nil {
		h.tag.Approvals = kept
		t = h.tag
	}
	return t, nil
}
