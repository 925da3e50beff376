package main

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"tagout/internal/doctor"
	"tagout/internal/instance"
	"tagout/internal/vaultseal"
)

// vaultSeal says how the identity that reads the vault lies on disk. There is nothing to say, and ok is false, where the box
// is not set up, or this is not root.
func (a *app) vaultSeal() (c doctor.Check, ok bool) {
	inst, err := a.open()
	if err != nil || os.Geteuid() != 0 {
		return c, false
	}
	return sealCheck(inst)
}

func sealCheck(inst instance.Instance) (c doctor.Check, ok bool) {
	c = doctor.Check{
		Name: "vault-identity", Cost: "whoever gets the disk or a backup of it reads every secret",
		Fix: "`tagout vault seal --systemd`, or --passphrase-file where no systemd starts the box",
	}
	raw, err := os.ReadFile(filepath.Join(inst.CreddDir(), "identity.age"))
	defer clear(raw)
	if errors.Is(err, fs.ErrNotExist) {
		return c, false // credd makes it when it starts for the first time
	}
	how := ""
	if err == nil {
		how, err = vaultseal.How(raw)
	}
	switch {
	case err != nil:
		c.Missing = "the vault's identity cannot be read: " + err.Error()
		c.Fix = "restore credd's directory from a backup"
	case how == vaultseal.Plain:
		c.Missing = "the vault's identity lies in clear beside the vault"
	default:
		c.OK, c.Found, c.Cost, c.Fix = true, "sealed ("+how+")", "", ""
	}
	return c, true
}
