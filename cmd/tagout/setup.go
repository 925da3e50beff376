package main

import (
	"github.com/spf13/cobra"

	"tagout/internal/config"
	"tagout/internal/instance"
)

func (a *app) setupCommand() *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "setup --config FILE",
		Short: "Make the static parts of an instance: directories, cgroups, BPF programs, firewall, gateway, CA",
		Long: `Make the static parts of an instance. It can be run again at any time: it puts right
what has drifted. deploy/box.example.yaml is a configuration to start from.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := instance.CheckName(a.instance); err != nil {
				return usage(err)
			}
			if err := needFlags(cmd, "config"); err != nil {
				return err
			}
			cfg, err := config.Load(file)
			if err != nil {
				return usage(err)
			}
			if err := needRoot("setting up instance " + a.instance); err != nil {
				return err
			}
			inst, err := boxes().Setup(cmd.Context(), a.instance, cfg)
			if err != nil {
				return err
			}
			if a.json {
				return a.printJSON(map[string]any{"instance": inst.Name(), "slot": inst.Slot(), "gateway": inst.Gateway(), "state": inst.StateDir(), "run": inst.RunDir()})
			}
			a.printf("instance %s is set up, gateway %s: start its daemons with `tagout up --instance %s`\n", inst.Name(), inst.Gateway(), inst.Name())
			if c, ok := a.releasers(); ok && !c.OK {
				a.printf("warning: %s; to get it: %s\n", c.Missing, c.Fix)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&file, "config", "", "the box's configuration (YAML)")
	return cmd
}
