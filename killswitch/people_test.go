package killswitch

import (
	"sync"
	"testing"
	"time"

	"tagout/internal/authority"
	"tagout/internal/wire"
)

const testBox = "01JD0000000000000000000000"

// people are those whom every rig's box knows: ada, bob and cyd may stop and release, watch may only stop, and eve
// is on no list.
var people = sync.OnceValue(func() map[string]string {
	keys := map[string]string{}
	for _, name := range []string{"ada", "bob", "cyd", "watch", "eve"} {
		private, _, err := authority.NewKey(name)
		if err != nil {
			panic(err) // a test
		}
		keys[name] = private
	}
	return keys
})

func public(name string) string {
	key, err := authority.Public(people()[name])
	if err != nil {
		panic(err) // a test
	}
	return key
}

func testList() authority.List {
	l := authority.List{Box: testBox}
	for _, name := range []string{"ada", "bob", "cyd"} {
		l.People = append(l.People, authority.Person{Name: name, Roles: []string{authority.RoleStop, authority.RoleRelease}, Key: public(name)})
	}
	l.People = append(l.People, authority.Person{Name: "watch", Roles: []string{authority.RoleStop}, Key: public("watch")})
	return l
}

// book is a list that a test can change.
type book struct {
	mu   sync.Mutex
	list authority.List
	err  error
}

func (b *book) List() (authority.List, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.list, b.err
}

func (b *book) change(fn func(l *authority.List)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := testList()
	fn(&l)
	b.list = l
}

func openUsed(t *testing.T, dir string) *authority.Used {
	u, err := authority.OpenUsed(dir, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// sign returns what a person signs, good for five minutes.
func sign(t *testing.T, o authority.Order, by string) []byte {
	t.Helper()
	o.By, o.Box = by, testBox
	if o.Reason == "" {
		o.Reason = "test"
	}
	raw, err := authority.Sign(authority.New(o, time.Now(), authority.Life), people()[by])
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// signRelease takes the whole way of a person's release: signed, accepted, carried out.
func signRelease(t *testing.T, s *Switch, stop, by string) (wire.Tag, error) {
	t.Helper()
	signed, err := s.Accept(sign(t, authority.Order{Action: authority.ActionRelease, Stop: stop}, by), "test")
	if err != nil {
		return wire.Tag{}, err
	}
	return s.Release(signed)
}

// signStop gives a signed stop and waits for its report.
func signStop(t *testing.T, s *Switch, sc wire.Scope, by string) wire.StopReport {
	t.Helper()
	signed, err := s.Accept(sign(t, authority.Order{Action: authority.ActionStop, Scope: sc}, by), "test")
	if err != nil {
		t.Fatal(err)
	}
	h, err := s.Stop(stopOf(signed, time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	return report(t, h)
}
