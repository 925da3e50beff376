package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit/seal"
	"tagout/internal/audit/verify"
)

// verifyFlags say where the logs are and what they are verified with.
type verifyFlags struct {
	dir                string
	daemons            []string
	keys, ids, witness []string
}

func (f *verifyFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.dir, "dir", "", "verify a copy of an instance's audit directory")
	cmd.Flags().StringSliceVar(&f.keys, "key", nil, "a file with a daemon's public key, kept elsewhere; may be given again")
}

// auditDir is the directory of the logs.
func (a *app) auditDir(f *verifyFlags) (string, error) {
	if f.dir != "" {
		return f.dir, nil
	}
	inst, err := a.named()
	return inst.AuditDir(), err
}

// options reads what the flags name.
func (f *verifyFlags) options() (o verify.Options, err error) {
	o = verify.Options{Daemons: f.daemons, Keys: map[string]note.Verifier{}}
	for _, path := range f.keys {
		k, err := readLogKey(path)
		if err != nil {
			return o, err
		}
		o.Keys[k.Name()[strings.LastIndexByte(k.Name(), '/')+1:]] = k
	}
	for _, path := range f.witness {
		w, err := verify.ReadWitness(path)
		if err != nil {
			return o, err
		}
		o.Witnesses = append(o.Witnesses, w...)
	}
	for _, path := range f.ids {
		ids, err := seal.Identities(path)
		if err != nil {
			return o, err
		}
		o.Unseal = append(o.Unseal, seal.With(ids...))
	}
	return o, nil
}

func readLogKey(path string) (note.Verifier, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading a log's public key: %w", err)
	}
	k, err := note.NewVerifier(string(bytes.TrimSpace(raw)))
	if err != nil {
		return nil, fmt.Errorf("reading a log's public key from %s: %w", path, err)
	}
	return k, nil
}

func (a *app) auditVerifyCommand() *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use: "verify", Short: "Prove that the logs are what the daemons wrote, or say where they are not",
		Long: `Recompute every log's Merkle tree from its records, and compare it with the hashes that the daemon kept, with each
checkpoint that it signed and with those that witnesses have. What is wrong is told with the daemon, the file, the
record's number and its place in the file; the exit code is then 1.

Without a witness this finds what was done by anybody but those who can read a daemon's key, root on the box among
them. With --witness nobody on the box can have changed what the witness's checkpoints cover.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := a.auditDir(&f)
			if err != nil {
				return err
			}
			o, err := f.options()
			if err != nil {
				return usage(err)
			}
			r, err := verify.Run(dir, o)
			if err != nil {
				return errors.Join(needRoot("reading the logs"), err)
			}
			return a.showVerified(r)
		},
	}
	f.add(cmd)
	cmd.Flags().StringSliceVar(&f.daemons, "daemon", nil, "verify this daemon's log only; may be given again")
	cmd.Flags().StringSliceVar(&f.witness, "witness", nil, "a file with a witness's checkpoints; may be given again")
	cmd.Flags().StringSliceVar(&f.ids, "identity", nil, "an age identity file that opens encrypted pieces; without, their hashes alone are verified")
	return cmd
}

// errNotVerified has no words: the findings were printed.
var errNotVerified = &coded{exitFailure, nil}

func (a *app) showVerified(r *verify.Report) error {
	if a.json {
		raw, err := r.JSON()
		if err != nil {
			return err
		}
		a.printf("%s\n", raw)
	} else {
		for _, l := range r.Logs {
			a.showLog(&l)
		}
	}
	if !r.OK {
		return errNotVerified
	}
	return nil
}

func (a *app) showLog(l *verify.Log) {
	word := "ok"
	if len(l.Findings) > 0 {
		word = "NOT VERIFIED"
	}
	a.printf("%-12s %s: %d records in %s, %d signed", l.Daemon, word, l.Records, count(l.Shards, "piece"), l.Signed)
	if l.Witnessed > 0 {
		a.printf(", %d witnessed", l.Witnessed)
	}
	if l.Hashed > 0 {
		a.printf(", %d encrypted and known by their hashes", l.Hashed)
	}
	if l.Expired > 0 {
		a.printf(", the first %d removed when their time was over", l.Expired)
	}
	a.printf("\n")
	for _, f := range l.Findings {
		a.printf("  %s\n", f)
	}
	for _, n := range l.Notes {
		a.printf("  note: %s\n", n)
	}
}

func (a *app) auditKeysCommand() *cobra.Command {
	var f verifyFlags
	cmd := &cobra.Command{
		Use: "keys", Short: "Print the public keys that the daemons' checkpoints are signed with", Args: cobra.NoArgs,
		Long: `Print the public key of each daemon's log. Keep them elsewhere: ` + "`tagout audit verify --key FILE`" + ` then takes no
