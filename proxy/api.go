package proxy

import (
	"errors"
	"fmt"
	"net/http"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// sandboxdUID is who may change sessions: sandboxd runs as root.
const sandboxdUID = 0

// Routes adds the proxy's control routes (package wire) to mux.
func (p *Proxy) Routes(mux *http.ServeMux) {
	mux.HandleFunc("PUT /v1/sessions/{kid}", control.Admit(p.putSession, sandboxdUID))
	mux.HandleFunc("DELETE /v1/sessions/{kid}", control.Admit(p.deleteSession, sandboxdUID))
}

func (p *Proxy) putSession(w http.ResponseWriter, r *http.Request) {
	var s session.Session
	if !control.Read(w, r, &s) {
		return
	}
	if kid := r.PathValue("kid"); s.Kid != kid {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, fmt.Sprintf("the document is of kid %q, the path says %q", s.Kid, kid))
		return
	}
	err := p.Put(&s)
	switch {
	case errors.Is(err, ErrStale):
		control.Refuse(w, http.StatusConflict, reason.OK, err.Error())
	case err != nil:
		control.Refuse(w, http.StatusUnprocessableEntity, reason.PolicyNotLoaded, err.Error())
	default:
		control.Reply(w, wire.Ack{Kid: s.Kid, Generation: s.Generation})
	}
}

func (p *Proxy) deleteSession(w http.ResponseWriter, r *http.Request) {
	kid := r.PathValue("kid")
	p.Remove(kid)
	control.Reply(w, wire.Ack{Kid: kid})
}
