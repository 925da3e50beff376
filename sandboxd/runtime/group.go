package runtime

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tagout/internal/cgroup"
)

// groupPrefix begins the names of the cgroups of commands.
const groupPrefix = "exec-"

// Groups returns the cgroups of commands below unit, a container's in the v2 hierarchy. Those of commands that wait for
// their orders are not among them.
func (r *Runc) Groups(unit string) ([]string, error) {
	entries, err := os.ReadDir(unit)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("looking for commands: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), groupPrefix) {
			out = append(out, filepath.Join(unit, e.Name()))
		}
	}
	return out, nil
}

// EndGroup kills everything in a cgroup that Groups returned. Reap removes it.
func (r *Runc) EndGroup(dir string) { r.abandon(execGroup{dirs: []string{dir}, unified: dir}) }

// Group is the command's cgroup in the v2 hierarchy.
func (r *Running) Group() string { return r.group.unified }

// CPU is the time that the command and all that it started have used.
func (r *Running) CPU() (user, system time.Duration, err error) {
	return cgroup.CPUSplit(r.group.unified)
}
