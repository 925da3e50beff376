package credential

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"tagout/internal/control"
	"tagout/internal/reason"
)

// deliverWithin bounds how long a caller may take to receive an accepted use, and with it how long a
// revocation waits for uses that were accepted just before it.
const deliverWithin = 20 * time.Millisecond

// Routes adds credd's routes, as package wire lists them, to mux.
func (s *Service) Routes(mux *http.ServeMux) {
	p := s.cfg.Peers
	mux.HandleFunc("POST /v1/sessions", control.Admit(s.mint, p.Root))
	mux.HandleFunc("GET /v1/sessions/{kid}/use", control.Admit(s.sessionUse, p.Root))
	mux.HandleFunc("DELETE /v1/sessions/{kid}", control.Admit(s.endSession, p.Root, p.Killswitchd))
	mux.HandleFunc("POST /v1/revoke", control.Admit(s.revoke, p.Root, p.Killswitchd))
	mux.HandleFunc("POST /v1/resolve", control.Admit(s.resolve, p.Proxy))
	mux.HandleFunc("GET /v1/revocations", control.Admit(s.revocations, p.Proxy))
	mux.HandleFunc("GET /v1/tokens", control.Admit(s.listTokens, p.Root))
	mux.HandleFunc("POST /v1/tokens/revoke", control.Admit(s.revokeTokens, p.Root))
	mux.HandleFunc("POST /introspect", s.admitGroup(s.introspect))
	mux.HandleFunc("PUT /v1/vault/{name}", control.Admit(s.putSecret, p.Root))
	mux.HandleFunc("POST /v1/vault/{name}/rotate", control.Admit(s.rotateSecret, p.Root))
	mux.HandleFunc("POST /v1/vault-unlock", control.Admit(s.unlockVault, p.Root))
	mux.HandleFunc("POST /v1/vault-seal", control.Admit(s.sealVault, p.Root))
	mux.HandleFunc("GET /v1/vault-state", control.Admit(s.vaultState, p.Root))
	mux.HandleFunc("GET /v1/leases", control.Admit(s.listLeases, p.Root))
	mux.HandleFunc("GET /v1/vault", control.Admit(s.listSecrets, p.Root))
	s.issuerRoutes(mux)
	mux.HandleFunc("DELETE /v1/vault/{name}", control.Admit(s.deleteSecret, p.Root))
}

// admitGroup lets root and members of the instance's group pass.
func (s *Service) admitGroup(h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		peer, ok := control.PeerOf(r.Context())
		if !ok || peer.UID != uint32(s.cfg.Peers.Root) && peer.GID != uint32(s.cfg.Peers.Group) { // ids are not negative
			control.Refuse(w, http.StatusForbidden, reason.OK, fmt.Sprintf("uid %d may not do this", peer.UID))
			return
		}
		h(w, r)
	}
}

func (s *Service) isKillswitchd(r *http.Request) bool {
	peer, ok := control.PeerOf(r.Context())
	return ok && peer.UID == uint32(s.cfg.Peers.Killswitchd) // ids are not negative
}

func actor(r *http.Request) string {
	peer, ok := control.PeerOf(r.Context())
	if !ok {
		return ""
	}
	return "uid:" + strconv.FormatUint(uint64(peer.UID), 10)
}

// refusal is why credd says no.
type refusal struct {
	status int
	code   reason.Code
	detail string
}

func (e *refusal) Error() string { return e.detail }

func refuse(status int, code reason.Code, format string, args ...any) *refusal {
	return &refusal{status, code, fmt.Sprintf(format, args...)}
}

func (e *refusal) write(w http.ResponseWriter) { control.Refuse(w, e.status, e.code, e.detail) }

// notReady is the refusal of everything until the vault is open and killswitchd has answered once, nil afterwards.
func (s *Service) notReady() *refusal {
	if err := s.vault.shut(); err != nil {
		return refuse(http.StatusServiceUnavailable, reason.VaultSealed, "%v", err)
	}
	if s.ready.Load() {
		return nil
	}
	return refuse(http.StatusServiceUnavailable, reason.CreddDown, "credd has just started and waits for killswitchd to say which tags hang: start killswitchd")
}

// deliver writes v and returns when the caller's socket has all of it; a caller that does not take it within
// deliverWithin gets a broken connection instead.
func deliver(w http.ResponseWriter, v any) error { return deliverIn(w, v, deliverWithin) }

// deliverIn is deliver for callers that have another time.
func deliverIn(w http.ResponseWriter, v any, within time.Duration) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	defer clear(raw)
	rc := http.NewResponseController(w)
	if err := rc.SetWriteDeadline(time.Now().Add(within)); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Content-Length", strconv.Itoa(len(raw)))
	if _, err := w.Write(raw); err != nil {
		return err
	}
	if err := rc.Flush(); err != nil {
		return err
	}
	return rc.SetWriteDeadline(time.Time{})
}
