package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// leaseWait is how long `tagout stop` waits for providers, after the stop; leaseLook is the time between two looks.
const (
	leaseWait = 5 * time.Second
	leaseLook = 50 * time.Millisecond
)

func (a *app) leasesCommand() *cobra.Command {
	cmd := group("leases", "List the secrets that sessions have leased from providers, and what became of them")
	var kid string
	var open bool
	list := &cobra.Command{
		Use: "ls", Aliases: []string{"list"}, Short: "List the leases that a provider may take, and the last of those that are over", Args: wants(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			leases := []wire.Leased{}
			if err := a.call(cmd, instance.Credd, http.MethodGet, "/v1/leases", nil, &leases); err != nil {
				return err
			}
			leases = slices.DeleteFunc(leases, func(l wire.Leased) bool { return kid != "" && l.Kid != kid || open && !l.State.Open() })
			if a.json {
				return a.printJSON(leases)
			}
			w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "LEASE\tPROVIDER\tROLE\tSECRET\tKID\tSTATE\tVALID UNTIL\tDETAIL")
			for _, l := range leases {
				fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", l.ID, cmp.Or(l.Provider, "-"), cmp.Or(l.Role, "-"), cmp.Or(l.Secret, "-"), cmp.Or(l.Kid, "-"), l.State, validUntil(l), l.Detail)
			}
			return w.Flush()
		},
	}
	list.Flags().StringVar(&kid, "kid", "", "those of this kid alone")
	list.Flags().BoolVar(&open, "open", false, "those alone that a provider may still take")
	cmd.AddCommand(list)
	return cmd
}

func validUntil(l wire.Leased) string {
	if !l.State.Open() || l.ValidUntil.IsZero() {
		return "-"
	}
	return l.ValidUntil.Local().Format(time.RFC3339)
}

// leasesLine is one more line of a stop's output in JSON, after the report: the leases of what it stopped.
type leasesLine struct {
	Leases []wire.Leased `json:"leases"`
	Error  string        `json:"error,omitempty"` // credd does not say: nothing is known of them
}

// showLeases waits for what the stopped kids had leased to be revoked, as long as the operator is willing to, and prints a
// line a lease. killswitchd knows nothing of it. The error says that a provider may still take something.
func (a *app) showLeases(cmd *cobra.Command, r *wire.StopReport) error {
	if r == nil || !a.leasing() {
		return nil
	}
	if _, fired := r.Layers[wire.LayerCredential]; !fired {
		return nil // their sessions go on
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), a.leaseWait)
	defer cancel()
	leases, err := a.settledLeases(ctx, r)
	if err != nil {
		leases = nil
	}
	open := 0
	for _, l := range leases {
		if l.State.Open() {
			open++
		}
	}
	if a.json {
		line := leasesLine{Leases: leases}
		if err != nil {
			line.Error = err.Error()
		}
		if raw, bad := json.Marshal(line); bad == nil && (err != nil || len(leases) > 0) {
			fmt.Fprintf(a.out, "%s\n", raw) // nobody is left to be told
		}
	} else {
		for _, l := range leases {
			a.printf("lease      %-18s %s\n", l.State, leaseText(l))
		}
	}
	switch {
	case err != nil:
		return &coded{exitIncomplete, fmt.Errorf("the layers did their work, but credd does not say what became of the kids' leases: see `tagout leases ls`: %w", err)}
	case open > 0:
		return &coded{exitIncomplete, fmt.Errorf("the layers did their work, but providers may still take %s: see `tagout leases ls --open`", count(open, "lease"))}
	}
	return nil
}

// leaseText says of one lease what its provider did, and when.
func leaseText(l wire.Leased) string {
	at := fmt.Sprintf("%s %s of %s: ", l.Provider, l.Secret, l.Kid)
	switch l.State {
	case wire.LeaseRevoked:
		return at + fmt.Sprintf("%s after its tokens (tries: %d)", l.Took.Round(100*time.Microsecond), l.Tries)
	case wire.LeaseOver:
		return at + "its time is over by the provider's word; never seen revoked: " + l.Detail
	}
	return at + fmt.Sprintf("not revoked after %s, tried again; still valid until %s %s", l.Took.Round(time.Millisecond), l.ValidUntil.Local().Format(time.RFC3339), l.Detail)
}

// settledLeases returns the leases of the sessions that the stop took, once all are over or ctx ends. A credd that the stop
// had to kill comes back and finds them in its journal.
func (a *app) settledLeases(ctx context.Context, r *wire.StopReport) ([]wire.Leased, error) {
	inst, err := a.open()
	if err != nil {
		return nil, err
	}
	client := control.NewClient(inst.Socket(instance.Credd))
	defer client.CloseIdle()
	var last []wire.Leased
	answered := false
	tick := time.NewTicker(leaseLook)
	defer tick.Stop()
	for {
		var all []wire.Leased
		ask, cancel := context.WithTimeout(ctx, time.Second)
		err = client.Call(ask, http.MethodGet, "/v1/leases", nil, &all)
		cancel()
		if err == nil {
			answered, last = true, ofStop(all, r)
			if !slices.ContainsFunc(last, func(l wire.Leased) bool { return l.State.Open() }) {
				return last, nil
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if answered {
				return last, nil
			}
			return nil, err
		}
	}
}

// ofStop returns the leases of the kids in the report. Names are used again: a session's mark is not.
func ofStop(all []wire.Leased, r *wire.StopReport) []wire.Leased {
	return slices.DeleteFunc(all, func(l wire.Leased) bool {
		if r.Tag != nil && len(r.Tag.Marks) > 0 {
			return !slices.Contains(r.Tag.Marks, l.Mark)
		}
		return !slices.Contains(r.Kids, l.Kid) || !l.State.Open() && time.Since(l.Ended) > time.Minute
	})
}

// leasing says whether the box has providers, or leases that are not over. Otherwise a stop has nothing to ask for.
func (a *app) leasing() bool {
	inst, err := a.open()
	if err != nil {
		return false
	}
	if left, err := filepath.Glob(filepath.Join(inst.CreddDir(), "leases", "*.age")); err == nil && len(left) > 0 {
		return true
	}
	box, err := config.Load(inst.BoxConfig())
	if err != nil {
		_, err = os.Stat(filepath.Join(inst.CreddDir(), "leases")) // it was leasing once, so better ask
		return err == nil
	}
	return len(box.Providers) > 0
}
