package kids

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"tagout/internal/wire"
)

// What lies in a command's directory below its kid's.
const (
	execsName      = "execs"
	execRecordName = "exec.json"
	outputName     = "output"
)

// execRecord is what a successor must know of a command: that it was there, so that its end gets a record, its cgroup, so
// that it can be ended, or left alone where only what it left running is in it, and when its time is over.
type execRecord struct {
	wire.Exec
	Group   string        `json:"group,omitempty"` // name of its cgroup below the kid's
	Timeout time.Duration `json:"timeout_ns,omitempty"`
	Due     time.Duration `json:"due_ns,omitempty"` // CLOCK_BOOTTIME, as the directory lies in memory and goes with the boot
	Input   bool          `json:"input,omitempty"`  // more input may come
}

func (m *Manager) execsDir(name string) string { return filepath.Join(m.dir(name), execsName) }
func (m *Manager) execDir(e *execution) string { return filepath.Join(m.execsDir(e.k.name), e.id) }

// newRecord makes the command's directory. The kid's own is not made: it may have just gone. Call it with mu held.
func (m *Manager) newRecord(e *execution) error {
	for _, dir := range []string{m.execsDir(e.k.name), m.execDir(e)} {
		if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("noting a command: %w", err)
		}
	}
	return m.putRecord(e)
}

// putRecord writes the command's record whole or not at all. Where the kid's directory has gone it writes nothing.
// Call it with mu held.
func (m *Manager) putRecord(e *execution) error {
	rec := execRecord{Exec: e.view(), Timeout: e.timeout, Due: e.due, Input: e.input != nil}
	if e.run != nil {
		rec.Group = filepath.Base(e.run.Group())
	}
	raw, err := json.Marshal(&rec)
	if err != nil {
		return fmt.Errorf("noting a command: %w", err)
	}
	path := filepath.Join(m.execDir(e), execRecordName)
	if err := os.WriteFile(path+".new", raw, 0o600); errors.Is(err, os.ErrNotExist) {
		return nil
	} else if err != nil {
		return fmt.Errorf("noting a command: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("noting a command: %w", err)
	}
	return nil
}

// dropRecord removes the command's directory. Call it with mu held.
func (m *Manager) dropRecord(e *execution) {
	if e.k.execs[e.id] != nil {
		return // it is still shown
	}
	if err := os.RemoveAll(m.execDir(e)); err != nil {
		m.cfg.Log.Error("removing what was kept of a command", "kid", e.k.name, "command", e.id, "error", err)
	}
}
