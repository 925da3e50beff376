package killswitch

import (
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

var kidA1 = wire.Scope{Kid: "a1"}

// TestWhoCanRelease is S16 and dual control: who takes which tag off, and who is told what.
func TestWhoCanRelease(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		stop  Order
		by    []string // who signs, in this order
		last  string   // what the last one is told; "": the tag is off
		names string   // who released it
		text  string   // whoCan after all of them
	}{
		"the placer alone":       {Order{Signed: signedBy("ada")}, []string{"ada"}, "", "ada", ""},
		"another alone":          {Order{Signed: signedBy("ada")}, []string{"bob"}, "approved", "", "ada, or one more of cyd (bob has approved) can release it"},
		"two others":             {Order{Signed: signedBy("ada")}, []string{"bob", "cyd"}, "", "bob and cyd", ""},
		"one other, twice":       {Order{Signed: signedBy("ada")}, []string{"bob", "bob"}, "bob has approved the release of tag", "", "ada, or one more of cyd (bob has approved) can release it"},
		"placer after another":   {Order{Signed: signedBy("ada")}, []string{"bob", "ada"}, "", "ada", ""},
		"no role":                {Order{Signed: signedBy("ada")}, []string{"watch"}, "watch does not hold the role release on this box: ada, bob, cyd may", "", "ada, or bob and cyd together can release it"},
		"on no list":             {Order{Signed: signedBy("ada")}, []string{"eve"}, "is not on this box's authority list", "", "ada, or bob and cyd together can release it"},
		"the placer has no role": {Order{Signed: signedBy("watch")}, []string{"bob"}, "approved", "", "one more of ada, cyd (bob has approved) can release it"},
		"unsigned, listed name":  {Order{Peer: "uid:0", StopRequest: wire.StopRequest{By: "ada"}}, []string{"ada"}, "", "ada", ""},
		"unsigned, other name":   {Order{Peer: "uid:0", StopRequest: wire.StopRequest{By: "uid:0"}}, []string{"ada"}, "approved", "", "one more of bob, cyd (ada has approved) can release it"},
		"a signal":               {Order{StopRequest: wire.StopRequest{By: "ada", Cause: CauseSignal}}, []string{"ada"}, "approved", "", "one more of bob, cyd (ada has approved) can release it"},
		"a lease":                {Order{StopRequest: wire.StopRequest{By: "ada", Cause: "lease"}}, []string{"ada", "cyd"}, "", "ada and cyd", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newRig(t, "a1")
			s := g.sw()
			c.stop.Scope = kidA1
			if c.stop.Signed != nil {
				c.stop.By = c.stop.Signed.By
			}
			h, err := s.Stop(c.stop)
			if err != nil {
				t.Fatal(err)
			}
			stop := report(t, h).Stop
			var tag wire.Tag
			for _, by := range c.by {
				tag, err = signRelease(t, s, stop, by)
			}
			switch {
			case c.last == "" && (err != nil || tag.Released.IsZero() || tag.ReleasedBy != c.names || len(s.Tags()) != 0):
				t.Fatalf("not off: %+v, %v", tag, err)
			case c.last == "approved" && (err != nil || !tag.Released.IsZero() || len(tag.Approvals) != 1):
				t.Fatalf("no approval: %+v, %v", tag, err)
			case c.last != "" && c.last != "approved" && (err == nil || !strings.Contains(err.Error(), c.last)):
				t.Fatalf("told %v, want %q", err, c.last)
			}
			if c.text == "" {
				return
			}
			if left := s.Tags(); len(left) != 1 || whoCan(left[0], testList(), time.Now()) != c.text {
				t.Errorf("%+v: %s", left, s.whoCanNow(left[0]))
			}
		})
	}
}

func signedBy(name string) *authority.Signed {
	return &authority.Signed{Order: authority.Order{ID: "01JD0000000000000000000009", By: name}, Key: authority.KeyID(public(name))}
}

