package wire

import (
	"fmt"
	"strings"
	"time"
)

// The ways in which a secret is presented, and the places in which a token is found. PlaceWebSocket is a place alone: a
// message on a WebSocket.
const (
	AsHeader       = "header"
	AsBearer       = "bearer"
	AsBasic        = "basic"
	AsQuery        = "query"
	AsCookie       = "cookie"
	AsSigV4        = "sigv4"
	AsBody         = "body"
	PlaceWebSocket = "websocket"
)

// Presentation says how a secret is shown to the hosts that it is bound to, or where in a request a token stood.
type Presentation struct {
	As   string `json:"as,omitempty"`   // one of the above; empty: any header field's value
	Name string `json:"name,omitempty"` // header, query, cookie: its name; body: a top-level or dotted JSON field, or a form's field
	User string `json:"user,omitempty"` // basic: the user name that goes with it (empty: what the kid sent); sigv4: the access key id
}

// VaultEntry sets a secret. Hosts are "name:port"; the secret is swapped in towards those only, presented as Present says,
// and where Methods or Paths are given in requests that have one of them. Nobody has a reason to use a canary: every use
// is refused, and trips the rules on it. It may do without hosts.
type VaultEntry struct {
	Value   string       `json:"value"`
	Hosts   []string     `json:"hosts"`
	Canary  bool         `json:"canary,omitempty"`
	Present Presentation `json:"present,omitzero"`
	Methods []string     `json:"methods,omitempty"` // in capitals; empty: any
	Paths   []string     `json:"paths,omitempty"`   // patterns as egress rules have them; empty: any
	// Lease is "PROVIDER/ROLE" of the box's configuration: each session gets a lease of its own instead of Value, which is
	// then empty.
	Lease string `json:"lease,omitempty"`
}

// RotateRequest replaces a secret's value. Where it may be shown, and the tokens that stand for it, stay as they are.
type RotateRequest struct {
	Value string `json:"value"`
}

// VaultInfo describes a secret without its value.
type VaultInfo struct {
	Name    string       `json:"name"`
	Hosts   []string     `json:"hosts"`
	Canary  bool         `json:"canary,omitempty"`
	Present Presentation `json:"present,omitzero"`
	Methods []string     `json:"methods,omitempty"`
	Paths   []string     `json:"paths,omitempty"`
	Lease   string       `json:"lease,omitempty"` // PROVIDER/ROLE, where each session gets a lease of its own
	Version uint64       `json:"version"`         // from 1; grows with every new value or binding
	Updated time.Time    `json:"updated"`
	Rotated time.Time    `json:"rotated,omitzero"` // when its value was last replaced, the binding kept
}

// UnlockRequest opens a sealed vault: the passphrase, or the text of the age identity that it is sealed to.
type UnlockRequest struct {
	Key string `json:"key"`
}

// SealRequest says how the vault's identity is to lie on disk: exactly one of the fields is set.
type SealRequest struct {
	Passphrase string `json:"passphrase,omitempty"`
	Recipient  string `json:"recipient,omitempty"` // an age X25519 recipient, age1…
	Plain      bool   `json:"plain,omitempty"`     // whoever reads the file reads every secret
}

// VaultState says how the vault's identity lies, and whether it is open.
type VaultState struct {
	Sealed     string   `json:"sealed"`               // plain, passphrase or key
	Open       bool     `json:"open"`                 // while it is not, everything is denied
	Recipients []string `json:"recipients,omitempty"` // public halves; what is encrypted to them, the vault's identity reads
}

// CredentialUse says what a session made of the secrets that it was granted; canaries do not count.
type CredentialUse struct {
	Granted []string     `json:"granted"`
	Unused  []string     `json:"unused,omitempty"` // never used
	Wide    []WideSecret `json:"wide,omitempty"`   // used, and for less than they are for
}

// WideSecret is a secret that was for more than what it was used for.
type WideSecret struct {
	Secret     string   `json:"secret"`
	Uses       uint64   `json:"uses"`
	Hosts      []string `json:"hosts,omitempty"`       // bound to, and never used there
	Methods    []string `json:"methods,omitempty"`     // likewise
	Paths      []string `json:"paths,omitempty"`       // likewise
	OnlyMethod string   `json:"only_method,omitempty"` // it may be used with any, and this was the only one
}

// String is w in words.
func (w WideSecret) String() string {
	var parts []string
	for _, p := range []struct {
		what string
		list []string
	}{{"host", w.Hosts}, {"method", w.Methods}, {"path", w.Paths}} {
		if len(p.list) > 0 {
			parts = append(parts, fmt.Sprintf("%s %s never used", p.what, strings.Join(p.list, ", ")))
		}
	}
	if w.OnlyMethod != "" {
		parts = append(parts, "any method, and only "+w.OnlyMethod+" used")
	}
	return w.Secret + ": " + strings.Join(parts, ", ")
}
