package netfw

import (
	"errors"
	"fmt"
	"strings"

	"tagout/internal/instance"
)

// Remove takes away every chain whose name begins with the instance's prefix and every rule that jumps to
// one, whoever made them and however half-made they are. Removing nothing is not an error.
func Remove(inst instance.Instance) error {
	ts, err := targets(inst, nil)
	if err != nil {
		return err
	}
	unlock, err := lock()
	if err != nil {
		return err
	}
	defer unlock()
	var errs []error
	for _, t := range ts {
		for _, table := range t.tableNames() {
			if err := t.dropChains(table, func(string) bool { return true }); err != nil {
				errs = append(errs, fmt.Errorf("removing the %s firewall rules: %w", t.want.name, err))
			}
		}
	}
	return errors.Join(errs...)
}

// Leftovers lists the instance's chains and jumps that are still there, in words for people.
func Leftovers(inst instance.Instance) ([]string, error) {
	ts, err := targets(inst, nil)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, t := range ts {
		for _, table := range t.tableNames() {
			names, err := t.fw.ListChains(table)
			if err != nil {
				return nil, fmt.Errorf("listing table %s: %w", table, err)
			}
			for _, name := range names {
				if strings.HasPrefix(name, t.own) {
					out = append(out, fmt.Sprintf("%s firewall chain %s in table %s", t.want.name, name, table))
				}
			}
		}
	}
	return out, nil
}

// dropChains removes the chains of ours in table that unwanted names, after all jumps to them. Nothing can
// jump to a chain of ours while no chain of ours exists, so a clean table costs one listing.
func (t target) dropChains(table string, unwanted func(chain string) bool) error {
	names, err := t.fw.ListChains(table)
	if err != nil {
		return fmt.Errorf("listing table %s: %w", table, err)
	}
	var drop []string
	for _, name := range names {
		if strings.HasPrefix(name, t.own) && unwanted(name) {
			drop = append(drop, name)
		}
	}
	if len(drop) == 0 {
		return nil
	}
	for _, name := range names {
		// Only built-in chains and our own jump to ours. Another instance's chain may vanish at any moment.
		if !strings.HasPrefix(name, t.own) && strings.HasPrefix(name, anyOwner) {
			continue
		}
		if err := t.dropJumps(table, name, unwanted); err != nil {
			return err
		}
	}
	for _, name := range drop {
		if err := t.fw.ClearChain(table, name); err != nil {
			return fmt.Errorf("clearing chain %s: %w", name, err)
		}
		if err := t.fw.DeleteChain(table, name); err != nil {
			return fmt.Errorf("deleting chain %s: %w", name, err)
		}
	}
	return nil
}

// dropJumps deletes the rules in a chain that jump to a chain of ours that unwanted names. By their text,
// never by their number: another tool may insert a rule between the listing and the deletion.
func (t target) dropJumps(table, chain string, unwanted func(chain string) bool) error {
	rules, err := t.rules(table, chain)
	if err != nil {
		return err
	}
	for _, r := range rules {
		to := jumpTarget(r)
		if !strings.HasPrefix(to, t.own) || !unwanted(to) {
			continue
		}
		if err := t.fw.Delete(table, chain, words(r)...); err != nil {
			return fmt.Errorf("deleting the jump from %s to %s: %w", chain, to, err)
		}
	}
	return nil
}

// words splits a rule as a shell would: iptables quotes what has spaces in it, such as a comment.
func words(rule string) []string {
	var out []string
	var word strings.Builder
	quoted, escaped, begun := false, false, false
	for _, c := range rule {
		switch {
		case escaped:
			word.WriteRune(c)
			escaped = false
		case c == '\\' && quoted:
			escaped = true
		case c == '"':
			quoted, begun = !quoted, true
		case c == ' ' && !quoted:
			if begun {
				out = append(out, word.String())
			}
			word.Reset()
			begun = false
		default:
			word.WriteRune(c)
			begun = true
		}
	}
	if begun {
		out = append(out, word.String())
	}
	return out
}
