package sandboxd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// orders judges who may make a kid and change what it can reach (api.Orders). Where people of the authority list have keys for the
// role grant, opening takes one of their signatures; where nobody has one, the name of somebody with the role does, as
// root typed it.
type orders struct {
	people []config.Authority
	spawns bool // making a kid takes a signature
	list   interface {
		List() (authority.List, error)
	}
	used interface {
		Take(o authority.Order, now time.Time) error
		Keep(id string) error
		Tidy(now time.Time)
	}
	clock interface { // by which approvals are judged
		Now() (time.Time, error)
	}
	audit Recorder
	log   *slog.Logger
}

func newOrders(cfg Config) *orders {
	dir := filepath.Join(cfg.Inst.StateDir(), instance.Sandboxd, "orders")
	used, err := authority.OpenUsed(dir, time.Now())
	if err != nil {
		cfg.Log.Error("reading which orders were used: signed orders are refused", "error", err)
	}
	return &orders{people: cfg.Authorities, spawns: cfg.SpawnSigned, list: authority.NewBook(cfg.Inst.AuthorityFile(), 0), used: used, clock: newOrderClock(filepath.Join(cfg.Inst.RunDir(), "order-clock.json")), audit: cfg.Audit, log: cfg.Log}
}

// changes are the actions that sandboxd carries out.
var changes = []string{authority.ActionGrant, authority.ActionUngrant, authority.ActionPolicy}

// Accept implements api.Orders. That the order was used is on disk before anything is done, so that no restart makes it
// good again; the disk may take its time, for nothing is stopped here.
func (o *orders) Accept(note []byte, peer string) (authority.Signed, error) {
	return o.accept(note, peer, func(s authority.Signed) error {
		switch {
		case slices.Contains(changes, s.Action):
			return nil
		case s.Action == authority.ActionSpawn, s.Action == authority.ActionHost:
			return &authority.Refusal{Code: reason.OrderInvalid, Text: "a signed spawn and an approval go with the request for the kid"}
		}
		return &authority.Refusal{Code: reason.OrderInvalid, Text: fmt.Sprintf("sandboxd carries out no %s: bring it to killswitchd (`tagout order` does)", s.Action)}
	})
}

// Spawn implements api.Orders.
func (o *orders) Spawn(r wire.SpawnRequest, peer string) (authority.Signed, error) {
	if r.Order == "" {
		if !o.spawns {
			return authority.Signed{}, nil
		}
		asked := authority.Signed{Order: authority.Order{Action: authority.ActionSpawn, Kid: r.Name}}
		list, err := o.list.List()
		if err == nil {
			who := strings.Join(list.Signers(authority.RoleSpawn, time.Now()), ", ")
			err = &authority.Refusal{Code: reason.OrderUnsigned,
				Text: "making a kid takes a signature on this box (`spawn:` in its configuration), and this has none: give --key FILE; who may: " + cmp.Or(who, "nobody")}
		}
		return asked, o.refuse(asked, peer, err)
	}
	return o.accept([]byte(r.Order), peer, forKid(authority.ActionSpawn, r))
}

// forKid says whether an order is the action for exactly this request.
func forKid(action string, r wire.SpawnRequest) func(authority.Signed) error {
	return func(s authority.Signed) error {
		for _, c := range []struct {
			wrong bool
			what  string
		}{
			{s.Action != action, "is for the action " + s.Action + ", and not for " + action},
			{s.Card != authority.CardSum(r.Card), "is for another card"},
			{s.Kid != r.Name, "is for another name of the kid"},
			{s.Reason != r.Purpose, "is for another purpose"},
		} {
			if c.wrong {
				return &authority.Refusal{Code: reason.OrderInvalid, Text: "the signed order " + c.what}
			}
		}
		return nil
	}
}

// Approve implements api.Orders.
func (o *orders) Approve(r wire.SpawnRequest, peer string) (authority.Signed, error) {
	asked := authority.Signed{Order: authority.Order{Action: authority.ActionHost, Kid: r.Name}}
	now, err := o.clock.Now()
	if err == nil && r.Approval == "" {
		err = o.unapproved(now)
	}
	if err != nil {
		return asked, o.refuse(asked, peer, err)
	}
	s, err := o.acceptAt(now, []byte(r.Approval), peer, forKid(authority.ActionHost, r))
	if err == nil {
		o.audit.Log(audit.Record{
			Event: audit.EventHostApproved, Outcome: audit.OutcomeOK, Kid: r.Name, Actor: s.By, Detail: s.Reason,
			Fields: map[string]string{"order": s.ID, "key": s.Key, "note": s.Note, "peer": peer, "card_sha256": s.Card},
		})
	}
	return s, err
}

