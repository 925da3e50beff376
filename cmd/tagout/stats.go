package main

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

func (a *app) statsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "stats [KID...]", Short: "Show what kids use and have used: processors, memory, processes, disks",
		Long: `Show what kids use and have used since their spawn, as the kernel counts it in their cgroups: all kids, or those
that are named. Behind each figure stands its limit. What a kid wrote to its writable places is part of its memory; READ
and WRITTEN are what went from and to the machine's disks.`,
		RunE: func(cmd *cobra.Command, args []string) error { return a.stats(cmd, args) },
	}
}

func (a *app) stats(cmd *cobra.Command, names []string) error {
	all := len(names) == 0
	if all {
		var kids []wire.Kid
		if err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/kids", nil, &kids); err != nil {
			return err
		}
		for _, k := range kids {
			names = append(names, k.Name)
		}
	}
	list := []wire.KidStats{}
	for _, name := range names {
		var s wire.KidStats
		err := a.call(cmd, instance.Sandboxd, http.MethodGet, "/v1/kids/"+url.PathEscape(name)+"/stats", nil, &s)
		if code := control.Status(err); all && (code == http.StatusNotFound || code == http.StatusConflict) {
			continue // it has gone meanwhile, or is not there yet
		}
		if err != nil {
			return err
		}
		list = append(list, s)
	}
	if a.json {
		return a.printJSON(list)
	}
	w := tabwriter.NewWriter(a.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "KID\tSTATE\tCPU TIME\tMEMORY\tPEAK\tPROCESSES\tREAD\tWRITTEN")
	for _, s := range list {
		fmt.Fprintln(w, statsRow(s))
	}
	return w.Flush()
}

func statsRow(s wire.KidStats) string {
	peak, read, written := "-", "-", "-"
	if s.Memory.Peak != nil {
		peak = inUnits(*s.Memory.Peak)
	}
	if s.IO != nil {
		read, written = inUnits(s.IO.ReadBytes), inUnits(s.IO.WrittenBytes)
	}
	processors, memory, tasks := "", "", ""
	if s.CPU.Limit > 0 {
		processors = " on " + strconv.FormatFloat(s.CPU.Limit, 'f', -1, 64)
	}
	if s.Memory.Limit > 0 {
		memory = " of " + inUnits(s.Memory.Limit)
	}
	if s.PIDs.Limit > 0 {
		tasks = fmt.Sprintf(" of %d", s.PIDs.Limit)
	}
	return fmt.Sprintf("%s\t%s\t%s%s\t%s%s\t%s\t%d%s\t%s\t%s", s.Kid, s.State, (s.CPU.User + s.CPU.System).Round(time.Millisecond), processors,
		inUnits(s.Memory.Current), memory, peak, s.PIDs.Current, tasks, read, written)
}

// inUnits writes a number of bytes for people.
func inUnits(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	value, i := float64(n), 0
	for value >= 1024 && i < len(units)-1 {
		value, i = value/1024, i+1
	}
	if i == 0 || value == float64(uint64(value)) {
		return fmt.Sprintf("%d %s", uint64(value), units[i])
	}
	return fmt.Sprintf("%.1f %s", value, units[i])
}
