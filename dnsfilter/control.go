package dnsfilter

import (
	"errors"
	"fmt"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// Routes adds the filter's control routes, as package wire lists them, to mux.
func (f *Filter) Routes(mux *http.ServeMux) {
	mux.HandleFunc("PUT /v1/sessions/{kid}", control.Admit(f.putSession, f.cfg.Sandboxd))
	mux.HandleFunc("DELETE /v1/sessions/{kid}", control.Admit(f.deleteSession, f.cfg.Sandboxd))
	mux.HandleFunc("POST /v1/names", control.Admit(f.findName, f.cfg.Proxy))
	mux.HandleFunc("POST /v1/claims", control.Admit(f.claimName, f.cfg.Proxy))
}

func (f *Filter) putSession(w http.ResponseWriter, r *http.Request) {
	var doc session.Session
	if !control.Read(w, r, &doc) {
		return
	}
	if doc.Kid != r.PathValue("kid") {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, fmt.Sprintf("loading a session: the document is kid %q's", doc.Kid))
		return
	}
	switch err := f.load(&doc); {
	case err == nil:
		control.Reply(w, wire.Ack{Kid: doc.Kid, Generation: doc.Generation})
	case errors.Is(err, errConflict):
		control.Refuse(w, http.StatusConflict, reason.PolicyNotLoaded, err.Error())
	default:
		control.Refuse(w, http.StatusUnprocessableEntity, reason.PolicyNotLoaded, err.Error())
	}
}

func (f *Filter) deleteSession(w http.ResponseWriter, r *http.Request) {
	if err := f.unload(r.PathValue("kid")); err != nil {
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
		return
	}
	control.Reply(w, struct{}{})
}

func (f *Filter) findName(w http.ResponseWriter, r *http.Request) {
	var q wire.NameQuery
	if !control.Read(w, r, &q) {
		return
	}
	k := f.marked(w, q.Mark)
	if k == nil {
		return
	}
	name, ok := k.nameOf(q.Addr)
	if !ok {
		control.Refuse(w, http.StatusNotFound, reason.VirtualUnknown, fmt.Sprintf("%s was not given out in session %s", q.Addr, k.doc.ID))
		return
	}
	control.Reply(w, wire.Name{Name: name})
}

// claimName writes no record: the proxy records the connection that it asks for, with the reason given here.
func (f *Filter) claimName(w http.ResponseWriter, r *http.Request) {
	var q wire.NameClaim
	if !control.Read(w, r, &q) {
		return
	}
	k := f.marked(w, q.Mark)
	if k == nil {
		return
	}
	name, code, err := k.claim(q.Name)
	if err != nil {
		control.Refuse(w, http.StatusForbidden, code, err.Error())
		return
	}
	control.Reply(w, wire.Name{Name: name})
}

// marked returns the session with the mark; where there is none it has answered and returns nil.
func (f *Filter) marked(w http.ResponseWriter, mark uint32) *kid {
	k := f.sessions.byMark(mark)
	if k == nil {
		control.Refuse(w, http.StatusNotFound, reason.UnknownSession, fmt.Sprintf("no session has mark %#x", mark))
	}
	return k
}
