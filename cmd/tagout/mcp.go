package main

import (
	"github.com/spf13/cobra"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/sandboxd/api"
	"tagout/sandboxd/mcp"
)

func (a *app) mcpCommand() *cobra.Command {
	var agent string
	cmd := &cobra.Command{
		Use: "mcp", Short: "Serve kids to an AI agent as tools (Model Context Protocol), on standard input and output",
		Long: `Serve kids to an AI agent as tools of the Model Context Protocol, on standard input and
output: kid_spawn, kid_exec, kid_list, kid_read_file, kid_write_file, kid_destroy, and a
resource kid://NAME for each kid. Each call is in the audit log with its arguments.
An agent can open nothing for a kid: grants and releases stay with people.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			inst, err := a.openAsRoot("serving kids to an agent")
			if err != nil {
				return err
			}
			c := control.NewClient(inst.Socket(instance.Sandboxd)).With(api.AgentHeader, agent)
			defer c.CloseIdle()
			return mcp.Stdio(cmd.Context(), mcp.New(c, version))
		},
	}
	cmd.Flags().StringVar(&agent, "agent", "mcp", "the agent's name, for the record")
	return cmd
}
