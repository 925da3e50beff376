package credential

import (
	"errors"
	"fmt"
	"net/http"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s *Service) putSecret(w http.ResponseWriter, r *http.Request) {
	var e wire.VaultEntry
	if !control.Read(w, r, &e) {
		return
	}
	name := r.PathValue("name")
	s.changeVault(w, r, name, "put", s.vault.put(name, e))
}

func (s *Service) deleteSecret(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	s.changeVault(w, r, name, "deleted", s.vault.delete(name))
}

// changeVault answers and records a change of the vault that ended with err.
func (s *Service) changeVault(w http.ResponseWriter, r *http.Request, name, what string, err error) {
	rec := audit.Record{Event: audit.EventVaultChanged, Actor: actor(r), Outcome: audit.OutcomeOK, Fields: map[string]string{"secret": name, "change": what}}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	s.cfg.Audit.Log(rec)
	s.countHeld()
	var bad *badEntry
	switch {
	case err == nil:
		control.Reply(w, struct{}{})
	case errors.As(err, &bad):
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, err.Error())
	case errors.Is(err, errUnknownSecret):
		control.Refuse(w, http.StatusNotFound, reason.SecretUnknown, fmt.Sprintf("the vault holds no secret called %q", name))
	default:
		s.cfg.Log.Error("changing the vault", "secret", name, "error", err)
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	}
}

func (s *Service) listSecrets(w http.ResponseWriter, _ *http.Request) {
	control.Reply(w, s.vault.list())
}