other, whatever happens on the box.`,
		RunE: func(*cobra.Command, []string) error {
			dir, err := a.auditDir(&f)
			if err != nil {
				return err
			}
			keys, err := verify.PublicKeys(dir)
			if err != nil {
				return errors.Join(needRoot("reading the logs"), err)
			}
			if a.json {
				return a.printJSON(keys)
			}
			for _, k := range keys {
				a.printf("%s\n", k.Key)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&f.dir, "dir", "", "a copy of an instance's audit directory")
	return cmd
}

func (a *app) auditProofCommand() *cobra.Command {
	var f verifyFlags
	var since uint64
	cmd := &cobra.Command{
		Use: "proof DAEMON [RECORD]", Short: "Prove that a record is in a log, or that a log only grew",
		Long: `Print a proof that a record is in the log that a daemon signed: RECORD is its number, from 0, as verify and search
tell it. The proof holds the signed checkpoint, and is in the form of c2sp.org/tlog-proof. With --since SIZE print a proof
that the log has not changed since it had so many records, for whoever kept a checkpoint from then.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := a.auditDir(&f)
			if err != nil {
				return err
			}
			var proof []byte
			switch {
			case cmd.Flags().Changed("since") == (len(args) == 2):
				return usage(errors.New("give the number of a record, or --since, and not both"))
			case len(args) == 2:
				n, convErr := strconv.ParseUint(args[1], 10, 63)
				if convErr != nil {
					return usage(fmt.Errorf("%q is not the number of a record", args[1]))
				}
				proof, err = verify.ProveRecord(dir, args[0], n)
			default:
				proof, err = verify.ProveTree(dir, args[0], since)
			}
			if err != nil {
				return errors.Join(needRoot("reading the logs"), err)
			}
			a.printf("%s", proof)
			return nil
		},
	}
	cmd.Flags().StringVar(&f.dir, "dir", "", "a copy of an instance's audit directory")
	cmd.Flags().Uint64Var(&since, "since", 0, "the log only grew since it had so many records")
	return cmd
}

func (a *app) auditCheckCommand() *cobra.Command {
	var key, record, older string
	cmd := &cobra.Command{
		Use: "check PROOF", Short: "Check a proof of a record or of growth; needs nothing else of the box", Args: wants("PROOF"),
		RunE: func(_ *cobra.Command, args []string) error {
			if (record == "") == (older == "") {
				return usage(errors.New("give --record, a file with the record's line, or --checkpoint, a file with the older one"))
			}
			k, err := readLogKey(key)
			if err != nil {
				return usage(err)
			}
			proof, err := os.ReadFile(args[0])
			if err != nil {
				return usage(err)
			}
			about, err := os.ReadFile(record + older)
			if err != nil {
				return usage(err)
			}
			if older != "" {
				from, size, err := verify.CheckTree(proof, about, k)
				if err == nil {
					a.printf("%s: the %d records of the checkpoint are the first of %d\n", k.Name(), from, size)
				}
				return err
			}
			index, size, err := verify.CheckRecord(proof, bytes.TrimSuffix(about, []byte{'\n'}), k)
			if err == nil {
				a.printf("%s: it is record %d of %d\n", k.Name(), index, size)
			}
			return err
		},
	}
	cmd.Flags().StringVar(&key, "key", "", "a file with the log's public key")
	cmd.Flags().StringVar(&record, "record", "", "a file with the record's line")
	cmd.Flags().StringVar(&older, "checkpoint", "", "a file with the older checkpoint")
	cmd.MarkFlagRequired("key") // the flag is there
	return cmd
}
