package killswitch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// Authorities is the box's authority list as it is now. authority.Book fulfils it. An error means that nobody is
// known; it must not take longer than a stop may wait.
type Authorities interface {
	List() (authority.List, error)
}

// UsedOrders remembers which orders were used. *authority.Used fulfils it.
type UsedOrders interface {
	Take(o authority.Order, now time.Time) error
	Keep(id string) error // may hang as long as the disk does
	Tidy(now time.Time)   // likewise
}

// Accept judges a signed order and marks it as used. peer is who delivered it, for the record: the signature alone
// counts. That its use could not be noted refuses a release, and no stop. An error is an *authority.Refusal, and is
// on record.
func (s *Switch) Accept(raw []byte, peer string) (authority.Signed, error) {
	now := time.Now()
	list, err := s.cfg.Authorities.List()
	if err != nil {
		return authority.Signed{}, s.refuseOrder(authority.Signed{}, peer, err)
	}
	signed, err := list.Verify(raw, now)
	if err == nil && signed.Action != authority.ActionStop && signed.Action != authority.ActionRelease {
		err = &authority.Refusal{Code: reason.OrderInvalid, Text: fmt.Sprintf("killswitchd carries out stops and releases: bring a %s to sandboxd (`tagout order` does)", signed.Action)}
	}
	if err == nil {
		err = s.take(signed, now)
	}
	if err != nil {
		return authority.Signed{}, s.refuseOrder(signed, peer, err)
	}
	return signed, nil
}

// take marks an order as used. Its note goes to disk while a stop fires, and before a release does anything.
func (s *Switch) take(o authority.Signed, now time.Time) error {
	err := s.cfg.Used.Take(o.Order, now)
	var no *authority.Refusal
	if o.Action == authority.ActionStop {
		if errors.As(err, &no) && no.Code == reason.OrderNotKept {
			s.cfg.Log.Error("a stop order is carried out though it cannot be noted as used", "order", o.ID, "error", err)
			return nil
		}
		if err == nil {
			go s.keepOrder(o.ID)
		}
		return err
	}
	if err != nil {
		return err
	}
	k := &keeping{done: make(chan struct{})}
	go func() {
		k.err = s.cfg.Used.Keep(o.ID)
		close(k.done)
	}()
	if err := k.wait(s.t.Persist); err != nil {
		return &authority.Refusal{Code: reason.OrderNotKept, Text: fmt.Sprintf("the release is not carried out, because it could be used again: %v: make room, then sign a new one", err)}
	}
	return nil
}

func (s *Switch) keepOrder(id string) {
	if err := s.cfg.Used.Keep(id); err != nil {
		s.cfg.Log.Error("noting a stop order as used: it is tried again", "order", id, "error", err)
	}
}

// tidyOrders notes what the disk has refused, and forgets what is long over. A disk that hangs holds nothing else
// up.
func (s *Switch) tidyOrders(ctx context.Context) {
	tick := time.NewTicker(s.t.Slow)
	defer tick.Stop()
	for {
		s.cfg.Used.Tidy(time.Now())
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// refuseOrder records a refusal and returns it.
func (s *Switch) refuseOrder(o authority.Signed, peer string, err error) error {
	no := &authority.Refusal{Code: reason.OrderInvalid, Text: err.Error()}
	errors.As(err, &no)
	rec := audit.Record{
		Event: audit.EventOrderRefused, Outcome: audit.OutcomeDeny, Reason: no.Code, Actor: o.By, Detail: no.Text,
		Fields: map[string]string{"peer": peer},
	}
	for k, v := range map[string]string{"order": o.ID, "action": o.Action, "key": o.Key, "stop": o.Stop} {
		if v != "" {
			rec.Fields[k] = v
		}
	}
	s.audit.send(rec)
	s.cfg.Log.Warn("an order was refused", "by", o.By, "peer", peer, "reason", no.Code, "why", no.Text)
	return no
}

// orderStatus is the HTTP status of a refusal.
func orderStatus(code reason.Code) int {
	switch code {
	case reason.OrderInvalid:
		return http.StatusBadRequest
	case reason.OrderReplayed:
		return http.StatusConflict
	case reason.OrderNotKept:
		return http.StatusInsufficientStorage
	}
	return http.StatusForbidden
}

// stopOf is the stop that a signed order asks for.
func stopOf(o authority.Signed, received time.Time) Order {
	cause := CauseOrder
	if o.Via == authority.ViaFleet {
		cause = CauseFleet
	}
	return Order{
		StopRequest: wire.StopRequest{Scope: o.Scope, Layers: o.Layers, By: o.By, Reason: o.Reason, Cause: cause},
		Received:    received, Signed: &o,
	}
}
