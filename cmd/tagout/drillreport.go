package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/authority/keyfile"
	"tagout/internal/drill"
	"tagout/internal/drillhistory"
	"tagout/internal/instance"
)

// keepDrill writes the report, if one is wanted, signed with private or else with the box's own key, and puts the
// drill into the machine's history.
func (a *app) keepDrill(rep *drill.Report, dir, private string) error {
	entry := rep.Entry()
	if dir != "" {
		var err error
		if private == "" {
			private, _, err = drill.BoxKey(instance.DrillDir(), rep.Environment.Host)
		}
		if err == nil {
			entry.Key, err = authority.Public(private)
		}
		if err != nil {
			return err
		}
		sum, err := rep.Seal(dir, private)
		if err != nil {
			return err
		}
		entry.Report, _ = filepath.Abs(dir) // fails only where there is no working directory
		entry.SHA256 = sum.SHA256
		if !a.json {
			a.printf("report in %s, signed with %s\n", dir, entry.Key)
		}
	}
	a.recordDrill(rep, entry)
	return drillhistory.Add(instance.DrillDir(), entry)
}

// recordDrill writes the drill into the log of the machine's own box, where it has one: the box of the drill is gone.
func (a *app) recordDrill(rep *drill.Report, entry drillhistory.Entry) {
	inst, err := instance.Open(instance.DefaultName)
	if err != nil {
		return // it has none
	}
	if _, err := os.Stat(inst.AuditDir()); err != nil {
		return // as above
	}
	rec := audit.Record{Event: audit.EventDrillEnded, Actor: actor(), Outcome: audit.OutcomeOK, Detail: rep.Why, Fields: map[string]string{
		"verdict": fmt.Sprint(rep.Verdict), "by": rep.By, "took": rep.Took.String(), "whole": fmt.Sprint(rep.Whole), "report": entry.Report, "report_sha256": entry.SHA256, "key": entry.Key,
	}}
	if !rep.Passed {
		rec.Outcome = audit.OutcomeFail
	}
	a.record(inst, rec)
}

// drillKey reads the key that a report is to be signed with.
func (a *app) drillKey(file, passphraseFile string) (private string, err error) {
	passphrase, err := a.readPassphrase(passphraseFile)
	if err != nil {
		return "", err
	}
	defer clear(passphrase)
	return keyfile.Private(file, passphrase)
}

// invoker is who runs the command, also behind sudo.
func invoker() string {
	if name := os.Getenv("SUDO_USER"); name != "" {
		return name
	}
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return fmt.Sprintf("uid %d", os.Getuid())
}

func (a *app) drillVerifyCommand() *cobra.Command {
	var pub string
	cmd := &cobra.Command{
		Use:   "verify FILE --pub KEY",
		Short: "Check a drill's report with the public key alone",
		Long: `Check that a report is what was signed. FILE is drill.json, drill.html or drill.note; the
note with the signature lies beside it. KEY is the public key, or a file that holds it.
It needs no box and no network, and ends with 1 and a reason where anything was changed.`,
		Args: wants("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := needFlags(cmd, "pub"); err != nil {
				return err
			}
			key, err := publicKey(pub)
			if err != nil {
				return err
			}
			s, err := drill.Verify(args[0], key)
			if err != nil {
				return fmt.Errorf("verifying %s: %w", args[0], err)
			}
			if a.json {
				return a.printJSON(s)
			}
			a.printf("%s: what %s signed: %s, a drill of %s on %s by %s\n", strings.Join(s.Checked, " and "), s.Key, s.Verdict, s.Started, s.Host, s.By)
			for _, name := range s.Absent {
				a.printf("%s was signed too, and is not there\n", name)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&pub, "pub", "", "the public key of whoever signed, or a file with it")
	return cmd
}

// publicKey takes a key, or a file in whose lines there is one.
func publicKey(arg string) (string, error) {
	raw, err := os.ReadFile(arg)
	if errors.Is(err, fs.ErrNotExist) || err != nil && strings.Contains(arg, "+") {
		if authority.KeyID(arg) != "" {
			return arg, nil
		}
		return "", usage(fmt.Errorf("%q is neither a public key nor a file with one", arg))
	}
	if err != nil {
		return "", usage(fmt.Errorf("reading the public key: %w", err))
	}
	for line := range strings.Lines(string(raw)) {
		key := strings.TrimSpace(strings.TrimPrefix(strings.TrimSpace(line), "# public key:"))
		if authority.KeyID(key) != "" {
			return key, nil
		}
	}
	return "", usage(fmt.Errorf("%s holds no public key", arg))
}

func (a *app) drillHistoryCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "history",
		Short: "List the drills of this machine",
		Args:  cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			entries, err := drillhistory.List(instance.DrillDir())
			if a.json {
				if entries == nil {
					entries = []drillhistory.Entry{}
				}
				return errors.Join(err, a.printJSON(entries))
			}
			t := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(t, "STARTED\tBY\tVERDICT\tWHOLE\tRUNS\tSESSION\tNETWORK\tCREDENTIAL\tREPORT")
			for _, e := range entries {
				fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\n", e.Started.Local().Format(time.DateTime), e.By, e.Verdict, yesNo(e.Whole), e.Runs,
					slowest(e, "session"), slowest(e, "network"), slowest(e, "credential"), orDash(e.Report))
			}
			return errors.Join(err, t.Flush())
		},
	}
}

func slowest(e drillhistory.Entry, layer string) string {
	d, ok := e.Slowest[layer]
	if !ok {
		return "-"
	}
	return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
