package credential

import (
	"errors"
	"fmt"
	"net/http"
	"strconv"

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
	if err := s.leasing.knows(e.Lease); err != nil {
		s.changeVault(w, r, name, "put", wire.VaultInfo{}, err)
		return
	}
	info, err := s.vault.put(name, e)
	s.changeVault(w, r, name, "put", info, err)
}

func (s *Service) rotateSecret(w http.ResponseWriter, r *http.Request) {
	var req wire.RotateRequest
	if !control.Read(w, r, &req) {
		return
	}
	name := r.PathValue("name")
	info, err := s.vault.rotate(name, req.Value)
	s.changeVault(w, r, name, "rotated", info, err)
}

func (s *Service) deleteSecret(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	s.changeVault(w, r, name, "deleted", wire.VaultInfo{}, s.vault.delete(name))
}

// changeVault answers and records a change of the vault that ended with err; info is what the secret is now.
func (s *Service) changeVault(w http.ResponseWriter, r *http.Request, name, what string, info wire.VaultInfo, err error) {
	rec := audit.Record{Event: audit.EventVaultChanged, Actor: actor(r), Outcome: audit.OutcomeOK, Fields: map[string]string{"secret": name, "change": what}}
	if err == nil && info.Version != 0 {
		rec.Fields["key_id"] = s.vault.keyID()
		rec.Fields["version_before"], rec.Fields["version"] = strconv.FormatUint(info.Version-1, 10), strconv.FormatUint(info.Version, 10)
	}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	s.cfg.Audit.Log(rec)
	s.countHeld()
	var bad *badEntry
	switch {
	case err == nil:
		control.Reply(w, info)
	case errors.As(err, &bad):
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, err.Error())
	case errors.Is(err, errShut):
		control.Refuse(w, http.StatusServiceUnavailable, reason.VaultSealed, err.Error())
	case errors.Is(err, errUnknownSecret):
		control.Refuse(w, http.StatusNotFound, reason.SecretUnknown, fmt.Sprintf("the vault holds no secret called %q", name))
	default:
		s.cfg.Log.Error("changing the vault", "secret", name, "error", err)
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	}
}

func (s *Service) listSecrets(w http.ResponseWriter, _ *http.Request) {
	if err := s.vault.shut(); err != nil {
		control.Refuse(w, http.StatusServiceUnavailable, reason.VaultSealed, err.Error())
		return
	}
	control.Reply(w, s.vault.list())
}
