// Package box makes and removes the static things of an instance: its slot, directories, configuration,
// inspection CA, cgroups, BPF programs, gateway link and firewall. Kids come and go inside them; nothing here
// is done per kid.
//
// Setup is a list of named steps. It can be run again at any time: it puts right what has drifted and leaves
// the rest alone, and where a step fails, what this run made is taken away again. Cleanup asks nobody and
// trusts nothing but names: it finds what an instance left after any of its processes was killed (invariant 8
// in docs/threat-model.md), kids first, and gives the slot back last.
package box

import (
	"context"
	"errors"
	"fmt"
	"os"

	"tagout/internal/authority"
	"tagout/internal/cgroup"
	"tagout/internal/doctor"
	"tagout/internal/instance"
	"tagout/internal/netfw"
)

// Config is the box's configuration; *config.Box fulfils it.
type Config interface {
	Marshal() ([]byte, error)
	People() []authority.Person
}

// Compiler is a Config with parts that a daemon reads as JSON, because it must not know YAML. They lie in the
// state directory under the names that Compiled gives, readable by the instance's group.
type Compiler interface {
	Compiled() (map[string][]byte, error)
}

// BPF installs and removes the BPF programs of an instance.
type BPF interface {
	// Install is idempotent and never leaves the instance open.
	Install(inst instance.Instance, kids string, daemons []string) error
	// Uninstall removes attachments and pins, whatever is there of them.
	Uninstall(inst instance.Instance, kids string, daemons []string) error
}

// Extra is something else that an instance may have made, such as a practice internet.
type Extra struct {
	Cleanup   func(instance.Instance) error
	Leftovers func(instance.Instance) []string
}

// Boxes sets boxes up and removes them. BPF and Doctor are needed; Extras may be nil.
type Boxes struct {
	BPF    BPF
	Doctor func(context.Context) doctor.Report
	Extras []Extra
}

// job is one Setup.
type job struct {
	Boxes
	inst     instance.Instance
	layout   cgroup.Layout
	cfg      []byte
	compiled map[string][]byte // file name -> content
	people   []authority.Person
	calls    []netfw.Call                  // that credd may make
	undo     []func(context.Context) error // of this run, in the order in which things were made
}

// step is one named part of Setup. do puts on j.undo how to take away what it made, and only that.
type step struct {
	name string
	do   func(ctx context.Context, j *job) error
}

func steps() []step {
	return []step{
		{"directories", makeDirs},
		{"memory for stops", mountStops},
		{"memory for kids", mountKids},
		{"configuration", writeConfig},
		{"authorities", writeAuthorities},
		{"inspection CA", makeCA},
		{"cgroups", makeCgroups},
		{"BPF filesystem", mountBPF},
		{"BPF programs", installBPF},
		{"gateway link", makeGateway},
		{"firewall", installFirewall},
	}
}

// Setup makes everything static of the instance called name, or puts it right. It needs root and a machine on
// which every needed check of doctor passes.
func (b Boxes) Setup(ctx context.Context, name string, cfg Config) (instance.Instance, error) {
	if err := instance.CheckName(name); err != nil {
		return instance.Instance{}, err
	}
	if uid := os.Geteuid(); uid != 0 {
		return instance.Instance{}, fmt.Errorf("setting up instance %s needs root, this is uid %d: run it with sudo", name, uid)
	}
	unlock, err := instance.Lock(ctx, name)
	if err != nil {
		return instance.Instance{}, err
	}
	defer unlock()
	raw, err := cfg.Marshal()
	if err != nil {
		return instance.Instance{}, fmt.Errorf("writing the configuration: %w", err)
	}
	var compiled map[string][]byte
	if c, ok := cfg.(Compiler); ok {
		if compiled, err = c.Compiled(); err != nil {
			return instance.Instance{}, fmt.Errorf("writing the configuration: %w", err)
		}
	}
	report := b.Doctor(ctx)
	if err := ctx.Err(); err != nil { // what was not tried is not what the machine lacks
		return instance.Instance{}, fmt.Errorf("setting up instance %s: %w", name, err)
	}
	if err := report.Refusal(); err != nil {
		return instance.Instance{}, fmt.Errorf("setting up instance %s: %w", name, err)
	}
	layout, err := cgroup.Detect()
	if err != nil {
		return instance.Instance{}, fmt.Errorf("setting up instance %s: %w", name, err)
	}
	j := &job{Boxes: b, layout: layout, cfg: raw, compiled: compiled, people: cfg.People()}
	if c, ok := cfg.(Caller); ok {
		j.calls = callsOf(c.Called())
	}
	if err := j.claim(name); err != nil {
		return instance.Instance{}, err
	}
	for _, s := range steps() {
		err := ctx.Err()
		if err == nil {
			err = s.do(ctx, j)
		}
		if err != nil {
			return instance.Instance{}, j.rollBack(fmt.Errorf("setting up instance %s: %s: %w", name, s.name, err))
		}
	}
	return j.inst, nil
}

// claim takes a slot; one that the instance had before is not given back by a rollback.
func (j *job) claim(name string) error {
	_, err := instance.Open(name)
	had := err == nil
	if err != nil && !errors.Is(err, instance.ErrUnknown) {
		return err
	}
	if j.inst, err = instance.Claim(name); err != nil {
		return err
	}
	if !had {
		j.undo = append(j.undo, func(context.Context) error { return j.inst.Release() })
	}
	return nil
}

// rollBack takes away what this run made, last first, and returns cause with whatever went wrong meanwhile.
func (j *job) rollBack(cause error) error {
	// Not the caller's context: it may be what ended.
	ctx, cancel := context.WithTimeout(context.Background(), killWait)
	defer cancel()
	errs := []error{cause}
	for i := len(j.undo) - 1; i >= 0; i-- {
		if err := j.undo[i](ctx); err != nil {
			errs = append(errs, fmt.Errorf("taking it back: %w: run `tagout cleanup --instance %s`", err, j.inst.Name()))
		}
	}
	return errors.Join(errs...)
}
