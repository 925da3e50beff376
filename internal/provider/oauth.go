package provider

import (
	"context"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// What OAuth puts into requests (RFC 6749, 8693).
const (
	grantClient     = "client_credentials"
	grantExchange   = "urn:ietf:params:oauth:grant-type:token-exchange"
	typeAccessToken = "urn:ietf:params:oauth:token-type:access_token"
)

// OAuth leases access tokens from an OAuth 2.0 server: by client credentials (RFC 6749, 4.4), or in exchange for
// another token (RFC 8693) where the role names one. RFC 7009 revokes them. A token is not renewed; a new one is got.
//
// An answer that was lost may have made a token that nobody knows and nobody can revoke: it lives until its own end.
type OAuth struct {
	Call      Call
	TokenURL  string
	RevokeURL string
	ClientID  string
	Secret    string // vault entry with the client's secret
	InBody    bool   // client id and secret go into the body instead of the Authorization header
	Secrets   Secrets
	Roles     map[string]OAuthRole
}

// OAuthRole is one kind of token that can be leased.
type OAuthRole struct {
	Scopes      []string // asked for; a token for more is given back at once
	Audience    string   // may be empty
	Resource    string   // RFC 8707; may be empty
	Subject     string   // vault entry with the token that is exchanged; empty: client credentials
	SubjectType string   // empty: an access token
}

// oauthAnswer is RFC 6749, 5.1 and 5.2.
type oauthAnswer struct {
	Token   string `json:"access_token"`
	Type    string `json:"token_type"`
	Seconds int64  `json:"expires_in"`
	Scope   string `json:"scope"`
	Refresh string `json:"refresh_token"`
	Error   string `json:"error"`
}

// Mint gets a token.
func (o *OAuth) Mint(ctx context.Context, r Request) (Lease, error) {
	role, ok := o.Roles[r.Role]
	if !ok {
		return Lease{}, fail(Refused, "no role is called %q", r.Role)
	}
	form, err := o.grant(role)
	if err != nil {
		return Lease{}, err
	}
	var got oauthAnswer
	if err := o.post(ctx, "getting a token", o.TokenURL, form, &got); err != nil {
		return Lease{}, err
	}
	if checkHandle(got.Token) != nil {
		return Lease{}, fail(Malformed, "getting a token: the answer holds none")
	}
	h := Handle{Role: r.Role, Token: got.Token}
	if err := r.Note(h); err != nil { // from here on it can be revoked, whatever else is wrong with it
		return Lease{}, err
	}
	return role.lease(h, got)
}

// lease reads an answer that holds a token.
func (r OAuthRole) lease(h Handle, got oauthAnswer) (Lease, error) {
	switch {
	case !strings.EqualFold(got.Type, "bearer") && !strings.EqualFold(got.Type, "n_a"): // RFC 8693, 2.2.1
		return Lease{}, fail(Malformed, "getting a token: it is not a bearer token")
	case got.Refresh != "":
		return Lease{}, fail(Malformed, "getting a token: a refresh token came with it, which would outlive the session: have the server give none to this client")
	case got.Scope != "" && len(r.Scopes) > 0:
		for _, s := range strings.Fields(got.Scope) {
			if !slices.Contains(r.Scopes, s) {
				return Lease{}, fail(Malformed, "getting a token: it is good for more scopes than the role names")
			}
		}
	}
	lives, err := lifetime(got.Seconds)
	if err != nil {
		return Lease{}, err
	}
	l := Lease{Handle: h, Secret: Secret{Value: got.Token}, Lifetime: lives}
	return l, checkSecret(l.Secret)
}

func (o *OAuth) grant(role OAuthRole) (url.Values, error) {
	form := url.Values{"grant_type": {grantClient}}
	if role.Subject != "" {
		subject, err := o.Secrets(role.Subject)
		if err != nil {
			return nil, fail(Refused, "getting a token: %v", err)
		}
		form = url.Values{
			"grant_type": {grantExchange}, "requested_token_type": {typeAccessToken},
			"subject_token": {subject}, "subject_token_type": {typeAccessToken},
		}
		if role.SubjectType != "" {
			form.Set("subject_token_type", role.SubjectType)
		}
	}
	if len(role.Scopes) > 0 {
		form.Set("scope", strings.Join(role.Scopes, " "))
	}
	if role.Audience != "" {
		form.Set("audience", role.Audience)
	}
	if role.Resource != "" {
		form.Set("resource", role.Resource)
	}
	return form, nil
}

// Renew is refused: a new token takes the old one's place.
func (o *OAuth) Renew(context.Context, Handle, time.Duration) (time.Duration, error) {
	return 0, fail(Refused, "an access token is not renewed")
}

// Revoke revokes the token. A server that does not know it any more says that it is revoked (RFC 7009, 2.2).
func (o *OAuth) Revoke(ctx context.Context, h Handle) error {
	if h.Token == "" {
		return fail(Refused, "revoking a token: none is known, its answer was lost")
	}
	return o.post(ctx, "revoking a token", o.RevokeURL, url.Values{"token": {h.Token}, "token_type_hint": {"access_token"}}, nil)
}

func (o *OAuth) post(ctx context.Context, what, to string, form url.Values, out *oauthAnswer) error {
	secret, err := o.Secrets(o.Secret)
	if err != nil {
		return fail(Refused, "%s: %v", what, err)
	}
	header := http.Header{"Accept": {"application/json"}}
	if o.InBody {
		form.Set("client_id", o.ClientID)
		form.Set("client_secret", secret)
	}
	a := formAsk(what, to, header, form)
	if !o.InBody {
		a.sign = func(r *http.Request) error { // RFC 6749, 2.3.1: both are form-encoded first
			r.SetBasicAuth(url.QueryEscape(o.ClientID), url.QueryEscape(secret))
			return nil
		}
	}
	said, err := o.Call.do(ctx, a)
	if err != nil {
		return err
	}
	defer clear(said.body)
	var got oauthAnswer
	if !said.ok() {
		said.read(what, &got) // the status alone will do
		return said.no(what, got.Error)
	}
	if out == nil {
		return nil // RFC 7009: the body means nothing
	}
	if err := said.read(what, out); err != nil {
		return err
	}
	if out.Error != "" {
		return said.no(what, out.Error)
	}
	return nil
}