// TestApprovalsOutliveARestart: the first person's word is on disk, and counts for as long as that person holds the
// role with that key.
func TestApprovalsOutliveARestart(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	g.load = func() Kept {
		var k Kept
		for _, tag := range g.stored {
			k.Hanging = append(k.Hanging, tag)
		}
		return k
	}
	s := g.sw()
	stop := signStop(t, s, kidA1, "ada").Stop
	if _, err := signRelease(t, s, stop, "bob"); err != nil {
		t.Fatal(err)
	}
	s = g.sw()
	if tags := s.Tags(); len(tags) != 1 || len(tags[0].Approvals) != 1 || tags[0].Approvals[0].By != "bob" {
		t.Fatalf("after a restart: %+v", tags)
	}
	for name, change := range map[string]func(l *authority.List){
		"gone":        func(l *authority.List) { l.People = append(l.People[:1], l.People[2:]...) },
		"ended":       func(l *authority.List) { l.People[1].ValidUntil = time.Now().Add(-time.Second) },
		"another key": func(l *authority.List) { l.People[1].Key = "bob" + strings.TrimPrefix(public("eve"), "eve") },
		"no role":     func(l *authority.List) { l.People[1].Roles = []string{authority.RoleStop} },
	} {
		g.people.change(change)
		list, err := g.people.List()
		if err != nil {
			t.Fatal(err)
		}
		if left := approvals(s.Tags()[0], list, time.Now()); len(left) != 0 {
			t.Errorf("%s: the approval counts: %+v", name, left)
		}
	}
	// Without bob's word cyd's is the first.
	g.people.change(func(l *authority.List) { l.People[1].Roles = []string{authority.RoleStop} })
	tag, err := signRelease(t, s, stop, "cyd")
	if err != nil || !tag.Released.IsZero() || len(tag.Approvals) != 1 || tag.Approvals[0].By != "cyd" {
		t.Fatalf("%+v, %v", tag, err)
	}
	g.people.change(func(*authority.List) {})
	if tag, err := signRelease(t, s, stop, "bob"); err != nil || tag.ReleasedBy != "cyd and bob" {
		t.Errorf("%+v, %v", tag, err)
	}
}

// TestAnApprovalThatIsNotKeptIsNone.
func TestAnApprovalThatIsNotKeptIsNone(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	s := g.sw()
	stop := signStop(t, s, kidA1, "ada").Stop
	g.mu.Lock()
	g.put = func(wire.Tag) error { return errors.New("no space left on device") }
	g.mu.Unlock()
	if _, err := signRelease(t, s, stop, "bob"); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("approved: %v", err)
	}
	g.mu.Lock()
	g.put = nil
	g.mu.Unlock()
	tag, err := signRelease(t, s, stop, "cyd")
	if err != nil || !tag.Released.IsZero() || len(tag.Approvals) != 1 || tag.Approvals[0].By != "cyd" {
		t.Errorf("cyd's word took the tag off: %+v, %v", tag, err)
	}
}

// TestOrdersAreUsedOnce also after a restart, and a disk that takes nothing refuses a release but no stop.
func TestOrdersAreUsedOnce(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	s := g.sw()
	raw := sign(t, authority.Order{Action: authority.ActionStop, Scope: kidA1}, "ada")
	accept := func(s *Switch, raw []byte) reason.Code {
		t.Helper()
		_, err := s.Accept(raw, "uid:0")
		var no *authority.Refusal
		if errors.As(err, &no) {
			return no.Code
		}
		if err != nil {
			t.Fatal(err)
		}
		return reason.OK
	}
	if got := accept(s, raw); got != reason.OK {
		t.Fatal(got)
	}
	if got := accept(s, raw); got != reason.OrderReplayed {
		t.Errorf("replayed: %v", got)
	}
	waitFor(t, "its use on disk", func() bool {
		names, err := filepath.Glob(filepath.Join(g.usedDir, "0*"))
		return err == nil && len(names) == 1
	})
	s = g.sw()
	if got := accept(s, raw); got != reason.OrderReplayed {
		t.Errorf("replayed after a restart: %v", got)
	}
	// The directory is gone: nothing can be noted any more.
	if err := os.RemoveAll(g.usedDir); err != nil {
		t.Fatal(err)
	}
	if got := accept(s, sign(t, authority.Order{Action: authority.ActionRelease, Stop: "01JD0000000000000000000001"}, "ada")); got != reason.OrderNotKept {
		t.Errorf("a release that cannot be noted: %v", got)
	}
	again := sign(t, authority.Order{Action: authority.ActionStop, Scope: kidA1}, "ada")
	if got := accept(s, again); got != reason.OK {
		t.Errorf("a stop that cannot be noted: %v", got)
	}
	if got := accept(s, again); got != reason.OrderReplayed {
		t.Errorf("the same, again: %v", got)
	}
	waitFor(t, "every refusal on record", func() bool {
		var codes []reason.Code
		for _, r := range g.recorded(audit.EventOrderRefused) {
			if r.Outcome != audit.OutcomeDeny || r.Detail == "" || r.Actor != "ada" || r.Fields["peer"] != "uid:0" || r.Fields["order"] == "" {
				t.Fatalf("record %+v", r)
			}
			codes = append(codes, r.Reason)
		}
		return len(codes) == 4
	})
}

