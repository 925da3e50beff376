// Package provider leases secrets from those who issue them: OpenBao and HashiCorp Vault, OAuth 2.0 servers, GitHub
// and AWS. A lease is made for one session, lives for minutes to hours, and is taken back at the issuer.
//
// What it promises:
//   - a provider is called at its own addresses alone, with its certificate checked, and never where it redirects to;
//   - every call has a deadline, and every answer a bound (call.go); whatever else an answer holds is an error;
//   - errors hold no byte of an answer but a provider's own error code, and nothing secret that was sent;
//   - what may have been carried out is not asked for a second time (ErrUnsure).
//
// It keeps nothing: whoever leases keeps the Handle, sealed, until the lease is revoked or over.
package provider

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Bounds of what a provider may give.
const (
	minValue    = 8 // shorter ones cannot be told from ordinary words when records are redacted
	maxValue    = 8 << 10
	maxLifetime = 100 * 365 * 24 * time.Hour // what is above is no lifetime
)

// Request asks for one lease.
type Request struct {
	ID                 string // of the lease: letters and digits, 64 at most
	Session, Kid, Card string
	Role               string        // one of the provider's configured roles: it bounds what the lease is good for
	Lifetime           time.Duration // as long as it should live; the provider may give less, or more
	// Note is called as soon as there is something to revoke, before the provider is asked for what would be lost with
	// this process. An error of it ends the mint. Never nil.
	Note func(Handle) error
}

// Handle is what renews and revokes a lease. It is as secret as the lease itself.
type Handle struct {
	Role  string `json:"role"`
	ID    string `json:"id,omitempty"`    // the provider's name for the lease
	Token string `json:"token,omitempty"` // what speaks for the lease at the provider
}

// Secret is what a lease gives.
type Secret struct {
	Value   string // never empty
	User    string // the user name or access key id that goes with it; may be empty
	Session string // AWS: the session token; else empty
}

// Lease is what a provider gave.
type Lease struct {
	Handle    Handle
	Secret    Secret
	Lifetime  time.Duration // by the provider's word, from the moment it was asked; never zero
	Renewable bool          // by Renew; otherwise only by another lease
}

// Provider is one kind of issuer. Every method returns when ctx ends, at the latest; an error is an *Error.
type Provider interface {
	Mint(ctx context.Context, r Request) (Lease, error)
	// Renew returns how long the lease lives from now on.
	Renew(ctx context.Context, h Handle, lifetime time.Duration) (time.Duration, error)
	// Revoke returns nil once the provider has said that the lease is over. It may be called again.
	Revoke(ctx context.Context, h Handle) error
}

// Tidier is a Provider whose revocations leave something at the issuer that is to go once the lease's time is over.
type Tidier interface {
	Tidy(ctx context.Context, h Handle) error
}

// Kind says what came of a call that failed.
type Kind int

// Kinds.
const (
	Refused     Kind = iota // the provider said no: asking again changes nothing
	Unreachable             // it was certainly not carried out: it can be asked again
	Unsure                  // no answer, or half of one: it may have been carried out
	Malformed               // an answer that is not what was asked for; it may have been carried out
)

// Error is a failed call. Its text names what was asked and what to do, and holds nothing secret.
type Error struct {
	Kind Kind
	Text string
	Wait time.Duration // how long the provider asks to be left alone; 0: it does not say
}

func (e *Error) Error() string { return e.Text }

func fail(kind Kind, format string, args ...any) *Error {
	return &Error{Kind: kind, Text: fmt.Sprintf(format, args...)}
}

// KindOf returns the kind of err; Unsure where it has none.
func KindOf(err error) Kind {
	var e *Error
	if errors.As(err, &e) {
		return e.Kind
	}
	return Unsure
}

// Secrets gives the value of a vault entry that the provider itself is called with.
type Secrets func(name string) (string, error)

// checkSecret refuses what cannot be swapped in for a token.
func checkSecret(s Secret) error {
	for what, v := range map[string]string{"value": s.Value, "user name": s.User, "session token": s.Session} {
		switch {
		case len(v) > maxValue:
			return fail(Malformed, "the %s that it gave has %d bytes, and %d are the most that servers take", what, len(v), maxValue)
		case !printable(v):
			return fail(Malformed, "the %s that it gave holds characters that no HTTP header can carry", what)
		}
	}
	if len(s.Value) < minValue {
		return fail(Malformed, "the value that it gave is shorter than %d characters", minValue)
	}
	return nil
}

// printable says whether s is plain ASCII without spaces or control characters.
func printable(s string) bool {
	for i := range len(s) {
		if s[i] <= ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

// checkHandle refuses what is too long to keep, or could change a request that it is put into.
func checkHandle(s string) error {
	if s == "" || len(s) > maxValue || !printable(s) {
		return fail(Malformed, "its name for the lease is empty, too long or not plain text")
	}
	return nil
}

// lifetime returns seconds as a duration; an error for what is no lifetime.
func lifetime(seconds int64) (time.Duration, error) {
	if seconds <= 0 || seconds > int64(maxLifetime/time.Second) {
		return 0, fail(Malformed, "it says that the lease lives for %d seconds: only what ends by itself is leased", seconds)
	}
	return time.Duration(seconds) * time.Second, nil
}
