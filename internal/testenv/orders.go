package testenv

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/wire"
)

// Sign signs an order for the box as one of the practice box's people.
func (b *Box) Sign(o authority.Order, by string) wire.SignedOrder {
	b.T.Helper()
	if o.Reason == "" {
		o.Reason = b.T.Name()
	}
	order, err := b.Net.Sign(o, by)
	if err != nil {
		b.T.Fatal(err)
	}
	return order
}

// Deliver hands a signed release to killswitchd.
func (b *Box) Deliver(o wire.SignedOrder) (wire.Tag, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	var tag wire.Tag
	err := b.Client(instance.Killswitchd).Call(ctx, http.MethodPost, "/v1/order", o, &tag)
	return tag, err
}

// TryRelease asks for a tag to come off with somebody's signature. A tag that is not released waits for a second
// person's.
func (b *Box) TryRelease(stop, by string) (wire.Tag, error) {
	b.T.Helper()
	return b.Deliver(b.Sign(authority.Order{Action: authority.ActionRelease, Stop: stop}, by))
}

// Release takes a tag off, whoever placed it: with the practice authority's signature, and with a second person's
// where that is not enough.
func (b *Box) Release(stop string) {
	b.T.Helper()
	for _, by := range []string{practice.Authority, practice.Second} {
		tag, err := b.TryRelease(stop, by)
		if err != nil {
			b.T.Fatalf("releasing tag %s: %v", stop, err)
		}
		if !tag.Released.IsZero() {
			return
		}
	}
	b.T.Fatalf("two people's signatures did not release tag %s", stop)
}

// SignedStop orders a stop with somebody's signature and returns its report, or why there is none.
func (b *Box) SignedStop(o wire.SignedOrder) (*wire.StopReport, error) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	var report *wire.StopReport
	err := b.Client(instance.Killswitchd).Each(ctx, http.MethodPost, "/v1/order", o, func(line json.RawMessage) error {
		var ev wire.StopEvent
		err := json.Unmarshal(line, &ev)
		if ev.Final != nil {
			report = ev.Final
		}
		return err
	})
	return report, err
}

// KeyFile writes a person's private key where --key finds it.
func (b *Box) KeyFile(person string) string {
	b.T.Helper()
	private := b.Net.Key(person)
	public, err := authority.Public(private)
	if err != nil {
		b.T.Fatal(err)
	}
	path := filepath.Join(b.T.TempDir(), "key")
	if err := os.WriteFile(path, []byte("# public key: "+public+"\n"+private+"\n"), 0o600); err != nil {
		b.T.Fatal(err)
	}
	return path
}
