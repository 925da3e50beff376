package netfw

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/coreos/go-iptables/iptables"

	"tagout/internal/instance"
)

// lockWait is how many seconds iptables may wait for another tool's xtables lock.
const lockWait = 20

// tables is the part of go-iptables that this package uses; a test's fake fulfils it too.
type tables interface {
	ListChains(table string) ([]string, error)
	List(table, chain string) ([]string, error)
	ClearChain(table, chain string) error
	DeleteChain(table, chain string) error
	Append(table, chain string, rule ...string) error
	Insert(table, chain string, pos int, rule ...string) error
	Delete(table, chain string, rule ...string) error
}

// target is one family's client with what it should hold.
type target struct {
	fw   tables
	want family
	own  string // prefix of our chains' names
}

// Ensure makes the rules in the kernel those of Text: it does nothing where they agree and rebuilds the
// family where they differ. While it rebuilds, and after an error, everything from and to kids is dropped.
// It needs CAP_NET_ADMIN. calls are what credd may call.
func Ensure(inst instance.Instance, calls ...Call) error {
	ts, err := targets(inst, calls)
	if err != nil {
		return err
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	for _, t := range ts {
		if err := t.ensure(); err != nil {
			return fmt.Errorf("installing the %s firewall rules: %w", t.want.name, err)
		}
	}
	return nil
}

// Check says whether the kernel holds exactly the rules of Text, with the jumps at the head.
func Check(inst instance.Instance, calls ...Call) (bool, error) {
	ts, err := targets(inst, calls)
	if err != nil {
		return false, err
	}
	for _, t := range ts {
		ok, err := t.agrees()
		if err != nil || !ok {
			return false, err
		}
	}
	return true, nil
}

// targets opens the families that the kernel has. A kernel without IPv6 has no IPv6 packets to refuse.
func targets(inst instance.Instance, calls []Call) ([]target, error) {
	fw4, err := iptables.New(iptables.IPFamily(iptables.ProtocolIPv4), iptables.Timeout(lockWait))
	if err != nil {
		return nil, fmt.Errorf("finding iptables: install it with `apt-get install iptables`: %w", err)
	}
	out := []target{{fw4, desired4(inst, calls), own(inst)}}
	if _, err := os.Stat("/proc/sys/net/ipv6"); errors.Is(err, os.ErrNotExist) {
		return out, nil
	}
	fw6, err := iptables.New(iptables.IPFamily(iptables.ProtocolIPv6), iptables.Timeout(lockWait))
	if err != nil {
		return nil, fmt.Errorf("finding ip6tables: install it with `apt-get install iptables`: %w", err)
	}
	return append(out, target{fw6, desired6(inst, calls), own(inst)}), nil
}

func (t target) ensure() error {
	ok, err := t.agrees()
	if err != nil || ok {
		return err
	}
	if err := t.hold(); err != nil {
		return fmt.Errorf("closing while the rules are rebuilt: %w", err)
	}
	for _, c := range t.want.chains {
		// ClearChain makes the chain where it is missing.
		if err := t.fw.ClearChain(c.table, c.name); err != nil {
			return fmt.Errorf("clearing chain %s: %w", c.name, err)
		}
		for _, r := range c.rules {
			if err := t.fw.Append(c.table, c.name, strings.Fields(r)...); err != nil {
				return fmt.Errorf("appending to chain %s: %w", c.name, err)
			}
		}
	}
	if err := t.putJumps(); err != nil {
		return err
	}
	return t.dropStrangers()
}

// hold drops everything from and to kids until dropStrangers removes it. A crash in between leaves it in
// place, which is closed; the next Ensure or Remove takes it away.
func (t target) hold() error {
	name := t.own + strings.TrimPrefix(endHold, "-")
	if err := t.fw.ClearChain("filter", name); err != nil {
		return err
	}
	if err := t.fw.Append("filter", name, "-j", "DROP"); err != nil {
		return err
	}
	for _, j := range t.want.jumps {
		match, _, _ := strings.Cut(j.rule, " -j ")
		if j.table != "filter" || strings.Contains(match, "!") {
			continue
		}
		rule := append(strings.Fields(match), "-j", name)
		if err := t.fw.Insert("filter", j.builtin, 1, rule...); err != nil {
			return err
		}
	}
	return nil
}

// putJumps replaces our jumps other than the hold's, in order, at the head of each built-in chain.
func (t target) putJumps() error {
	for _, b := range t.builtins() {
		if err := t.dropJumps(b.table, b.builtin, func(chain string) bool { return !strings.HasSuffix(chain, endHold) }); err != nil {
			return err
		}
		for i, rule := range t.jumpsOf(b.table, b.builtin) {
			if err := t.fw.Insert(b.table, b.builtin, i+1, strings.Fields(rule)...); err != nil {
				return fmt.Errorf("jumping from %s: %w", b.builtin, err)
			}
		}
	}
	return nil
}

// dropStrangers removes every jump to, and every chain of, ours that is not wanted: the hold, and what an
// older version left.
func (t target) dropStrangers() error {
	wanted := map[string]bool{}
	for _, c := range t.want.chains {
		wanted[c.table+" "+c.name] = true
	}
	for _, table := range t.tableNames() {
		if err := t.dropChains(table, func(chain string) bool { return !wanted[table+" "+chain] }); err != nil {
			return err
		}
	}
	return nil
}

// agrees compares the kernel's text with ours.
func (t target) agrees() (bool, error) {
	for _, table := range t.tableNames() {
		names, err := t.fw.ListChains(table)
		if err != nil {
			return false, fmt.Errorf("listing table %s: %w", table, err)
		}
		have := slices.DeleteFunc(names, func(n string) bool { return !strings.HasPrefix(n, t.own) })
		var want []string
		for _, c := range t.want.chains {
			if c.table == table {
				want = append(want, c.name)
			}
		}
		slices.Sort(have)
		slices.Sort(want)
		if !slices.Equal(have, want) {
			return false, nil
		}
	}
	for _, c := range t.want.chains {
		rules, err := t.rules(c.table, c.name)
		if err != nil || !slices.Equal(rules, c.rules) {
			return false, err
		}
	}
	for _, b := range t.builtins() {
		rules, err := t.rules(b.table, b.builtin)
		if err != nil || !headed(rules, t.jumpsOf(b.table, b.builtin), t.own) {
			return false, err
		}
	}
	return true, nil
}

// headed says whether rules hold our jumps exactly once, in order, with nothing before them but the jumps
// of other instances.
func headed(rules, jumps []string, own string) bool {
	var ours []string
	for _, r := range rules {
		to := jumpTarget(r)
		switch {
		case strings.HasPrefix(to, own):
			ours = append(ours, r)
		case len(ours) < len(jumps) && !strings.HasPrefix(to, "TGO-"):
			return false
		}
	}
	return slices.Equal(ours, jumps)
}

// rules lists a chain without its declaration, each rule without "-A chain".
func (t target) rules(table, name string) ([]string, error) {
	lines, err := t.fw.List(table, name)
	if err != nil {
		return nil, fmt.Errorf("listing chain %s of table %s: %w", name, table, err)
	}
	var out []string
	for _, l := range lines {
		if r, ok := strings.CutPrefix(l, "-A "+name+" "); ok {
			out = append(out, r)
		}
	}
	return out, nil
}

func (t target) jumpsOf(table, builtin string) []string {
	var out []string
	for _, j := range t.want.jumps {
		if j.table == table && j.builtin == builtin {
			out = append(out, j.rule)
		}
	}
	return out
}

// builtins lists the built-in chains that have jumps of ours, each once.
func (t target) builtins() []jump {
	var out []jump
	for _, j := range t.want.jumps {
		b := jump{table: j.table, builtin: j.builtin}
		if !slices.Contains(out, b) {
			out = append(out, b)
		}
	}
	return out
}

// tableNames lists the tables that this family may have chains of ours in.
func (t target) tableNames() []string {
	var out []string
	for _, c := range t.want.chains {
		if !slices.Contains(out, c.table) {
			out = append(out, c.table)
		}
	}
	return out
}

// jumpTarget returns the chain that a rule jumps or goes to, "" where it does neither.
func jumpTarget(rule string) string {
	f := strings.Fields(rule)
	for i := 0; i+1 < len(f); i++ {
		if f[i] == "-j" || f[i] == "-g" {
			return f[i+1]
		}
	}
	return ""
}
