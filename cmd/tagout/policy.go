package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/bootclock"
	"tagout/internal/policy"
	"tagout/internal/session"
)

func (a *app) policyCommand() *cobra.Command {
	cmd := group("policy", "Ask what a policy allows and why; change a living kid's")
	cmd.AddCommand(a.explainCommand(), a.policySetCommand())
	return cmd
}

func (a *app) explainCommand() *cobra.Command {
	var file, kid string
	cmd := &cobra.Command{
		Use:   "explain [--card FILE] [--kid KID] METHOD URL | HOST:PORT",
		Short: "Say whether a card or a living kid's policy allows something, by which rule, and what would have to change",
		Long: `Say whether a card allows something, by which rule, and what would have to change.

With --kid the policy is the one that is in force for that kid, grants included;
--card then only says which file its line numbers are in. Nothing is sent
anywhere. Exit code 0: allowed, 3: denied.`,
		Args: cobra.RangeArgs(1, 2),
		RunE: func(_ *cobra.Command, args []string) error {
			q, err := policy.ParseQuestion(args...)
			if err != nil {
				return usage(err)
			}
			spec, where, err := a.policyOf(file, kid)
			if err != nil {
				return err
			}
			q.Kid, q.Grantor = kid, a.grantor()
			return a.explain(spec, where, q)
		},
	}
	cmd.Flags().StringVar(&file, "card", "", "the card to ask")
	cmd.Flags().StringVar(&kid, "kid", "", "ask the policy of this living kid")
	return cmd
}

// grantor returns the flag by which somebody grants something on this box; empty where there is none.
func (a *app) grantor() string {
	inst, err := a.open()
	if err != nil {
		return ""
	}
	return authority.NewBook(inst.AuthorityFile(), 0).GrantorFlag(time.Now())
}

// policyOf returns the policy to ask, rules in boot time, and what its lines are lines of.
func (a *app) policyOf(file, kid string) (spec policy.Spec, where string, err error) {
	if file == "" && kid == "" {
		return spec, "", usage(errors.New("--card or --kid is needed: say whose policy to ask"))
	}
	hash := ""
	if file != "" {
		c, _, err := readCard(file)
		if err != nil {
			return spec, "", err
		}
		spec, hash, where = c.EgressAt(time.Now(), bootclock.Now()), c.Hash, file
	}
	if kid == "" {
		return spec, where, nil
	}
	s, kept, err := a.sessionOf(kid)
	if err != nil {
		return spec, "", err
	}
	if hash != kept {
		if file != "" {
			fmt.Fprintf(a.err, "tagout: %s is not the card that kid %s runs on: the lines are of card %s\n", file, kid, s.Card) // nobody is left to be told
		}
		where = "card " + s.Card
	}
	return s.Egress, where, nil
}

// sessionOf reads a living kid's session document, and the hash of the card that its rules come from, which a
// policy change may have replaced since the spawn. No daemon is needed.
func (a *app) sessionOf(kid string) (s *session.Session, cardHash string, err error) {
	inst, err := a.open()
	if err != nil {
		return nil, "", err
	}
	if strings.ContainsAny(kid, "/.") {
		return nil, "", usage(fmt.Errorf("there is no kid called %q: see `tagout list`", kid))
	}
	s, err = session.NewStore(inst.SessionDir()).Get(kid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", usage(fmt.Errorf("there is no living kid called %s: see `tagout list`", kid))
	}
	if err != nil {
		return nil, "", err
	}
	text, err := os.ReadFile(inst.KidCard(kid))
	if err != nil {
		return s, s.CardHash, nil // only a hint depends on it
	}
	sum := sha256.Sum256(text)
	return s, hex.EncodeToString(sum[:]), nil
}

func (a *app) explain(spec policy.Spec, where string, q policy.Question) error {
	e, err := policy.Explain(spec, int64(bootclock.Now()), q)
	if err != nil {
		return usage(fmt.Errorf("the policy cannot be enforced: %w", err))
	}
	if a.json {
		err = a.printJSON(e)
	} else {
		a.printExplanation(e, where)
	}
	if err == nil && !e.Allowed {
		err = &coded{code: exitRefused} // it was told
	}
	return err
}

func (a *app) printExplanation(e policy.Explanation, where string) {
	if e.Allowed {
		a.printf("allowed: %s\n", e.Question)
	} else {
		a.printf("denied: %s\n  reason: %s, %s\n", e.Question, e.Reason, e.Text)
	}
	if e.Detail != "" {
		a.printf("  detail: %s\n", e.Detail)
	}
	if r := e.Rule; r != nil {
		a.printf("  rule: %s line %d: %s\n", where, r.Line, ruleText(r))
	} else if e.Line != 0 {
		a.printf("  deny rule: %s line %d\n", where, e.Line)
	}
	for _, note := range e.Notes {
		a.printf("  note: %s\n", note)
	}
	for _, change := range e.Change {
		a.printf("  to change it: %s\n", change)
	}
	if !e.Allowed && len(e.Change) == 0 {
		a.printf("  nothing that a card could say would allow it\n")
	}
}

// ruleText is a rule on one line, as far as it differs from the plainest one.
func ruleText(r *policy.Rule) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s ports %s %s", r.Host, strings.Trim(fmt.Sprint(r.Ports), "[]"), r.Protocol)
	if r.Inspect {
		b.WriteString(", inspected")
	}
	for _, list := range []struct {
		what  string
		words []string
	}{{"methods", r.Methods}, {"paths", r.Paths}} {
		if len(list.words) > 0 {
			fmt.Fprintf(&b, ", %s %s", list.what, strings.Join(list.words, " "))
		}
	}
	if r.MaxUp > 0 {
		fmt.Fprintf(&b, ", up to %d bytes up", r.MaxUp)
	}
	if r.MaxDown > 0 {
		fmt.Fprintf(&b, ", up to %d bytes down", r.MaxDown)
	}
	if r.Rate > 0 {
		fmt.Fprintf(&b, ", %d a second", r.Rate)
	}
	switch left := time.Duration(r.Expires) - bootclock.Now(); {
	case r.Expires == 0:
	case left <= 0:
		fmt.Fprintf(&b, ", ran out %s ago", (-left).Round(time.Second))
	default:
		fmt.Fprintf(&b, ", runs out in %s", left.Round(time.Second))
	}
	if r.Grant != "" {
		fmt.Fprintf(&b, ", by grant %s", r.Grant)
	}
	return b.String()
}
