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
	ts, err := targets(inst)
	if err != nil {
		return err
	}
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
	ts, err := targets(inst)
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

// dropJumps deletes the rules in a chain that jump to a chain of ours that unwanted names. By number, last
// first, so that the numbers stay right and the rule's spelling does not matter.
func (t target) dropJumps(table, chain string, unwanted func(chain string) bool) error {
	rules, err := t.rules(table, chain)
	if err != nil {
		return err
	}
	for i := len(rules) - 1; i >= 0; i-- {
		to := jumpTarget(rules[i])
		if !strings.HasPrefix(to, t.own) || !unwanted(to) {
			continue
		}
		if err := t.fw.DeleteById(table, chain, i+1); err != nil {
			return fmt.Errorf("deleting the jump from %s to %s: %w", chain, to, err)
		}
	}
	return nil
}
