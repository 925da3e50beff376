package main

import (
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/wire"
)

func (a *app) orderCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "order FILE",
		Short: "Deliver an order that was signed elsewhere with --print (- for standard input)",
		Long: `Deliver an order that somebody signed elsewhere, with ` + "`tagout stop --key FILE --print`" + `
or ` + "`tagout release --key FILE --print`" + `. The signature counts, and not who delivers it; an
order is for one box, good for minutes and carried out once.`,
		Args: wants("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			raw, err := a.readInput(args[0], authority.MaxNote+1)
			if err != nil {
				return fmt.Errorf("reading the order: %w", err)
			}
			return a.give(cmd, "/v1/order", wire.SignedOrder{Note: string(raw)})
		},
	}
}

// readInput reads at most limit bytes of a file, or of standard input where the file is called -.
func (a *app) readInput(file string, limit int64) ([]byte, error) {
	in := a.in
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return nil, err
		}
		defer f.Close() // only read
		in = f
	}
	return io.ReadAll(io.LimitReader(in, limit))
}
