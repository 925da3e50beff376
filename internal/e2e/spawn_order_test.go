package e2e

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
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// A box whose configuration says so makes no kid without the signature of somebody with the role spawn; other boxes do.
// killswitchd's proofs go on.
func TestSpawnsAreSigned(t *testing.T) {
	t.Parallel()
	box := testenv.StartWith(t, func(b *config.Box) { b.SpawnSigned = true })
	spawn := func(name, purpose, card string, o wire.SignedOrder) error {
		return box.Client(instance.Sandboxd).Call(t.Context(), http.MethodPost, "/v1/kids", wire.SpawnRequest{Name: name, Purpose: purpose, Card: card, Order: o.Note}, nil)
	}
	refused := func(what string, code reason.Code, err error) {
		t.Helper()
		var no *control.Error
		if !errors.As(err, &no) || no.Problem.Reason != code {
			t.Errorf("%s: %v, want %s", what, err, code)
			return
		}
		box.WaitRecord(what+" on record", func(r *audit.Record) bool {
			return r.Event == audit.EventOrderRefused && r.Reason == code && r.Detail == no.Problem.Detail && r.Outcome == audit.OutcomeDeny
		})
	}
	order := authority.Order{Action: authority.ActionSpawn, Kid: "k1", Card: authority.CardSum(bareCard), Reason: "try it"}
	list, err := authority.NewBook(box.Inst.AuthorityFile(), 0).List()
	if err != nil {
		t.Fatal(err)
	}
	old := order
	old.Box, old.By = list.Box, practice.Authority
	raw, err := authority.Sign(authority.New(old, time.Now().Add(-time.Hour), authority.Life), box.Net.Key(practice.Authority))
	if err != nil {
		t.Fatal(err)
	}
	good := box.Sign(order, practice.Authority)
	refused("no signature", reason.OrderUnsigned, spawn("k1", "try it", bareCard, wire.SignedOrder{}))
	refused("without the role", reason.OrderRole, spawn("k1", "try it", bareCard, box.Sign(order, practice.Third)))
	refused("expired", reason.OrderExpired, spawn("k1", "try it", bareCard, wire.SignedOrder{Note: string(raw)}))
	refused("changed", reason.OrderKey, spawn("k1", "try it", bareCard, wire.SignedOrder{Note: strings.Replace(good.Note, "try it", "try on", 1)}))
	refused("another card", reason.OrderInvalid, spawn("k1", "try it", bareCard+"\n", good))
	refused("another name", reason.OrderInvalid, spawn("k2", "try it", bareCard, good))
	refused("another purpose", reason.OrderInvalid, spawn("k1", "run it", bareCard, good))
	refused("another action", reason.OrderInvalid, spawn("k1", "try it", bareCard,
		box.Sign(authority.Order{Action: authority.ActionPolicy, Kid: "k1", Card: order.Card, Reason: "try it"}, practice.Authority)))
	if err := spawn("k1", "try it", bareCard, good); err != nil {
		t.Fatalf("a signed spawn: %v", err)
	}
	box.WaitRecord("the order of the spawn on record", func(r *audit.Record) bool {
		return r.Event == audit.EventKidSpawned && r.Kid == "k1" && r.Fields["note"] == good.Note && r.Fields["key"] != ""
	})
	refused("a second use", reason.OrderReplayed, spawn("k1", "try it", bareCard, good))
	kids := 0
	var all []wire.Kid
	if err := box.Client(instance.Sandboxd).Call(t.Context(), http.MethodGet, "/v1/kids", nil, &all); err != nil {
		t.Fatal(err)
	}
	for _, k := range all {
		if !k.Proof {
			kids++
		}
	}
	if kids != 1 {
		t.Errorf("%d kids: %+v, want k1 alone", kids, all)
	}
	card := filepath.Join(t.TempDir(), "card.yaml")
	if err := os.WriteFile(card, []byte(bareCard), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := box.Tagout("spawn", card, "--name", "k2"); r.Code != 3 || !strings.Contains(r.Stderr, "--key") || !strings.Contains(r.Stderr, practice.Authority) {
		t.Errorf("the command without a key: %+v", r)
	}
	key := box.KeyFile(practice.Authority)
	if said := box.Must("spawn", card, "--name", "k2", "--key", key); said != "k2\n" {
		t.Errorf("the command with a key says %q", said)
	}
	if said := box.Must("run", card, "--key", key, "--purpose", "say\nsomething", "--", "/bin/echo", "hello"); said != "hello\n" {
		t.Errorf("a run with a key says %q", said)
	}
	if r := box.Tagout("prove"); r.Code != 0 {
		t.Errorf("a proof, whose kid nobody signs: %+v", r)
	}
}
