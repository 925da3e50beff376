package credential

import (
	"errors"
	"net/http"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

func (s *Service) unlockVault(w http.ResponseWriter, r *http.Request) {
	var req wire.UnlockRequest
	if !control.Read(w, r, &req) {
		return
	}
	key := []byte(req.Key)
	defer clear(key)
	was := s.vault.open()
	err := s.vault.unlock(key)
	if err == nil && !was {
		err = s.opened()
	}
	rec := audit.Record{Event: audit.EventVaultUnlocked, Actor: actor(r), Outcome: audit.OutcomeOK, Fields: map[string]string{"sealed": s.vault.state().Sealed}}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	s.cfg.Audit.Log(rec)
	s.countHeld()
	s.answerState(w, err)
}

func (s *Service) sealVault(w http.ResponseWriter, r *http.Request) {
	var req wire.SealRequest
	if !control.Read(w, r, &req) {
		return
	}
	before, err := s.vault.seal(&req)
	rec := audit.Record{Event: audit.EventVaultSealed, Actor: actor(r), Outcome: audit.OutcomeOK,
		Fields: map[string]string{"before": before, "sealed": s.vault.state().Sealed, "key_id": s.vault.keyID()}}
	if err != nil {
		rec.Outcome, rec.Detail = audit.OutcomeFail, err.Error()
	}
	s.cfg.Audit.Log(rec)
	s.answerState(w, err)
}

func (s *Service) vaultState(w http.ResponseWriter, _ *http.Request) {
	control.Reply(w, s.vault.state())
}

func (s *Service) answerState(w http.ResponseWriter, err error) {
	var bad *badEntry
	switch {
	case err == nil:
		control.Reply(w, s.vault.state())
	case errors.As(err, &bad):
		control.Refuse(w, http.StatusBadRequest, reason.Malformed, err.Error())
	case errors.Is(err, errWrongKey):
		control.Refuse(w, http.StatusForbidden, reason.VaultSealed, err.Error())
	case errors.Is(err, errShut):
		control.Refuse(w, http.StatusServiceUnavailable, reason.VaultSealed, err.Error())
	default:
		s.cfg.Log.Error("opening or sealing the vault", "error", err)
		control.Refuse(w, http.StatusInternalServerError, reason.Internal, err.Error())
	}
}

// whenOpen calls fn once the vault's identity is there: now, or when somebody unlocks it. fn's error keeps the caller of
// either from going on as if it had worked. It is called before Run.
func (s *Service) whenOpen(fn func() error) error {
	if s.vault.open() {
		return fn()
	}
	s.onOpen = append(s.onOpen, fn)
	return nil
}

// opened calls what waited for the vault's identity.
func (s *Service) opened() error {
	var errs []error
	for _, fn := range s.onOpen {
		errs = append(errs, fn())
	}
	return errors.Join(errs...)
}
