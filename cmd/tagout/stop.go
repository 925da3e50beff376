package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/authority"
	"tagout/internal/instance"
	"tagout/internal/priority"
	"tagout/internal/wire"
)

func (a *app) stopCommand() *cobra.Command {
	var req wire.StopRequest
	var layers []string
	var sign signer
	cmd := &cobra.Command{
		Use:   "stop (--kid KID | --card CARD | --all) (--by NAME | --key FILE) --reason WHY",
		Short: "Fire the stop layers and hang a tag",
		Long: `Fire the stop layers on a kid, on every kid of a card, or on the whole box, and hang a
tag: while it hangs, nothing in that scope spawns, runs, connects or gets a token. It
goes straight to killswitchd and needs no other daemon. It ends with 0 only if the
stop was observed complete, with 5 if it was ordered and something was not seen.

What the kids had leased from providers is revoked there once the layers are done. The
command waits a little for that and names what a provider still takes; it then ends with
5 as well. "tagout leases ls" shows what became of it.

Root on the box may stop without a key, in any name; the tag then says that nobody
signed. With --key the order is signed, and whoever signed can take the tag off alone.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkScope(req.Scope); err != nil {
				return usage(err)
			}
			signed, err := sign.used(cmd)
			if err != nil {
				return err
			}
			need := []string{"by", "reason"}
			if signed {
				need = need[1:]
			}
			if err := needFlags(cmd, need...); err != nil {
				return err
			}
			for _, l := range layers {
				if !knownLayer(l) {
					return usage(fmt.Errorf("--layer %s: use session, network or credential", l))
				}
				req.Layers = append(req.Layers, wire.Layer(l))
			}
			if !signed {
				return a.give(cmd, "/v1/stop", req)
			}
			return a.giveSigned(cmd, &sign, authority.Order{
				Action: authority.ActionStop, Scope: req.Scope, Layers: req.Layers, By: req.By, Reason: req.Reason,
			})
		},
	}
	cmd.Flags().StringVar(&req.Scope.Kid, "kid", "", "stop this kid")
	cmd.Flags().StringVar(&req.Scope.Card, "card", "", "stop every kid of this card")
	cmd.Flags().BoolVar(&req.Scope.All, "all", false, "stop the whole box")
	cmd.Flags().StringSliceVar(&layers, "layer", nil, "session, network or credential; may be given again (default: all three)")
	cmd.Flags().StringVar(&req.By, "by", "", "who orders it (with --key: whose key it is)")
	cmd.Flags().StringVar(&req.Reason, "reason", "", "why")
	cmd.Flags().DurationVar(&a.leaseWait, "wait-leases", leaseWait, "how long providers are given, after the layers, to revoke what the kids had leased")
	sign.flags(cmd)
	return cmd
}

func checkScope(s wire.Scope) error {
	n := 0
	for _, set := range []bool{s.Kid != "", s.Card != "", s.All} {
		if set {
			n++
		}
	}
	if n != 1 {
		return errors.New("say what to stop: exactly one of --kid, --card and --all")
	}
	return nil
}

func knownLayer(name string) bool {
	for _, l := range wire.AllLayers() {
		if string(l) == name {
			return true
		}
	}
	return false
}

// silenceLimit is how long killswitchd may take to say the first word. The layers fire in milliseconds.
const silenceLimit = 10 * time.Second

var errSilent = errors.New("killswitchd said nothing")

// outcome is what a stop, or another order, came to.
type outcome struct {
	final    *wire.StopReport // of a stop
	tag      wire.StopEvent   // the last about a stop's tag
	released *wire.Tag        // what a release answered
}

// give sends an order and prints what happens as it happens. A stop is judged by its final report alone.
func (a *app) give(cmd *cobra.Command, route string, order any) error {
	defer priority.Raise()() // it waits for the same processors as what it stops
	var out outcome
	ctx, cancel := context.WithCancelCause(cmd.Context())
	defer cancel(nil)
	silent := time.AfterFunc(a.silence, func() { cancel(errSilent) })
	defer silent.Stop()
	err := a.stream(ctx, instance.Killswitchd, route, order, func(line json.RawMessage) error {
		silent.Stop()
		return a.heard(&out, line)
	})
	if errors.Is(context.Cause(ctx), errSilent) {
		return &coded{exitUnreachable, fmt.Errorf("killswitchd has said nothing for %s, so nothing is known to be stopped: end it, and `tagout up` starts it again; `tagout cleanup --instance %s` stops everything without it", a.silence, a.instance)}
	}
	if err != nil && cmd.Context().Err() != nil {
		return errors.New("the order may have been given, and is then carried out without this command: see `tagout tags`")
	}
	if err != nil {
		return err
	}
	if out.released != nil {
		return a.showRelease(*out.released)
	}
	if err := a.judgeStop(out); err != nil {
		a.showLeases(cmd, out.final) // the layers say how the stop ended
		return err
	}
	return a.showLeases(cmd, out.final)
}

// heard takes one line of an answer.
func (a *app) heard(out *outcome, line json.RawMessage) error {
	var is struct {
		Placed *time.Time `json:"placed"` // a tag's, and no stop event's
	}
	if err := json.Unmarshal(line, &is); err != nil {
		return err
	}
	if is.Placed != nil {
		out.released = &wire.Tag{}
		return json.Unmarshal(line, out.released)
	}
	var e wire.StopEvent
	if err := json.Unmarshal(line, &e); err != nil {
		return err
	}
	if e.Final != nil {
		out.final = e.Final
	}
	if e.Point == "tag" {
		out.tag = e
	}
	if a.json {
		_, err := fmt.Fprintf(a.out, "%s\n", line)
		return err
	}
	if e.Final == nil {
		a.printf("%9s  %-10s %-12s %-18s %s %s\n", e.Elapsed.Round(10*time.Microsecond), e.Layer, e.Point, e.State, e.Kid, e.Detail)
	}
	return nil
}

// judgeStop is an error unless the stop was observed complete.
func (a *app) judgeStop(out outcome) error {
	if out.final == nil {
		return &coded{exitIncomplete, errors.New("killswitchd ended before it reported: order the stop again")}
	}
	if !a.json {
		a.printStop(out.final)
	}
	if out.final.State != wire.StateObserved {
		return &coded{exitIncomplete, fmt.Errorf("the stop was not observed complete, it is %s: %s", out.final.State, whatIsOpen(out.final, out.tag))}
	}
	return nil
}

func (a *app) printStop(r *wire.StopReport) {
	for _, l := range wire.AllLayers() {
		if rep, ok := r.Layers[l]; ok {
			a.printf("%-10s %-18s fired %s, observed %s %s\n", l, rep.State, rep.Fired.Round(10*time.Microsecond), rep.Observed.Round(10*time.Microsecond), rep.Detail)
		}
	}
	for _, what := range r.Degraded {
		a.printf("without:   %s\n", what)
	}
	a.printf("stop %s is %s, %s; take the tag off with `tagout release %s --key FILE --reason WHY`\n", r.Stop, r.State, count(len(r.Kids), "kid"), r.Stop)
}

// whatIsOpen names the layers that were not seen complete, and the tag where it is not safe.
func whatIsOpen(r *wire.StopReport, tag wire.StopEvent) string {
	out := ""
	if tag.Detail != "" && tag.State != wire.StateObserved {
		out = tag.Detail
	}
	for _, l := range wire.AllLayers() {
		if rep, ok := r.Layers[l]; ok && rep.State != wire.StateObserved {
			if out != "" {
				out += ", "
			}
			out += string(l) + " " + string(rep.State)
			if rep.Detail != "" {
				out += " (" + rep.Detail + ")"
			}
		}
	}
	if out == "" {
		return "see `tagout tags`"
	}
	return out
}
