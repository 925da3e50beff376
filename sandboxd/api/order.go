package api

import (
	"context"
	"errors"
	"net/http"

	"tagout/internal/authority"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

func (s *server) orderRoutes() {
	add(s, route{id: "give-order", method: http.MethodPost, path: "/v1/order", summary: "Carry out a signed order: a grant, its end, or another policy for a living kid", role: RoleGrant}, s.order)
}

type orderRequest struct{ Body wire.SignedOrder }

type orderReply struct{ Body wire.OrderReply }

// order carries out what a signed order asks for. The signature says who gives it; the caller only brings it.
func (s *server) order(ctx context.Context, in *orderRequest) (*orderReply, error) {
	o, err := s.orders.Accept([]byte(in.Body.Note), actor(ctx))
	if err != nil {
		return nil, orderRefused(err)
	}
	sig := kids.Signature{Order: o.ID, Key: o.Key, Note: o.Note}
	switch o.Action {
	case authority.ActionGrant:
		g, err := s.kids.Grant(ctx, o.Kid, actor(ctx), wire.GrantRequest{
			Host: o.Door.Host, Port: o.Door.Port, Protocol: o.Door.Protocol, For: o.Door.For, By: o.By, Reason: o.Reason,
		}, sig)
		if err != nil {
			return nil, refused(err)
		}
		return &orderReply{wire.OrderReply{Grant: &g}}, nil
	case authority.ActionUngrant:
		if err := s.kids.Ungrant(ctx, o.Kid, o.Grant, actor(ctx), o.By, o.Reason, sig); err != nil {
			return nil, refused(err)
		}
		return &orderReply{}, nil
	case authority.ActionPolicy:
		if sum := authority.CardSum(in.Body.Card); sum != o.Card {
			return nil, problem(http.StatusBadRequest, reason.OrderInvalid, "the card is not the one that was signed: its SHA-256 is "+sum+", and the order says "+o.Card)
		}
		reply, err := s.setPolicy(ctx, o.Kid, wire.PolicyRequest{Card: in.Body.Card, CardFile: in.Body.CardFile, By: o.By, Reason: o.Reason}, sig)
		if err != nil {
			return nil, err
		}
		return &orderReply{wire.OrderReply{Policy: &reply}}, nil
	}
	return nil, problem(http.StatusBadRequest, reason.OrderInvalid, "sandboxd carries out no "+o.Action) // Accept lets no other through
}

func orderRefused(err error) error {
	no := &authority.Refusal{Code: reason.Internal, Text: err.Error()}
	errors.As(err, &no)
	status := http.StatusForbidden
	switch no.Code {
	case reason.OrderInvalid:
		status = http.StatusBadRequest
	case reason.OrderReplayed:
		status = http.StatusConflict
	case reason.OrderNotKept:
		status = http.StatusInsufficientStorage
	case reason.Internal:
		status = http.StatusInternalServerError
	}
	return problem(status, no.Code, no.Text)
}
