package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/authority/keyfile"
)

func (a *app) keyCommand() *cobra.Command {
	cmd := group("key", "Make and show the keys with which people sign stops and releases")
	cmd.AddCommand(a.keyNewCommand(), a.keyShowCommand())
	return cmd
}

func (a *app) keyNewCommand() *cobra.Command {
	var out, passphraseFile string
	cmd := &cobra.Command{
		Use:   "new NAME --out FILE [--passphrase-file FILE]",
		Short: "Make a person's key; the line for the box's configuration is printed",
		Long: `Make a key for the person of that name, as the box's authority list calls them. The
private key goes to FILE, readable by its owner alone; keep it where only that person
is, best not on the box. The line that is printed goes into the box's configuration,
and ` + "`tagout setup`" + ` makes it count.`,
		Args: wants("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "out"); err != nil {
				return err
			}
			passphrase, err := a.readPassphrase(passphraseFile)
			if err != nil {
				return err
			}
			defer clear(passphrase)
			public, err := keyfile.New(out, args[0], passphrase)
			switch {
			case errors.Is(err, os.ErrExist):
				return usage(fmt.Errorf("%w: a key is never written over: give another file", err))
			case err != nil:
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"name": args[0], "public": public, "file": out})
			}
			a.printf("the private key of %s is in %s; in the box's configuration, under authorities:\n  - {name: %q, roles: [stop, release], key: %q}\n", args[0], out, args[0], public)
			return nil
		},
	}
	cmd.Flags().StringVar(&out, "out", "", "the file for the private key; must not exist yet")
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "encrypt the private key with what this file holds (- for standard input)")
	return cmd
}

func (a *app) keyShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show FILE", Short: "Print the public key of a key file", Args: wants("FILE"),
		RunE: func(_ *cobra.Command, args []string) error {
			public, err := keyfile.Public(args[0])
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]string{"public": public})
			}
			a.printf("%s\n", public)
			return nil
		},
	}
}

// maxPassphrase bounds a passphrase, in bytes.
const maxPassphrase = 4096

// readPassphrase reads a passphrase without the line's end; nil where no file is named.
func (a *app) readPassphrase(file string) ([]byte, error) {
	if file == "" {
		return nil, nil
	}
	raw, err := a.readInput(file, maxPassphrase)
	if err != nil {
		return nil, fmt.Errorf("reading the passphrase: %w", err)
	}
	raw = bytes.TrimRight(raw, "\r\n")
	if len(raw) == 0 {
		return nil, usage(errors.New("the passphrase is empty: put one into the file, or leave --passphrase-file away"))
	}
	return raw, nil
}
