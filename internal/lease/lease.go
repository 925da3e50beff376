// Package lease holds the terms of a box's leases, and the file in which `tagout setup` leaves them for the daemons.
// It knows no format but JSON, so that killswitchd can read it. It holds no lease itself.
package lease

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/instance"
)

// Terms say how long each guard may stay away before its absence stops the kids. All of them are counted on
// CLOCK_BOOTTIME, except Watchdog, which no suspended machine can run out.
type Terms struct {
	Kids     time.Duration `json:"kids_ns"`     // how long proxy, dnsfilter, credd, the audit log or sandboxd may be unwell
	Kernel   time.Duration `json:"kernel_ns"`   // how long packets pass after killswitchd last renewed the leases in the kernel
	Watchdog time.Duration `json:"watchdog_ns"` // how long killswitchd's enforcement may stand still before it is killed and started again
	Absent   time.Duration `json:"absent_ns"`   // how long killswitchd may not answer before sandboxd kills the kids itself
}

// Default are the terms of a box whose configuration names none.
var Default = Terms{Kids: 30 * time.Second, Kernel: 5 * time.Second, Watchdog: 5 * time.Second, Absent: 20 * time.Second}

// Bound is the range of one term, both ends included.
type Bound struct{ Least, Most time.Duration }

// Bounds of the terms. The least is what a loaded machine keeps to: the kernel's leases are renewed every second.
var (
	KidsBound     = Bound{5 * time.Second, time.Hour}
	KernelBound   = Bound{3 * time.Second, 10 * time.Minute}
	WatchdogBound = Bound{2 * time.Second, 10 * time.Minute}
	AbsentBound   = Bound{5 * time.Second, time.Hour}
)

// Fill returns t with Default's value for what is zero.
func (t Terms) Fill() Terms {
	for _, f := range []struct{ have, preset *time.Duration }{
		{&t.Kids, &Default.Kids}, {&t.Kernel, &Default.Kernel}, {&t.Watchdog, &Default.Watchdog}, {&t.Absent, &Default.Absent},
	} {
		if *f.have == 0 {
			*f.have = *f.preset
		}
	}
	return t
}

// Check says whether every term lies within its bounds.
func (t Terms) Check() error {
	for _, f := range []struct {
		name string
		have time.Duration
		Bound
	}{
		{"kids", t.Kids, KidsBound}, {"kernel", t.Kernel, KernelBound},
		{"watchdog", t.Watchdog, WatchdogBound}, {"absent", t.Absent, AbsentBound},
	} {
		if f.have < f.Least || f.have > f.Most {
			return fmt.Errorf("the term %s of the leases is %v, which is not from %v to %v", f.name, f.have, f.Least, f.Most)
		}
	}
	return nil
}

// Name is the file's name in the instance's state directory.
const Name = "leases.json"

// File is where the instance keeps its terms.
func File(inst instance.Instance) string { return filepath.Join(inst.StateDir(), Name) }

// Load returns the instance's terms, which are valid whatever the file is like: a missing file means Default, and so
// does one that is unreadable, with an error that says so.
func Load(inst instance.Instance) (Terms, error) {
	raw, err := os.ReadFile(File(inst))
	if errors.Is(err, fs.ErrNotExist) {
		return Default, nil
	}
	var t Terms
	if err == nil {
		err = json.Unmarshal(raw, &t)
	}
	t = t.Fill()
	if err == nil {
		err = t.Check()
	}
	if err != nil {
		return Default, fmt.Errorf("reading the terms of the leases; run `tagout setup` again, meanwhile the defaults hold: %w", err)
	}
	return t, nil
}
