package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/wire"
)

func (a *app) orderCommand() *cobra.Command {
	var cardFile string
	cmd := &cobra.Command{
		Use:   "order FILE",
		Short: "Deliver an order that was signed elsewhere with --print (- for standard input)",
		Long: `Deliver an order that somebody signed elsewhere, with --key FILE --print of stop, release,
grant, ungrant or policy set. The signature counts, and not who delivers it; an order is
for one box, good for minutes and carried out once. A card whose policy was signed is
delivered with it (--card).`,
		Args: wants("FILE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			raw, err := a.readInput(args[0], authority.MaxNote+1)
			if err != nil {
				return fmt.Errorf("reading the order: %w", err)
			}
			order := wire.SignedOrder{Note: string(raw), CardFile: cardFile}
			switch authority.Peek(raw) {
			case authority.ActionPolicy:
				card, err := a.readInput(cardFile, maxCard)
				if err != nil {
					return usage(fmt.Errorf("reading the card that was signed (--card): %w", err))
				}
				order.Card = string(card)
				return a.change(cmd, order)
			case authority.ActionGrant, authority.ActionUngrant:
				return a.change(cmd, order)
			case authority.ActionHost:
				return usage(errors.New("an approval goes with the spawn that it is for: give it to `tagout spawn --approval` or `tagout run --approval`"))
			}
			return a.give(cmd, "/v1/order", order)
		},
	}
	cmd.Flags().StringVar(&cardFile, "card", "", "the card of a signed 'tagout policy set'")
	return cmd
}

// maxCard bounds a card that is read to be delivered.
const maxCard = 1 << 20

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
