package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"tagout/deploy"
	"tagout/internal/card"
)

func (a *app) cardCommand() *cobra.Command {
	cmd := group("card", "Check job cards, extend them by what was refused, print their schema")
	cmd.AddCommand(
		a.suggestCommand(),
		&cobra.Command{
			Use: "check FILE...", Short: "Say what is wrong with a card, with line, column and what to write instead",
			Args: cobra.MinimumNArgs(1),
			RunE: func(_ *cobra.Command, files []string) error { return a.checkCards(files) },
		},
		&cobra.Command{
			Use: "schema", Short: "Print the JSON Schema of cards", Args: cobra.NoArgs,
			RunE: func(*cobra.Command, []string) error {
				_, err := a.out.Write(deploy.CardSchema)
				return err
			},
		},
	)
	return cmd
}

// cardCheck is one card's outcome as JSON.
type cardCheck struct {
	File  string `json:"file"`
	OK    bool   `json:"ok"`
	Name  string `json:"name,omitempty"`
	Hash  string `json:"hash,omitempty"`
	Error string `json:"error,omitempty"`
}

// checkCards checks all of them; one that is wrong does not hide the next.
func (a *app) checkCards(files []string) error {
	out := []cardCheck{}
	bad := 0
	for _, f := range files {
		c, _, err := readCard(f)
		if err != nil {
			bad++
			out = append(out, cardCheck{File: f, Error: err.Error()})
			if !a.json {
				a.report(err)
			}
			continue
		}
		out = append(out, cardCheck{File: f, OK: true, Name: c.Name, Hash: c.Hash})
		if !a.json {
			a.printf("%s: card %s is good\n", f, c.Name)
		}
	}
	if a.json {
		if err := a.printJSON(out); err != nil {
			return err
		}
	}
	if bad > 0 {
		return &coded{code: exitUsage} // each was told already
	}
	return nil
}

// readCard reads and checks a card; everything wrong with it is bad input.
func readCard(file string) (*card.Card, []byte, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, nil, usage(fmt.Errorf("reading the card: %w", err))
	}
	c, err := card.Parse(file, raw)
	if err != nil {
		return nil, nil, usage(err)
	}
	return c, raw, nil
}
