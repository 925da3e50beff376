package kids

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
)

// What lies in a command's directory below its kid's.
const (
	execsName      = "execs"
	execRecordName = "exec.json"
	outputName     = "output"
)

// execRecord is what a successor must know of a command: that it was there, so that its end gets a record, and its
// cgroup, so that it can be ended, or left alone where only what it left running is in it.
type execRecord struct {
	wire.Exec
	Group string `json:"group,omitempty"` // name of its cgroup below the kid's
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
	rec := execRecord{Exec: e.view()}
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

// restarted is what is said of a command whose sandboxd died.
const restarted = "sandboxd was restarted while it ran: it was ended with all that it had started"

// endExecs ends what a predecessor's commands left in an adopted kid: nobody reads their output, keeps their time or
// would say how they end. What commands that had ended by themselves left running goes on.
func (m *Manager) endExecs(k *kid) error {
	var left []string
	var errs []error
	names, err := os.ReadDir(m.execsDir(k.name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("looking for commands that were left behind: %w", err)
	}
	for _, name := range names {
		e, rec, err := m.loadExec(k, name.Name())
		if err != nil {
			errs = append(errs, err, os.RemoveAll(filepath.Join(m.execsDir(k.name), name.Name())))
			continue
		}
		if e.exit != nil {
			left = append(left, rec.Group)
		} else {
			m.endedWithout(e)
		}
		m.keep(e, rec)
	}
	groups, err := m.cfg.Runtime.Groups(m.cfg.Cgroups.V2(m.cgroupRel(k.name)))
	errs = append(errs, err)
	for _, dir := range groups {
		if !slices.Contains(left, filepath.Base(dir)) {
			m.cfg.Runtime.EndGroup(dir)
		}
	}
	return errors.Join(errs...)
}

// loadExec reads what is known of a command.
func (m *Manager) loadExec(k *kid, id string) (*execution, execRecord, error) {
	var rec execRecord
	raw, err := os.ReadFile(filepath.Join(m.execsDir(k.name), id, execRecordName))
	if err == nil {
		err = json.Unmarshal(raw, &rec)
	}
	if err == nil && (rec.ID != id || strings.Contains(rec.Group, "/")) {
		err = errors.New("it is another command's")
	}
	if err != nil {
		return nil, rec, fmt.Errorf("reading what is known of command %s in kid %s: %w", id, k.name, err)
	}
	e := &execution{
		id: id, k: k, began: rec.Started, argv: rec.Argv, actor: rec.Actor, tty: rec.TTY, detached: make(chan struct{}), done: make(chan struct{}),
		cancel: func(error) {}, free: rec.Detached, exit: rec.Exit, ended: rec.Ended,
	}
	close(e.done)
	return e, rec, nil
}

// endedWithout gives a command the end that its own sandboxd could not record.
func (m *Manager) endedWithout(e *execution) {
	e.exit, e.ended = &wire.ExecExit{Result: resultFailed, Code: codeKilled, Detail: restarted}, time.Now()
	m.log(e.k, audit.Record{Event: audit.EventExecEnded, Actor: e.actor, Outcome: audit.OutcomeFail, Detail: restarted,
		Fields: execFields(wire.ExecRequest{Argv: e.argv}, e.exit)})
}

// keep shows a detached command further, without its output; of any other nothing is kept.
func (m *Manager) keep(e *execution, rec execRecord) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := os.RemoveAll(filepath.Join(m.execDir(e), outputName)); err != nil {
		m.cfg.Log.Error("removing a command's output", "kid", e.k.name, "command", e.id, "error", err)
	}
	if !e.free {
		if rec.Exit == nil { // else its group is to be left alone after the next restart, too
			m.dropRecord(e)
		}
		return
	}
	if e.k.execs == nil {
		e.k.execs = map[string]*execution{}
	}
	e.k.execs[e.id] = e
	if rec.Exit == nil {
		if err := m.putRecord(e); err != nil {
			m.cfg.Log.Error("noting that a command has ended", "kid", e.k.name, "command", e.id, "error", err)
		}
	}
}
