package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/instance"
)

// app is what all commands share.
type app struct {
	instance string
	json     bool
	in       io.Reader
	out      io.Writer
	err      io.Writer
	silence  time.Duration // how long a stop may go without a word
	// leaseWait is how long a stop waits, after its layers, for providers to revoke leases.
	leaseWait time.Duration
	running   bool // a command has begun: errors from here on are not about its usage
}

// run runs one command line and returns its exit code.
func run(ctx context.Context, args []string, in io.Reader, out, errOut io.Writer) int {
	a := &app{in: in, out: out, err: errOut, silence: silenceLimit}
	root := a.root()
	root.SetArgs(args)
	root.SetIn(in)
	root.SetOut(out)
	root.SetErr(errOut)
	cmd, err := root.ExecuteContextC(ctx)
	switch {
	case err == nil:
	case !a.running:
		err = usage(fmt.Errorf("%w: see `%s --help`", err, cmd.CommandPath()))
	case ctx.Err() != nil:
		err = interrupted(err)
	}
	return a.report(err)
}

func (a *app) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "tagout",
		Short: "Run untrusted agents, reach only what a card names, and always stop them",
		Long: `Tagout runs AI agents that nobody trusts yet, lets them reach only what their job
card names, and can always stop them.

Exit codes:
  0  done
  1  it went wrong
  2  wrong usage or bad input
  3  refused: not root, a policy, a conflict or a hanging tag
  4  the instance or a daemon does not answer
  5  a stop was not observed complete
  6  a release was approved, and it takes a second person's signature
  130  interrupted; what the command had made is removed again
run and exec end with the code of the command: 124 after a time-out, 126 where it
cannot be run, 127 where it is not found, 128+n after signal n, 3 when the kid was
stopped.`,
		SilenceUsage:  true,
		SilenceErrors: true,
		PersistentPreRun: func(*cobra.Command, []string) {
			a.running = true
		},
	}
	root.PersistentFlags().StringVar(&a.instance, "instance", instance.DefaultName, "name of the Tagout instance")
	root.PersistentFlags().BoolVar(&a.json, "json", false, "print JSON")
	root.AddCommand(
		a.doctorCommand(), a.setupCommand(), a.upCommand(), a.cleanupCommand(), a.statusCommand(), a.proveCommand(),
		a.cardCommand(), a.policyCommand(), a.approveCommand(), a.spawnCommand(), a.runCommand(), a.execCommand(), a.execsCommand(), a.attachCommand(), a.endCommand(), a.listCommand(), a.logsCommand(), a.statsCommand(), a.destroyCommand(), a.lessonsCommand(),
		a.pauseCommand(), a.resumeCommand(),
		a.stopCommand(), a.tagsCommand(), a.releaseCommand(), a.orderCommand(), a.keyCommand(), a.vaultCommand(), a.tokenCommand(), a.leasesCommand(), a.issuerCommand(), a.timelineCommand(), a.auditCommand(), a.evidenceCommand(),
		a.grantCommand(), a.grantsCommand(), a.ungrantCommand(), a.openapiCommand(),
		a.putCommand(), a.getCommand(), a.lsCommand(), a.apikeyCommand(), a.mcpCommand(),
		a.imageCommand(), a.drillCommand(), a.containCommand(), a.demoCommand(), a.benchCommand(), a.versionCommand(),
	)
	return root
}

// group is a command that does nothing itself. A word that is none of its commands is an error.
func group(use, short string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() }}
}

// open returns the instance that --instance names.
func (a *app) open() (instance.Instance, error) {
	if err := instance.CheckName(a.instance); err != nil {
		return instance.Instance{}, usage(err)
	}
	return instance.Open(a.instance)
}

// printJSON prints v indented, as one document.
func (a *app) printJSON(v any) error {
	enc := json.NewEncoder(a.out)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// count is n things, in words for people.
func count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// printf prints for people.
func (a *app) printf(format string, args ...any) {
	fmt.Fprintf(a.out, format, args...) // nobody is left to be told
}
