package api

import (
	"net/http"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s server) changePolicy(w http.ResponseWriter, r *http.Request) {
	var req wire.PolicyRequest
	if !control.Read(w, r, &req) || !s.allowed(w, req.By) {
		return
	}
	change, err := s.planEgress(req)
	if err != nil {
		s.kids.PolicyRefused(r.PathValue("kid"), actor(r), req.By, err)
		control.Refuse(w, http.StatusUnprocessableEntity, reason.Malformed, "the old policy stays: "+err.Error())
		return
	}
	change.By, change.Reason, change.Actor = req.By, req.Reason, actor(r)
	reply, err := s.kids.ChangePolicy(r.Context(), r.PathValue("kid"), change)
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, reply)
}

func (s server) grant(w http.ResponseWriter, r *http.Request) {
	var req wire.GrantRequest
	if !control.Read(w, r, &req) || !s.allowed(w, req.By) {
		return
	}
	g, err := s.kids.Grant(r.Context(), r.PathValue("kid"), actor(r), req)
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, g)
}

func (s server) grants(w http.ResponseWriter, r *http.Request) {
	list, err := s.kids.Grants(r.PathValue("kid"))
	if err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, list)
}

// ungrant needs no role: taking back is always right, and it is recorded who did it.
func (s server) ungrant(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	if err := s.kids.Ungrant(r.Context(), r.PathValue("kid"), r.PathValue("id"), actor(r), q.Get("by"), q.Get("reason")); err != nil {
		refuse(w, err)
		return
	}
	control.Reply(w, struct{}{})
}

// allowed says whether the named person may open something; where not, it has answered.
func (s server) allowed(w http.ResponseWriter, by string) bool {
	if err := s.mayGrant(by); err != nil {
		control.Refuse(w, http.StatusForbidden, reason.OK, err.Error())
		return false
	}
	return true
}