// unapproved says what a kid on the machine's network needs, and from whom.
func (o *orders) unapproved(now time.Time) error {
	list, err := o.list.List()
	if err != nil {
		return err
	}
	who := strings.Join(list.Signers(authority.RoleHost, now), ", ")
	return &authority.Refusal{Code: reason.OrderUnsigned,
		Text: "a kid on the machine's network takes a person's signed approval, root's word is none: `tagout approve` makes one, --approval gives it; who may: " + cmp.Or(who, "nobody with a key holds the role "+authority.RoleHost)}
}

// accept takes an order that is good and that fits, once.
func (o *orders) accept(note []byte, peer string, fits func(authority.Signed) error) (authority.Signed, error) {
	return o.acceptAt(time.Now(), note, peer, fits)
}

func (o *orders) acceptAt(now time.Time, note []byte, peer string, fits func(authority.Signed) error) (authority.Signed, error) {
	list, err := o.list.List()
	if err != nil {
		return authority.Signed{}, o.refuse(authority.Signed{}, peer, err)
	}
	s, err := list.Verify(note, now)
	if err == nil {
		err = fits(s)
	}
	if err == nil {
		err = o.used.Take(s.Order, now)
	}
	if err == nil {
		if keepErr := o.used.Keep(s.ID); keepErr != nil {
			err = &authority.Refusal{Code: reason.OrderNotKept, Text: fmt.Sprintf("the order is not carried out, because it could be used again: %v: make room, then sign a new one", keepErr)}
		}
	}
	if err != nil {
		return authority.Signed{}, o.refuse(s, peer, err)
	}
	return s, nil
}

// Unsigned implements api.Orders. A list that cannot be read may hold keys: then nothing is opened.
func (o *orders) Unsigned(by, kid, peer string) error {
	now := time.Now()
	asked := authority.Signed{Order: authority.Order{By: by, Kid: kid}}
	list, err := o.list.List()
	if err != nil {
		return o.refuse(asked, peer, err)
	}
	if signers := list.Signers(authority.RoleGrant, now); len(signers) > 0 {
		return o.refuse(asked, peer, &authority.Refusal{Code: reason.OrderUnsigned,
			Text: "opening something for a kid takes a signature on this box, and this has none: give --key FILE; " + strings.Join(signers, ", ") + " may"})
	}
	var names []string
	for _, p := range o.people {
		if p.May(config.RoleGrant, now) {
			names = append(names, p.Name)
		}
	}
	switch {
	case slices.Contains(names, by):
		return nil
	case len(names) == 0:
		return o.refuse(asked, peer, &authority.Refusal{Code: reason.OrderRole,
			Text: "nobody may grant on this box: give somebody the role grant under authorities in its configuration"})
	}
	return o.refuse(asked, peer, &authority.Refusal{Code: reason.OrderRole,
		Text: fmt.Sprintf("%q may not grant on this box: %s may", by, strings.Join(names, ", "))})
}

// refuse records a refusal and returns it.
func (o *orders) refuse(s authority.Signed, peer string, err error) error {
	no := &authority.Refusal{Code: reason.OrderInvalid, Text: err.Error()}
	errors.As(err, &no)
	rec := audit.Record{
		Event: audit.EventOrderRefused, Outcome: audit.OutcomeDeny, Reason: no.Code, Kid: s.Kid, Actor: s.By, Detail: no.Text,
		Fields: map[string]string{"peer": peer},
	}
	for k, v := range map[string]string{"order": s.ID, "action": s.Action, "key": s.Key} {
		if v != "" {
			rec.Fields[k] = v
		}
	}
	o.audit.Log(rec)
	o.log.Warn("an order was refused", "by", s.By, "peer", peer, "reason", no.Code, "why", no.Text)
	return no
}

// tidyEvery is how often what is long over is forgotten.
const tidyEvery = time.Minute

// Run forgets orders that are long over, until ctx ends.
func (o *orders) Run(ctx context.Context) {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			o.used.Tidy(time.Now())
		case <-ctx.Done():
			return
		}
	}
}
