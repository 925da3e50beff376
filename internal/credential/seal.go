package credential

import (
	"errors"
	"fmt"

	"filippo.io/age"

	"tagout/internal/vaultseal"
	"tagout/internal/wire"
)

// errShut is the refusal of whatever needs the identity while it is sealed.
var errShut = errors.New("the vault is sealed, and everything is denied: open it with `tagout vault unlock`, or hand `tagout up` what opens it (docs/credentials.md)")

// shut returns errShut, with what is wrong where that is known, while the identity is sealed; nil otherwise.
func (v *vault) shut() error {
	v.mu.RLock()
	defer v.mu.RUnlock()
	switch {
	case v.id != nil:
		return nil
	case v.whyShut != "":
		return fmt.Errorf("%w; what it was handed last was refused: %s", errShut, v.whyShut)
	}
	return errShut
}

// unlock opens the identity and reads the secrets. The error is errWrongKey where key does not open what lies on the disk,
// also of a vault that is open and stays so. It takes a second where a passphrase does.
func (v *vault) unlock(key []byte) error {
	v.changing.Lock()
	defer v.changing.Unlock()
	if v.disk.how == vaultseal.Passphrase {
		defer giveBack()
	}
	if v.open() {
		return v.disk.opensWith(key)
	}
	id, err := v.disk.open(key)
	if errors.Is(err, errWrongKey) {
		v.mu.Lock()
		v.whyShut = err.Error()
		v.mu.Unlock()
	}
	if err != nil {
		return err
	}
	secrets, err := v.load(id)
	if err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.id, v.secrets, v.whyShut = id, secrets, ""
	return nil
}

func (v *vault) open() bool {
	v.mu.RLock()
	defer v.mu.RUnlock()
	return v.id != nil
}

// seal writes the identity anew, sealed as asked, and returns how it lay before.
func (v *vault) seal(req *wire.SealRequest) (before string, err error) {
	how, to, err := sealTo(req)
	if err != nil {
		return "", err
	}
	v.changing.Lock()
	defer v.changing.Unlock()
	v.mu.RLock()
	id, disk := v.id, v.disk
	v.mu.RUnlock()
	if id == nil {
		return "", errShut
	}
	if how == vaultseal.Passphrase {
		defer giveBack()
	}
	if err := writeIdentity(disk.path, id, to); err != nil {
		return "", fmt.Errorf("sealing the vault's identity: nothing was changed: %w", err)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.disk = &identityFile{path: disk.path, how: how}
	return disk.how, nil
}

// sealTo returns the one way that req asks for. Errors are *badEntry and quote nothing.
func sealTo(req *wire.SealRequest) (how string, to age.Recipient, err error) {
	ways := 0
	for _, given := range []bool{req.Passphrase != "", req.Recipient != "", req.Plain} {
		if given {
			ways++
		}
	}
	switch {
	case ways != 1:
		return "", nil, &badEntry{"say one of passphrase, recipient and plain"}
	case req.Plain:
		return vaultseal.Plain, nil, nil
	case req.Recipient != "":
		to, err := age.ParseX25519Recipient(req.Recipient)
		if err != nil {
			return "", nil, &badEntry{"this is no age X25519 recipient: it begins with age1"}
		}
		return vaultseal.Key, to, nil
	case len(req.Passphrase) < minPassphrase:
		return "", nil, &badEntry{fmt.Sprintf("a passphrase has %d bytes or more", minPassphrase)}
	}
	scrypt, err := age.NewScryptRecipient(req.Passphrase)
	if err != nil {
		return "", nil, &badEntry{"this cannot be a passphrase"}
	}
	scrypt.SetWorkFactor(workFactor)
	return vaultseal.Passphrase, scrypt, nil
}

// state describes how the identity lies, without anything that opens it.
func (v *vault) state() wire.VaultState {
	v.mu.RLock()
	defer v.mu.RUnlock()
	out := wire.VaultState{Sealed: v.disk.how, Open: v.id != nil}
	if v.id != nil {
		out.Recipients = []string{v.id.Recipient().String()}
	}
	return out
}

// keyID names the identity in records by the beginning of its public half; empty while it is sealed.
func (v *vault) keyID() string {
	v.mu.RLock()
	defer v.mu.RUnlock()
	if v.id == nil {
		return ""
	}
	return v.id.Recipient().String()[:16]
}

// writeSealed writes another file of credd's, readable with the vault's identity alone.
func (v *vault) writeSealed(path string, plain []byte) error {
	v.mu.RLock()
	id := v.id
	v.mu.RUnlock()
	if id == nil {
		return errShut
	}
	return encryptFile(path, plain, id.Recipient())
}

// readSealed reads what writeSealed wrote; the caller wipes it. The error is fs.ErrNotExist where there is no file.
func (v *vault) readSealed(path string) ([]byte, error) {
	v.mu.RLock()
	id := v.id
	v.mu.RUnlock()
	if id == nil {
		return nil, errShut
	}
	return decryptFile(path, id)
}
