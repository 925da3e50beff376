package authority

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/wire"
)

// anyKey opens a note whoever signed it: the check of keys, off.
func anyKey(raw []byte, known note.Verifiers) (*note.Note, error) {
	n, err := note.Open(raw, known)
	var stranger *note.UnverifiedNoteError
	if errors.As(err, &stranger) {
		n = stranger.Note
		n.Sigs, n.UnverifiedSigs = n.UnverifiedSigs, nil
		return n, nil
	}
	return n, err
}

// TestEachCheckIsNeeded: for each check there is an order that the verifier refuses, and that it accepts with that one
// check off. None is there for show, and none could go without being missed.
func TestEachCheckIsNeeded(t *testing.T) {
	t.Parallel()
	ada, bob := makePerson(t, "ada", RoleStop, RoleRelease), makePerson(t, "bob", RoleStop)
	gone, eve := makePerson(t, "gone", RoleStop), makePerson(t, "ada", RoleStop)
	gone.ValidUntil = now
	list := List{Box: box, People: []Person{ada.Person, bob.Person, gone.Person}}
	order := func(by string, fn func(*Order)) string { o := stopOrder(by); fn(&o); return text(t, o) }
	forged := map[string][]byte{
		"owner":  signText(t, text(t, stopOrder("ada")), bob.private),
		"box":    signText(t, order("ada", func(o *Order) { o.Box = stop1 }), ada.private),
		"future": signText(t, order("ada", func(o *Order) { *o = shift(*o, time.Hour) }), ada.private),
		"life":   signText(t, order("ada", func(o *Order) { o.Expires = o.Issued.Add(MaxLife + time.Second) }), ada.private),
		"expiry": signText(t, order("ada", func(o *Order) { *o = shift(*o, -Life) }), ada.private),
		"role":   signText(t, text(t, releaseOrder("bob")), bob.private),
		"end":    signText(t, text(t, stopOrder("gone")), gone.private),
	}
	var names []string
	for _, c := range checks {
		names = append(names, c.name)
	}
	if slices.Sort(names); !slices.Equal(names, slices.Sorted(maps.Keys(forged))) {
		t.Fatalf("checks %v, forged orders for %v", names, slices.Sorted(maps.Keys(forged)))
	}
	for name, raw := range forged {
		without := slices.DeleteFunc(slices.Clone(checks), func(c check) bool { return c.name == name })
		if _, err := list.Verify(raw, now); err == nil {
			t.Errorf("%s: the forged order was accepted", name)
		}
		if s, err := (verifier{note.Open, without}).verify(list, raw, now); err != nil || s.By == "" {
			t.Errorf("%s: with the check off the forged order is refused all the same, so this test shows nothing of it: %v", name, err)
		}
	}
	// An unknown key, in a listed person's name: two things stand in its way, the signature and who owns the key.
	raw := signText(t, text(t, stopOrder("ada")), eve.private)
	without := slices.DeleteFunc(slices.Clone(checks), func(c check) bool { return c.name == "owner" })
	for name, c := range map[string]struct {
		v       verifier
		accepts bool
	}{
		"both on":       {verifier{note.Open, checks}, false},
		"owner off":     {verifier{note.Open, without}, false},
		"signature off": {verifier{anyKey, checks}, false},
		"both off":      {verifier{anyKey, without}, true},
	} {
		if _, err := c.v.verify(list, raw, now); (err == nil) != c.accepts {
			t.Errorf("an unknown key, %s: %v", name, err)
		}
	}
	// Bytes that were changed after signing pass no verifier that opens notes, with every check off.
	if _, err := (verifier{note.Open, nil}).verify(list, append(slices.Clone(raw[:len(raw)-8]), "AAAAAA=\n"...), now); err == nil {
		t.Error("a broken signature was accepted")
	}
}

// TestTheMemoryIsNeeded: the same order is refused the second time by the memory of used orders, and by nothing else;
// a memory that lost it accepts it again. That is why it is on disk before a release does anything.
func TestTheMemoryIsNeeded(t *testing.T) {
	t.Parallel()
	ada := makePerson(t, "ada", RoleStop)
	list := List{Box: box, People: []Person{ada.Person}}
	raw := signText(t, text(t, New(Order{Action: ActionStop, Box: box, Scope: wire.Scope{All: true}, By: "ada", Reason: "r"}, now, Life)), ada.private)
	take := func(u *Used) error {
		s, err := list.Verify(raw, now)
		if err != nil {
			t.Fatalf("the order itself is good, as often as it is shown: %v", err)
		}
		if err := u.Take(s.Order, now); err != nil {
			return err
		}
		return u.Keep(s.ID)
	}
	dir := t.TempDir()
	if err := take(open(t, dir, now)); err != nil {
		t.Fatal(err)
	}
	if err := take(open(t, dir, now)); err == nil {
		t.Error("the replayed order was accepted")
	}
	if err := take(open(t, t.TempDir(), now)); err != nil {
		t.Errorf("with the memory off the replayed order is refused all the same, so this test shows nothing of it: %v", err)
	}
}
