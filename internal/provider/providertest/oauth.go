package providertest

import (
	"net/http"
	"net/url"
	"time"
)

// OAuth is an OAuth 2.0 server: client credentials, token exchange (RFC 8693) and revocation (RFC 7009).
type OAuth struct {
	base
	ClientID, Secret string
	Subject          string // the one token that can be exchanged
	TTL              time.Duration
	Grants           string // scopes of every token, whatever was asked for; empty: those that were
}

// NewOAuth returns a server whose tokens live an hour.
func NewOAuth() *OAuth {
	return &OAuth{ClientID: "tagout box", Secret: random("s+cret/"), Subject: random("subject-"), TTL: time.Hour}
}

// ServeHTTP is the API.
func (o *OAuth) ServeHTTP(w http.ResponseWriter, r *http.Request) { o.serve(w, r, o.Handler()) }

// Handler is the API without faults.
func (o *OAuth) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /token", o.client(o.token))
	mux.HandleFunc("POST /revoke", o.client(func(w http.ResponseWriter, r *http.Request) {
		o.set(r.PostForm.Get("token"), false)
		w.WriteHeader(http.StatusOK)
	}))
	return mux
}

func (o *OAuth) client(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id, secret, _ := r.BasicAuth()
		id, _ = url.QueryUnescape(id) // RFC 6749, 2.3.1
		secret, _ = url.QueryUnescape(secret)
		if r.ParseForm() == nil && id == "" {
			id, secret = r.PostForm.Get("client_id"), r.PostForm.Get("client_secret")
		}
		if id != o.ClientID || secret != o.Secret {
			reply(w, 401, map[string]string{"error": "invalid_client", "error_description": "the secret " + secret + " is wrong"})
			return
		}
		next(w, r)
	}
}

func (o *OAuth) token(w http.ResponseWriter, r *http.Request) {
	switch r.PostForm.Get("grant_type") {
	case "client_credentials":
	case "urn:ietf:params:oauth:grant-type:token-exchange":
		if r.PostForm.Get("subject_token") != o.Subject || r.PostForm.Get("subject_token_type") == "" {
			reply(w, 400, map[string]string{"error": "invalid_request"})
			return
		}
	default:
		reply(w, 400, map[string]string{"error": "unsupported_grant_type"})
		return
	}
	token, scope := random("at-"), r.PostForm.Get("scope")
	if o.Grants != "" {
		scope = o.Grants
	}
	o.set(token, true)
	reply(w, 200, map[string]any{"access_token": token, "token_type": "Bearer", "expires_in": seconds(o.TTL), "scope": scope,
		"issued_token_type": "urn:ietf:params:oauth:token-type:access_token"})
}
