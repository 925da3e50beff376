// Package suggest turns what a session was refused into the smallest additions to its job card, for a person
// to review. It opens nothing and suggests no more than was tried: one host, one port, one method and path.
// It never suggests an address of any kind, a metadata service, a name that looks local, many names under one
// domain (which is how data leaves by name) or what a deny rule closes; for those it says why not. Nothing
// that a kid chose stands in the result unless it is a canonical host name, or a path in quotes.
package suggest

import (
	"fmt"
	"reflect"
	"time"

	"tagout/internal/audit"
	"tagout/internal/card"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// Input is a session and its card.
type Input struct {
	File    string         // what the diff calls the card
	Card    []byte         // its text
	Spawned time.Time      // the session's, so that a rule that has run out since does not spoil the card
	Now     time.Time      // not before Spawned
	Records []audit.Record // the session's, in order
}

// Result is what could be added.
type Result struct {
	Diff    string     `json:"diff"` // unified; empty where there is nothing to add
	Added   []Addition `json:"added"`
	Skipped []Skip     `json:"skipped"`
}

// Addition is one rule to add.
type Addition struct {
	Rule  policy.Rule `json:"rule"`
	Count uint64      `json:"count"` // refusals that it would have avoided
	Note  string      `json:"note"`  // stands behind the rule in the diff
}

// Skip is something that was refused and is not suggested.
type Skip struct {
	What   string      `json:"what"`
	Reason reason.Code `json:"reason"`
	Count  uint64      `json:"count"`
	Why    string      `json:"why"`
}

// Suggest reads the card and the records. The error says what is wrong with the card, or that the additions
// could not be written into it.
func Suggest(in Input) (Result, error) {
	c, err := card.ParseAt(in.File, in.Card, in.Spawned)
	if err != nil {
		return Result{}, err
	}
	elapsed := max(in.Now.Sub(in.Spawned), 0)
	spec := c.EgressAt(in.Spawned, 0).At(int64(elapsed))
	s := sorter{spec: spec, wants: map[target]*want{}, tried: collect(in.Records)}
	if err := s.sort(); err != nil {
		return Result{}, err
	}
	out := Result{Added: s.additions(), Skipped: s.skips}
	if len(out.Added) == 0 {
		return out, nil
	}
	text, err := extend(in, c, out.Added)
	if err != nil {
		return out, err
	}
	out.Diff = unified(in.File, string(in.Card), text)
	return out, nil
}

// extend writes the additions into the card's text: into the list where it can be extended as it stands, or by
// writing the egress section anew. What comes out is read again and must be the old card with the new rules.
func extend(in Input, c *card.Card, added []Addition) (string, error) {
	var last error
	for _, edit := range []func(string, *card.Card, []Addition) (string, bool){appendRules, rewriteEgress} {
		text, ok := edit(string(in.Card), c, added)
		if !ok {
			continue
		}
		if last = check(in, c, added, text); last == nil {
			return text, nil
		}
	}
	if last == nil {
		last = fmt.Errorf("its egress section is not written as lines of their own")
	}
	return "", fmt.Errorf("writing the additions into %s: add them by hand (--json lists them): %w", in.File, last)
}

// check makes sure that text is the card with the added rules behind its own and nothing else changed.
func check(in Input, c *card.Card, added []Addition, text string) error {
	next, err := card.ParseAt(in.File, []byte(text), in.Spawned)
	if err != nil {
		return err
	}
	var want []policy.Rule
	want = append(want, c.Egress.Allow...)
	for _, a := range added {
		want = append(want, a.Rule)
	}
	if len(next.Egress.Allow) != len(want) || len(next.Egress.Deny) != len(c.Egress.Deny) {
		return fmt.Errorf("the rules would not be the card's own and the new ones")
	}
	for i, r := range next.Egress.Allow {
		r.Line, want[i].Line = 0, 0
		if !reflect.DeepEqual(r, want[i]) {
			return fmt.Errorf("rule %d would change", i+1)
		}
	}
	for i, r := range next.Egress.Deny {
		r.Line = c.Egress.Deny[i].Line
		if !reflect.DeepEqual(r, c.Egress.Deny[i]) {
			return fmt.Errorf("deny rule %d would change", i+1)
		}
	}
	rest := *next
	rest.Egress, rest.Expiries, rest.Hash = c.Egress, c.Expiries, c.Hash
	if !reflect.DeepEqual(&rest, c) {
		return fmt.Errorf("another section would change")
	}
	return nil
}
