package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/config"
	"tagout/internal/drill"
	"tagout/internal/evidence"
	"tagout/internal/instance"
)

func (a *app) evidenceCommand() *cobra.Command {
	var file, key, passphraseFile string
	var incomplete bool
	var ids identities
	cmd := &cobra.Command{
		Use: "evidence SESSION|STOP|DRILL -o FILE.zip", Short: "Pack what an auditor asks for, with proofs, into one file",
		Long: `Pack the evidence of a session, a stop or a drill into one file: the worksheet filled in (job card, egress allowlist
and where denied attempts alert, filesystem policy, identity, stop procedure with the named person and the last drill),
the timeline, every record with the proof that it is the one that was signed, the public keys, and a README that says
how to check all of it with sha256sum, openssl and python.

The same logs give the same file. Where something is missing it is named and nothing is written; --incomplete writes
the file all the same, which then says so itself. "tagout evidence verify FILE" checks a file.`,
		Args: wants("SESSION"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "out"); err != nil {
				return err
			}
			if err := needRoot("gathering evidence"); err != nil {
				return err
			}
			if err := a.anyRecord(); err != nil {
				return err
			}
			private, err := a.evidenceKey(key, passphraseFile)
			if err != nil {
				return err
			}
			unseal, err := ids.unseal()
			if err != nil {
				return usage(err)
			}
			return a.evidence(cmd.Context(), args[0], file, evidence.Config{Signer: private, Unseal: unseal, Incomplete: incomplete})
		},
	}
	cmd.AddCommand(a.evidenceVerifyCommand())
	cmd.Flags().StringVarP(&file, "out", "o", "", "the file to write")
	cmd.Flags().StringVar(&key, "key", "", "sign the manifest with the key in this file, as made by 'tagout key new' (default: the box's drill key)")
	cmd.Flags().StringVar(&passphraseFile, "passphrase-file", "", "what decrypts the key")
	cmd.Flags().BoolVar(&incomplete, "incomplete", false, "write the file although something is missing")
	ids.addTo(cmd)
	return cmd
}

// anyRecord refuses where there are neither logs nor drills: nothing is made on a machine that has no box.
func (a *app) anyRecord() error {
	inst, err := a.named()
	if err != nil {
		return err
	}
	for _, dir := range []string{inst.AuditDir(), instance.DrillDir()} {
		if _, err := os.Stat(dir); err == nil {
			return nil
		}
	}
	return &coded{exitUnreachable, fmt.Errorf("gathering evidence: there are neither logs in %s nor drills in %s: is this the right instance?", inst.AuditDir(), instance.DrillDir())}
}

// evidenceKey is the key that signs the manifest: the one in a file, or else the box's own.
func (a *app) evidenceKey(file, passphraseFile string) (string, error) {
	if file != "" {
		return a.drillKey(file, passphraseFile)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "box"
	}
	private, _, err := drill.BoxKey(instance.DrillDir(), host)
	return private, err
}

// signLimit is how long a log may take to sign what was just written.
const signLimit = 12 * time.Second

func (a *app) evidence(ctx context.Context, who, file string, cfg evidence.Config) error {
	inst, err := a.named()
	if err != nil {
		return err
	}
	cfg.AuditDir, cfg.CardDir, cfg.DrillDir, cfg.Version = inst.AuditDir(), inst.CardDir(), instance.DrillDir(), version
	if cfg.Box, err = config.Load(inst.BoxConfig()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	var missing evidence.Missing
	for give := time.Now().Add(signLimit); ; {
		err = a.writeWhole(file, func(out *os.File) (err error) {
			if missing, err = evidence.Write(ctx, cfg, who, out); err == nil && missing.Waits() && time.Now().Before(give) {
				err = missing
			}
			return err
		})
		if err == nil || !missing.Waits() || !time.Now().Before(give) {
			break
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(500 * time.Millisecond): // a daemon signs what it wrote every few seconds
		}
	}
	var lacks evidence.Missing
	switch {
	case errors.Is(err, evidence.ErrUnknown):
		return usage(fmt.Errorf("%q: %w: see `tagout audit search` and `tagout drill history`", who, evidence.ErrUnknown))
	case errors.As(err, &lacks):
		return &coded{exitIncomplete, lacks}
	case err != nil:
		return err
	}
	for _, m := range missing {
		fmt.Fprintf(a.err, "tagout: not in the evidence: %s\n", m) // nobody is left to be told
	}
	if a.json {
		return a.printJSON(map[string]any{"file": file, "missing": missing})
	}
	a.printf("evidence of %s in %s\n", who, file)
	return nil
}

func (a *app) evidenceVerifyCommand() *cobra.Command {
	var keys []string
	cmd := &cobra.Command{
		Use: "verify FILE.zip", Short: "Check a file of evidence; needs nothing else of the box", Args: wants("FILE.zip"),
		Long: `Check that a file of evidence is what was signed: the manifest, each log's checkpoint, each record. The keys in the
file are taken unless --key gives others: without it this shows that the file is whole, and not whose it is.`,
		RunE: func(cmd *cobra.Command, args []string) error {
			trusted := map[string]string{}
			for _, k := range keys {
				name, file, ok := strings.Cut(k, "=")
				if !ok {
					return usage(fmt.Errorf("--key is NAME=FILE, NAME being manifest or a daemon: %q", k))
				}
				key, err := publicKey(file)
				if err != nil {
					return err
				}
				trusted[name] = key
			}
			return a.verifyEvidence(args[0], trusted)
		},
	}
	cmd.Flags().StringArrayVar(&keys, "key", nil, "take this public key, `NAME=FILE`: manifest=box.pub, sandboxd=sandboxd.pub; may be given again")
	return cmd
}

func (a *app) verifyEvidence(file string, trusted map[string]string) error {
	f, err := os.Open(file)
	if err != nil {
		return usage(fmt.Errorf("reading the evidence: %w", err))
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil {
		return usage(fmt.Errorf("reading the evidence: %w", err))
	}
	c, err := evidence.Verify(f, info.Size(), trusted)
	if err != nil {
		return err
	}
	if a.json {
		if err := a.printJSON(c); err != nil {
			return err
		}
	} else {
		for _, m := range c.Missing {
			a.printf("not in the evidence: %s\n", oneLine(m))
		}
		for _, p := range c.Problems {
			a.printf("WRONG: %s\n", oneLine(p))
		}
		if len(c.Problems) == 0 {
			a.printf("evidence of %s %s: %s, all as they were signed with %s\n", oneLine(c.Kind), oneLine(c.Who), count(c.Records, "record"), oneLine(strings.Join(c.Keys, ", ")))
		}
	}
	if len(c.Problems) > 0 {
		return errNotVerified
	}
	return nil
}