// TestNobodyIsKnown: a list that cannot be read refuses every signature, and no unsigned stop.
func TestNobodyIsKnown(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	s := g.sw()
	stop := signStop(t, s, kidA1, "ada").Stop
	g.people.mu.Lock()
	g.people.err = &authority.Refusal{Code: reason.OrderKey, Text: "the list is gone"}
	g.people.mu.Unlock()
	if _, err := signRelease(t, s, stop, "ada"); err == nil || !strings.Contains(err.Error(), "the list is gone") {
		t.Errorf("released: %v", err)
	}
	if rep := order(t, s, wire.Scope{All: true}); rep.State != wire.StateObserved {
		t.Errorf("an unsigned stop: %+v", rep)
	}
	if _, ok := s.Clear(wire.Scope{Kid: "new"}); ok {
		t.Error("nothing hangs")
	}
}

// TestOrderOverTheSocket walks the routes: a signed stop streams, an unsigned release is refused and says who can,
// a signed one comes back as the tag, and what vouches for each is on record.
func TestOrderOverTheSocket(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	s := g.sw()
	_, c := serve(t, s)
	events, err := eachOver(t.Context(), c, "/v1/order", wire.SignedOrder{Note: string(sign(t, authority.Order{Action: authority.ActionStop, Scope: kidA1, Via: authority.ViaFleet}, "ada"))})
	if err != nil || len(events) == 0 || events[len(events)-1].Final == nil {
		t.Fatalf("%+v, %v", events, err)
	}
	tag := events[len(events)-1].Final.Tag
	if tag.Cause != CauseFleet || tag.By != "ada" || tag.Order == "" || tag.Key != authority.KeyID(public("ada")) || tag.Peer != "" {
		t.Errorf("tag %+v", tag)
	}
	err = c.Call(t.Context(), http.MethodPost, "/v1/release", wire.ReleaseRequest{Stop: tag.Stop, By: "ada"}, nil)
	if control.Status(err) != http.StatusForbidden || !strings.Contains(err.Error(), "this release has none") || !strings.Contains(err.Error(), "ada, or bob and cyd together can release it") {
		t.Errorf("unsigned release: %v", err)
	}
	err = c.Call(t.Context(), http.MethodPost, "/v1/order", wire.SignedOrder{Note: "stop everything"}, nil)
	if control.Status(err) != http.StatusBadRequest || !strings.Contains(err.Error(), "no signed order") {
		t.Errorf("no note: %v", err)
	}
	err = c.Call(t.Context(), http.MethodPost, "/v1/order", wire.SignedOrder{Note: strings.Repeat("x", 3*authority.MaxNote)}, nil)
	if control.Status(err) != http.StatusBadRequest {
		t.Errorf("a long note: %v", err)
	}
	release := string(sign(t, authority.Order{Action: authority.ActionRelease, Stop: tag.Stop}, "ada"))
	var off wire.Tag
	if err := c.Call(t.Context(), http.MethodPost, "/v1/order", wire.SignedOrder{Note: release}, &off); err != nil || off.ReleasedBy != "ada" {
		t.Errorf("release: %+v, %v", off, err)
	}
	waitFor(t, "what vouches for both, on record", func() bool {
		got, gone := g.recorded(audit.EventStopReceived), g.recorded(audit.EventTagReleased)
		return len(got) == 1 && strings.Contains(got[0].Fields["note"], "— ada ") && got[0].Fields["cause"] == CauseFleet &&
			len(gone) == 1 && gone[0].Fields["note"] == release
	})
}

// TestUnsignedStopsAreRecordedAsSuch.
func TestUnsignedStopsAreRecordedAsSuch(t *testing.T) {
	t.Parallel()
	g := newRig(t, "a1")
	s := g.sw()
	_, c := serve(t, s)
	if _, err := stopOver(t.Context(), c, wire.StopRequest{Scope: kidA1, By: "ada", Reason: "r"}); err != nil {
		t.Fatal(err)
	}
	if tags := s.Tags(); len(tags) != 1 || tags[0].Peer == "" || tags[0].Order != "" {
		t.Errorf("tags %+v", tags)
	}
	waitFor(t, "the record", func() bool {
		got := g.recorded(audit.EventStopReceived)
		return len(got) == 1 && got[0].Fields["unsigned"] == s.Tags()[0].Peer && got[0].Fields["note"] == ""
	})
}
