package killswitch

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// Around is what a stop needs not and tells of all the same. Fields that are nil are not looked at.
type Around struct {
	Daemons map[string]string // name of a daemon -> v2 directory of its cgroup
	Audit   func() error      // why the audit log takes no records now, nil where it does; must not block
	Maps    func() error      // what is wrong with the BPF maps' filesystem, nil where nothing is; must not block
}

// stuckAfter is how long the audit log may take for one record before a report tells of it.
const stuckAfter = 250 * time.Millisecond

// lookLimit bounds how long a report waits for the look at the daemons, which is a few reads of /proc.
const lookLimit = 50 * time.Millisecond

// lookAround begins to look at the other daemons. It asks the kernel alone: one that hangs cannot answer.
func (s *Switch) lookAround() <-chan []string {
	found := make(chan []string, 1)
	go func() {
		var out []string
		for _, name := range slices.Sorted(maps.Keys(s.cfg.Around.Daemons)) {
			procs, err := s.cfg.Cgroups.Survivors(s.cfg.Around.Daemons[name])
			switch {
			case err != nil:
				out = append(out, fmt.Sprintf("cannot see whether %s runs: %v", name, err))
			case len(procs) == 0:
				out = append(out, name+" is not running")
			case !slices.ContainsFunc(procs, func(p Process) bool { return p.State != "T" }):
				out = append(out, fmt.Sprintf("%s stands still: a signal has stopped process %d", name, procs[0].PID))
			}
		}
		found <- out
	}()
	return found
}

// degraded says what was broken around a stop.
func (s *Switch) degraded(around <-chan []string) []string {
	var out []string
	limit := time.NewTimer(lookLimit)
	defer limit.Stop()
	select {
	case out = <-around:
	case <-limit.C:
		out = []string{fmt.Sprintf("the other daemons could not be looked at within %v", lookLimit)}
	}
	for _, look := range []func() error{s.cfg.Around.Audit, s.cfg.Around.Maps} {
		if look == nil {
			continue
		}
		if err := look(); err != nil {
			out = append(out, err.Error())
		}
	}
	if d := s.audit.stuck(); d > stuckAfter {
		out = append(out, fmt.Sprintf("the audit log has not taken a record for %v", d.Round(time.Millisecond)))
	}
	return out
}
