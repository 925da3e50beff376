package instance

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	runRoot   = "/run/tagout"
	stateRoot = "/var/lib/tagout"
)

// DefaultName is the instance that commands use when --instance is not given.
const DefaultName = "main"

// ErrUnknown is returned by Open for an instance that was never set up or was cleaned up.
var ErrUnknown = errors.New("no such instance")

func slotDir() string { return filepath.Join(runRoot, ".slots") }

// Open returns an instance that is set up. It fails with ErrUnknown where there is none of that name.
func Open(name string) (Instance, error) {
	if err := CheckName(name); err != nil {
		return Instance{}, err
	}
	owners, err := slotOwners()
	if err != nil {
		return Instance{}, err
	}
	for slot, owner := range owners {
		if owner == name {
			return New(name, slot)
		}
	}
	return Instance{}, fmt.Errorf("opening instance %s: %w: run `tagout setup --instance %s` first", name, ErrUnknown, name)
}

// ErrExists is returned by ClaimNew for an instance that has a slot already.
var ErrExists = errors.New("the instance exists")

// Exists is the ErrExists of the instance called name.
func Exists(name string) error {
	return fmt.Errorf("instance %s: %w: choose another --instance, or run `tagout cleanup --purge --instance %s` first", name, ErrExists, name)
}

// Claim returns the instance called name, taking a free slot for it where it has none yet. The claim lasts
// until Release or a reboot.
func Claim(name string) (Instance, error) { return claim(name, false) }

// ClaimNew is Claim for whoever wants an instance of its own: it fails with ErrExists where there is one of that
// name. Of two that ask at once, one gets it.
func ClaimNew(name string) (Instance, error) { return claim(name, true) }

func claim(name string, fresh bool) (Instance, error) {
	if err := CheckName(name); err != nil {
		return Instance{}, err
	}
	var inst Instance
	err := locked(func() error {
		owners, err := slotOwners()
		if err != nil {
			return err
		}
		slot := slices.Index(owners[:], name)
		if slot >= 0 && fresh {
			return Exists(name)
		}
		if slot >= 0 {
			inst, err = New(name, slot)
			return err
		}
		free := -1
		for slot := Slots - 1; slot >= 0; slot-- {
			if owners[slot] != "" {
				continue
			}
			switch gatewayOwner(slot) {
			case name: // the slot file was lost and the box is still there: it gets its own slot back
				return fill(name, slot, &inst)
			case "":
				free = slot
			}
		}
		if free < 0 {
			return fmt.Errorf("claiming a slot for instance %s: all %d are taken: remove one with `tagout cleanup --instance NAME`", name, Slots)
		}
		return fill(name, free, &inst)
	})
	return inst, err
}

// GatewayAlias is the alias of the instance's gateway link: it tells whose the slot is, also when the slot
// file was lost, so that no other instance takes a slot that is still in use.
func GatewayAlias(name string) string { return gatewayAliasPrefix + name }

const gatewayAliasPrefix = "tagout gateway of "

// gatewayOwner names the instance whose gateway link occupies the slot, "" where there is none. A link of that
// name that is nobody's counts as in use: its owner is "?".
func gatewayOwner(slot int) string {
	raw, err := os.ReadFile(fmt.Sprintf("/sys/class/net/tgo%x/ifalias", slot))
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	if name, ok := strings.CutPrefix(strings.TrimSpace(string(raw)), gatewayAliasPrefix); ok {
		return name
	}
	return "?"
}

// fill writes the slot file; it is called under the lock.
func fill(name string, slot int, inst *Instance) error {
	claimed, err := New(name, slot)
	if err != nil {
		return err
	}
	// Written whole and then renamed, so that a half-written slot can never exist.
	// Under the lock nobody else writes: what is there was left by one that was killed.
	old, _ := filepath.Glob(filepath.Join(slotDir(), ".new-*"))
	for _, path := range old {
		os.Remove(path) // it is in nobody's way
	}
	tmp := filepath.Join(slotDir(), fmt.Sprintf(".new-%d", os.Getpid()))
	if err := os.WriteFile(tmp, []byte(name+"\n"), 0o644); err != nil {
		return fmt.Errorf("claiming slot %d: %w", slot, err)
	}
	// Every daemon reads the registry, whatever the umask of who claimed.
	if err := errors.Join(os.Chmod(tmp, 0o644), os.Rename(tmp, filepath.Join(slotDir(), strconv.Itoa(slot)))); err != nil {
		return fmt.Errorf("claiming slot %d: %w", slot, err)
	}
	*inst = claimed
	return nil
}

// Release gives the instance's slot back. It is the last step of a cleanup; releasing twice is not an error.
func (i Instance) Release() error {
	return locked(func() error {
		owners, err := slotOwners()
		if err != nil {
			return err
		}
		if owners[i.slot] != i.name {
			return nil
		}
		return os.Remove(filepath.Join(slotDir(), strconv.Itoa(i.slot)))
	})
}

func slotOwners() ([Slots]string, error) {
	var owners [Slots]string
	for slot := range owners {
		raw, err := os.ReadFile(filepath.Join(slotDir(), strconv.Itoa(slot)))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return owners, fmt.Errorf("reading slot %d: %w", slot, err)
		}
		name := strings.TrimSpace(string(raw))
		if err := CheckName(name); err != nil {
			return owners, fmt.Errorf("reading slot %d: %w: remove %s if no instance uses it", slot, err, filepath.Join(slotDir(), strconv.Itoa(slot)))
		}
		owners[slot] = name
	}
	return owners, nil
}

// locked runs fn while holding the machine-wide slot lock; the kernel drops the lock when the process dies.
func locked(fn func() error) error {
	if err := os.MkdirAll(slotDir(), 0o755); err != nil { // names are not secret
		return fmt.Errorf("making the slot registry: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(slotDir(), "lock"), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o644) // empty file
	if err != nil {
		return fmt.Errorf("opening the slot lock: %w", err)
	}
	defer f.Close() // nothing was written
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("taking the slot lock: %w", err)
	}
	return fn()
}
