package tokencheck

import (
	"context"
	"errors"
	"net/http"
	"strings"
)

type claimsKey struct{}

// FromContext returns what the token of a request says that Require let pass; ok is false elsewhere.
func FromContext(ctx context.Context) (claims *Claims, ok bool) {
	claims, ok = ctx.Value(claimsKey{}).(*Claims)
	return claims, ok
}

// Require lets requests pass whose bearer token counts for all of the scopes, and answers others as RFC 6750 section 3
// says: 401, 403 where only the scope is missing, 503 where the issuer cannot be asked.
func (c *Checker) Require(scopes ...string) func(http.Handler) http.Handler {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			claims, err := c.CheckRequest(r, scopes...)
			if err != nil {
				refuse(w, err, scopes)
				return
			}
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), claimsKey{}, claims)))
		})
	}
}

// CheckRequest checks the bearer token in r's Authorization field, of which there must be one. Tokens elsewhere do not
// count: URLs and forms are written into logs.
func (c *Checker) CheckRequest(r *http.Request, scopes ...string) (*Claims, error) {
	fields := r.Header.Values("Authorization")
	if len(fields) != 1 {
		return nil, ErrMissing
	}
	scheme, token, ok := strings.Cut(fields[0], " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") || strings.TrimSpace(token) == "" {
		return nil, ErrMissing
	}
	return c.Check(r.Context(), strings.TrimSpace(token), scopes...)
}

func refuse(w http.ResponseWriter, err error, scopes []string) {
	status, challenge := http.StatusUnauthorized, `Bearer error="invalid_token"`
	switch {
	case errors.Is(err, ErrMissing):
		challenge = "Bearer" // RFC 6750 section 3.1: who sent nothing is told nothing
	case errors.Is(err, ErrUnavailable):
		status, challenge = http.StatusServiceUnavailable, ""
	case errors.Is(err, ErrScope):
		status, challenge = http.StatusForbidden, `Bearer error="insufficient_scope", scope="`+strings.Join(scopes, " ")+`"`
	}
	if challenge != "" {
		w.Header().Set("WWW-Authenticate", challenge)
	}
	w.Header().Set("Cache-Control", "no-store")
	http.Error(w, reasonOf(err), status)
}

// reasonOf returns the one of this package's errors that err wraps, without whatever else it says.
func reasonOf(err error) string {
	for _, known := range []error{ErrUnavailable, ErrMissing, ErrMalformed, ErrSignature, ErrIssuer, ErrAudience, ErrExpired, ErrNotYet, ErrScope, ErrRevoked} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	return "refused"
}
