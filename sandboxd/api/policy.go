package api

import (
	"context"
	"net/http"
	"slices"
	"strings"

	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

func (s *server) policyRoutes() {
	add(s, route{id: "change-policy", method: http.MethodPut, path: "/v1/kids/{kid}/policy", summary: "Replace a living kid's egress policy with that of another card", role: RoleGrant}, s.changePolicy)
	add(s, route{id: "place-grant", method: http.MethodPost, path: "/v1/kids/{kid}/grants", summary: "Open one host and port of a living kid for a while", role: RoleGrant}, s.grant)
	add(s, route{id: "list-grants", method: http.MethodGet, path: "/v1/kids/{kid}/grants", summary: "List the grants that hold", role: RoleRead}, s.grants)
	// It needs neither an authority's role nor a signature: taking back is always right, and it is recorded who did it.
	add(s, route{id: "end-grant", method: http.MethodDelete, path: "/v1/kids/{kid}/grants/{id}", summary: "End a grant and cut what lived on it", role: RoleExec, status: http.StatusNoContent}, s.ungrant)
}

type policyRequest struct {
	Named
	Body wire.PolicyRequest
}

type policyReply struct{ Body wire.PolicyReply }

func (s *server) changePolicy(ctx context.Context, in *policyRequest) (*policyReply, error) {
	if err := s.allowed(ctx, in.Body.By, in.Kid); err != nil {
		return nil, err
	}
	reply, err := s.setPolicy(ctx, in.Kid, in.Body, kids.Signature{})
	if err != nil {
		return nil, err
	}
	return &policyReply{reply}, nil
}

func (s *server) setPolicy(ctx context.Context, kid string, req wire.PolicyRequest, sig kids.Signature) (wire.PolicyReply, error) {
	change, err := s.planEgress(req)
	if err != nil {
		s.kids.PolicyRefused(kid, actor(ctx), req.By, err)
		return wire.PolicyReply{}, problem(http.StatusUnprocessableEntity, reason.Malformed, "the old policy stays: "+err.Error())
	}
	change.By, change.Reason, change.Actor, change.Signed = req.By, req.Reason, actor(ctx), sig
	reply, err := s.kids.ChangePolicy(ctx, kid, change)
	if err != nil {
		return wire.PolicyReply{}, refused(err)
	}
	return reply, nil
}

type grantRequest struct {
	Named
	Body wire.GrantRequest
}

type grantReply struct{ Body wire.Grant }

func (s *server) grant(ctx context.Context, in *grantRequest) (*grantReply, error) {
	if err := s.allowed(ctx, in.Body.By, in.Kid); err != nil {
		return nil, err
	}
	g, err := s.kids.Grant(ctx, in.Kid, actor(ctx), in.Body, kids.Signature{})
	if err != nil {
		return nil, refused(err)
	}
	return &grantReply{g}, nil
}

type grantsRequest struct {
	Named
	Page
}

func (s *server) grants(_ context.Context, in *grantsRequest) (*listed[wire.Grant], error) {
	list, err := s.kids.Grants(in.Kid)
	if err != nil {
		return nil, refused(err)
	}
	slices.SortFunc(list, func(a, b wire.Grant) int { return strings.Compare(a.ID, b.ID) })
	return cut(&in.Page, list, func(g wire.Grant) string { return g.ID }), nil
}

type ungrantRequest struct {
	Named
	ID     string `path:"id" doc:"The grant's id."`
	By     string `query:"by" maxLength:"256" doc:"Who ends it, for the record."`
	Reason string `query:"reason" maxLength:"4096" doc:"Why, for the record."`
}

func (s *server) ungrant(ctx context.Context, in *ungrantRequest) (*struct{}, error) {
	if err := s.kids.Ungrant(ctx, in.Kid, in.ID, actor(ctx), in.By, in.Reason, kids.Signature{}); err != nil {
		return nil, refused(err)
	}
	return nil, nil
}

// allowed says whether the named person may open something without a signature.
func (s *server) allowed(ctx context.Context, by, kid string) error {
	if err := s.orders.Unsigned(by, kid, actor(ctx)); err != nil {
		return orderRefused(err)
	}
	return nil
}
