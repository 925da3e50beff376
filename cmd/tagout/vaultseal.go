package main

import (
	"errors"
	"fmt"
	"net/http"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"tagout/internal/instance"
	"tagout/internal/vaultseal"
	"tagout/internal/wire"
)

func (a *app) vaultSealCommand() *cobra.Command {
	var systemd bool
	var passphraseFile, credential, withKey string
	var req wire.SealRequest
	cmd := &cobra.Command{
		Use:   "seal (--systemd | --passphrase-file FILE | --recipient RECIPIENT | --plain)",
		Short: "Seal the vault's identity, so that the disk alone opens nothing; the secrets stay as they are",
		Long: `Seal the identity that reads the vault. From the next start of credd on it takes what is
named here to open it, and everything is denied until then.

  --systemd          makes a key that systemd keeps, encrypted by the machine's TPM where
                     it has one and by its host key otherwise; the unit tagout@.service
                     hands it to credd
  --passphrase-file  a passphrase, which FILE holds (- for standard input); whoever starts
                     the box gives it to ` + "`tagout vault unlock`" + `
  --recipient        another age identity, kept wherever you like
  --plain            not sealed any more: whoever reads the disk reads every secret`,
		Args: wants(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := oneWay(systemd, passphraseFile != "", req.Recipient != "", req.Plain); err != nil {
				return usage(err)
			}
			if systemd {
				return a.sealToSystemd(cmd, credential, withKey)
			}
			if passphraseFile != "" {
				passphrase, err := a.readPassphrase(passphraseFile)
				if err != nil {
					return err
				}
				defer clear(passphrase)
				req.Passphrase = string(passphrase)
			}
			return a.seal(cmd, req)
		},
	}
	cmd.Flags().BoolVar(&systemd, "systemd", false, "to a key that systemd keeps")
	cmd.Flags().StringVar(&credential, "credential", "", "with --systemd: where the key goes (default: "+vaultseal.Dir+"/tagout-INSTANCE)")
	cmd.Flags().StringVar(&withKey, "with-key", "auto", "with --systemd: auto, host, tpm2 or host+tpm2 (systemd-creds(1))")
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "by what this file holds")
	cmd.Flags().StringVar(&req.Recipient, "recipient", "", "to this age recipient")
	cmd.Flags().BoolVar(&req.Plain, "plain", false, "not at all")
	return cmd
}

func oneWay(ways ...bool) error {
	n := 0
	for _, given := range ways {
		if given {
			n++
		}
	}
	if n != 1 {
		return errors.New("say one of --systemd, --passphrase-file, --recipient and --plain")
	}
	return nil
}

func (a *app) seal(cmd *cobra.Command, req wire.SealRequest) error {
	var state wire.VaultState
	if err := a.call(cmd, instance.Credd, http.MethodPost, "/v1/vault-seal", req, &state); err != nil {
		return err
	}
	if a.json {
		return a.printJSON(state)
	}
	switch state.Sealed {
	case vaultseal.Plain:
		a.printf("the vault's identity lies in clear: whoever reads credd's directory reads every secret\n")
	default:
		a.printf("the vault's identity is sealed (%s); where it lay in clear before, this disk and its backups may still have it\n", state.Sealed)
	}
	return nil
}

// sealToSystemd seals to a key that systemd keeps.
func (a *app) sealToSystemd(cmd *cobra.Command, file, withKey string) error {
	if err := needRoot("sealing to systemd"); err != nil {
		return err
	}
	c := vaultseal.Of(a.instance)
	if file != "" {
		c.File = file
	} else {
		if err := os.MkdirAll(vaultseal.Dir, 0o700); err != nil {
			return fmt.Errorf("making the directory of encrypted credentials: %w", err)
		}
	}
	err := c.Make(cmd.Context(), withKey, func(recipient string) error { return a.seal(cmd, wire.SealRequest{Recipient: recipient}) })
	if err == nil && !a.json {
		a.printf("systemd keeps the key in %s; tagout@%s.service hands it to credd at each start\n", c.File, a.instance)
	}
	return err
}

func (a *app) vaultUnlockCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "unlock",
		Short: "Open a sealed vault with the passphrase or key that standard input holds",
		Long: `Open a sealed vault until credd ends. What opens it is read from standard input, or from
--file; at a terminal it is asked for and not shown.`,
		Args: wants(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			key, err := a.readKey(file)
			if err != nil {
				return usage(err)
			}
			var state wire.VaultState
			if err := a.call(cmd, instance.Credd, http.MethodPost, "/v1/vault-unlock", wire.UnlockRequest{Key: key}, &state); err != nil {
				return err
			}
			if a.json {
				return a.printJSON(state)
			}
			a.printf("the vault is open\n")
			return nil
		},
	}
	cmd.Flags().StringVar(&file, "file", "", "read it from this file (default: standard input)")
	return cmd
}

// readKey reads what opens the vault.
func (a *app) readKey(file string) (string, error) {
	t := a.terminal()
	if file != "" && file != "-" || t.in == nil {
		return a.readSecret(file)
	}
	fmt.Fprint(a.err, "Passphrase of the vault: ") // nobody is left to be told
	raw, err := term.ReadPassword(int(t.in.Fd()))
	defer clear(raw)
	fmt.Fprintln(a.err) // as above
	if err != nil || len(raw) == 0 {
		return "", errors.New("no passphrase was given")
	}
	return string(raw), nil
}
