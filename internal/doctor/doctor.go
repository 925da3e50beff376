// Package doctor finds out what this machine can do, by doing it: it makes a cgroup and kills it, a user
// namespace, a firewall in a network namespace of its own, a marked socket, a destroyed socket. A file that
// lies somewhere proves nothing here. Everything it makes is gone when it returns, except the BPF filesystem,
// which it mounts where it is absent.
//
// It promises that a check that is ok worked a moment ago for this process, and nothing about other processes.
package doctor

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
)

// Check is the outcome of one probe. Missing, Cost and Fix are empty where OK is true.
type Check struct {
	Name    string `json:"name"` // a stable word
	OK      bool   `json:"ok"`
	Needed  bool   `json:"needed"`            // `tagout setup` refuses without it
	Found   string `json:"found,omitempty"`   // what is there
	Missing string `json:"missing,omitempty"` // what is not
	Cost    string `json:"cost,omitempty"`    // what does not work because of it
	Fix     string `json:"fix,omitempty"`     // how to get it
	Option  string `json:"option,omitempty"`  // the kernel option that it needs
	Since   string `json:"since,omitempty"`   // the first kernel version that has it
}

// Feature is what a BPF probe says about one thing that the programs need.
type Feature struct {
	Name     string
	Since    string // the first kernel version that has it
	Use      string // what Tagout does with it
	Optional bool
	Err      error // nil: it is there
}

// Probes says how to probe. The zero value probes everything but BPF.
type Probes struct {
	BPF func() []Feature // nil: BPF counts as missing
	// Trial runs a real container and says what it did; nil: nobody can try here.
	Trial func(context.Context) (string, error)
	Off   []string // names of checks that are to come out as missing, for trying how a refusal looks
}

// Report is the outcome of all probes.
type Report struct {
	OK     bool    `json:"ok"` // nothing needed is missing
	Checks []Check `json:"checks"`
}

// probe is one check without its outcome, and the function that finds out. found describes what is there;
// err says what is missing.
type probe struct {
	Check
	run func(ctx context.Context) (found string, err error)
}

// anybody lists the checks that say the same to every user. Of the others, everybody but root would only be told
// that the kernel lacks what it has.
var anybody = []string{"root", "kernel", "seccomp", "cgroup-v2", "cgroup-limits", "runc", "runc-2025", "mmdebstrap", "sys-resource", "clock", "disk"}

// Run probes one thing after the other. It takes about a second; ctx bounds it. Where this process is not root,
// what only root can try is left out.
func (p Probes) Run(ctx context.Context) Report {
	r := Report{OK: true}
	all := p.all()
	for _, off := range p.Off {
		if !slices.ContainsFunc(all, func(pr probe) bool { return pr.Name == off }) {
			r.OK = false
			r.Checks = append(r.Checks, Check{Name: off, Needed: true, Missing: "it was to be forced off, and there is no such check", Fix: "correct the name"})
		}
	}
	for _, pr := range all {
		c := pr.Check
		if os.Geteuid() != 0 && !slices.Contains(anybody, c.Name) {
			continue
		}
		found, err := "", error(nil)
		switch {
		case slices.Contains(p.Off, c.Name):
			err = fmt.Errorf("%s is forced off", c.Name)
		case ctx.Err() != nil:
			err = fmt.Errorf("not tried: %w", ctx.Err())
		default:
			found, err = pr.run(ctx)
		}
		c.Found = found
		if c.OK = err == nil; c.OK {
			c.Cost, c.Fix = "", ""
		} else {
			c.Missing = oneLine(err)
			r.OK = r.OK && !c.Needed
		}
		r.Checks = append(r.Checks, c)
	}
	return r
}

func (p Probes) all() []probe {
	out := slices.Concat(hostProbes(), cgroupProbes(), p.bpfProbes(), netProbes(), runcProbes(), p.trialProbes(), imageProbes(), comfortProbes())
	return out
}

// Refusal returns nil where everything needed is there, and otherwise an error that names the first missing
// feature with its kernel option and version, and says how to get it.
func (r Report) Refusal() error {
	for _, c := range r.Checks {
		if c.OK || !c.Needed {
			continue
		}
		var kernel []string
		if c.Option != "" {
			kernel = append(kernel, "kernel option "+c.Option)
		}
		if c.Since != "" {
			kernel = append(kernel, "in Linux since "+c.Since)
		}
		where := ""
		if len(kernel) > 0 {
			where = " (" + strings.Join(kernel, ", ") + ")"
		}
		return fmt.Errorf("this machine lacks %s%s: %s: %s: run `tagout doctor` for the whole list", c.Name, where, c.Missing, c.Fix)
	}
	return nil
}

// String renders a line a check, in a column each for the verdict and the name.
func (r Report) String() string {
	var b strings.Builder
	for _, c := range r.Checks {
		switch {
		case c.OK:
			fmt.Fprintf(&b, "ok       %-20s %s\n", c.Name, c.Found)
		case c.Needed:
			fmt.Fprintf(&b, "MISSING  %-20s %s\n", c.Name, c.trouble())
		default:
			fmt.Fprintf(&b, "warning  %-20s %s\n", c.Name, c.trouble())
		}
	}
	return b.String()
}

func (c Check) trouble() string {
	s := c.Missing
	if c.Cost != "" {
		s += "; costs: " + c.Cost
	}
	if c.Fix != "" {
		s += "; to get it: " + c.Fix
	}
	return s
}

func oneLine(err error) string {
	return strings.Join(strings.Fields(strings.ReplaceAll(err.Error(), "\n", "; ")), " ")
}
