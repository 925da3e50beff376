package proxy

import (
	"bytes"
	"encoding/json"
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
	var raw json.RawMessage
	if !control.Read(w, r, &raw) {
		return
	}
	kid := r.PathValue("kid")
	s, err := readSession(raw)
	if err != nil {
		p.recordUnreadable(kid, err)
		control.Refuse(w, http.StatusUnprocessableEntity, reason.PolicyNotLoaded, err.Error())
		return
	}
	if s.Kid != kid {
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, fmt.Sprintf("the document is of kid %q, the path says %q", s.Kid, kid))
		return
	}
	cut, err := p.Put(s)
	switch {
	case errors.Is(err, ErrStale):
		control.Refuse(w, http.StatusConflict, reason.OK, err.Error())
	case err != nil:
		control.Refuse(w, http.StatusUnprocessableEntity, reason.PolicyNotLoaded, err.Error())
	default:
		control.Reply(w, wire.Ack{Kid: s.Kid, Generation: s.Generation, Cut: cut})
	}
}

// readSession reads a document strictly: a field that this build does not know could be one that denies.
func readSession(raw []byte) (*session.Session, error) {
	var s session.Session
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s); err != nil {
		return nil, fmt.Errorf("reading the session document: %w", err)
	}
	return &s, nil
}

func (p *Proxy) deleteSession(w http.ResponseWriter, r *http.Request) {
	kid := r.PathValue("kid")
	control.Reply(w, wire.Ack{Kid: kid, Cut: p.Remove(kid)})
}
