package kids

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/fdstore"
	"tagout/internal/instance"
	"tagout/internal/wire"
	"tagout/sandboxd/outlog"
)

// restarted is what is said of a command that ended with its sandboxd.
const restarted = "sandboxd was restarted while it ran: it was ended with all that it had started"

// takeOverExecs goes on with a predecessor's detached commands in an adopted kid. All others are ended: nobody reads
// their output or would say how they end. What commands that had ended by themselves left running goes on.
func (m *Manager) takeOverExecs(k *kid) error {
	names, err := os.ReadDir(m.execsDir(k.name))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("looking for commands that were left behind: %w", err)
	}
	var left []string
	var errs []error
	for _, name := range names {
		e, rec, err := m.loadExec(k, name.Name())
		if err != nil {
			errs = append(errs, err, os.RemoveAll(filepath.Join(m.execsDir(k.name), name.Name())))
			continue
		}
		if e.exit == nil && e.free {
			err = m.takeOver(e, rec)
			if err == nil {
				left = append(left, rec.Group)
				continue
			}
			if !errors.Is(err, fdstore.ErrNotKept) {
				errs = append(errs, err)
			}
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
		id: id, k: k, began: rec.Started, argv: rec.Argv, actor: rec.Actor, tty: rec.TTY, timeout: rec.Timeout, due: rec.Due,
		fed: make(chan struct{}), detached: make(chan struct{}), done: make(chan struct{}),
		cancel: func(error) {}, free: rec.Detached, exit: rec.Exit, ended: rec.Ended, adopted: rec.Adopted,
	}
	return e, rec, nil
}

// takeOver goes on with a command that runs, or has ended since nobody was there. errors.Is(err, fdstore.ErrNotKept)
// where the store has nothing of it: it is to be ended.
func (m *Manager) takeOver(e *execution, rec execRecord) error {
	if m.cfg.Kept == nil {
		return fdstore.ErrNotKept
	}
	files, err := m.cfg.Kept.Get(e.id)
	if err != nil {
		return err
	}
	run, err := m.cfg.Runtime.Adopt(e.k.name, rec.Group, files)
	if err != nil {
		return err
	}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	e.run, e.out, e.adopted, e.kept = run, &stream{}, time.Now(), true
	if run.Stdin != nil && rec.Input {
		e.input = make(chan wire.ExecInput, pendingInput)
	}
	e.keptInput = run.Stdin != nil
	m.openOutput(e)
	m.keepOutput(e, e.log)
	close(e.detached)
	m.log(e.k, audit.Record{Event: audit.EventExecAdopted, Actor: instance.Sandboxd, Outcome: audit.OutcomeOK, Detail: e.loss,
		Fields: execFields(wire.ExecRequest{Argv: e.argv}, nil)})
	m.mu.Lock()
	m.show(e)
	if err := m.putRecord(e); err != nil {
		m.cfg.Log.Error("noting that a command was taken over", "kid", e.k.name, "command", e.id, "error", err)
	}
	m.mu.Unlock()
	go m.goOn(e)
	return nil
}

// goOn is conduct for a command that another sandboxd started.
func (m *Manager) goOn(e *execution) {
	defer e.cancel(nil)
	m.touch(e.k)
	defer m.touch(e.k)
	go m.feed(e, e.run, wire.ExecRequest{})
	exit := m.see(e.ctx, e, e.run)
	if e.loss != "" {
		exit.Detail = strings.TrimPrefix(exit.Detail+"; "+e.loss, "; ")
	}
	m.conclude(e, wire.ExecRequest{Argv: e.argv}, &exit)
}

// openOutput opens what is kept of a command's output, or else begins anew and says so.
func (m *Manager) openOutput(e *execution) {
	path := filepath.Join(m.execDir(e), outputName)
	log, err := outlog.Open(path, keptOutput)
	if err != nil {
		e.loss = "what it had written before sandboxd was restarted is lost"
		m.cfg.Log.Error("going on with a command's output", "kid", e.k.name, "command", e.id, "error", err)
		if log, err = nil, outlog.Remove(path); err == nil {
			log, err = outlog.Create(path, keptOutput)
		}
	}
	if err != nil {
		m.cfg.Log.Error("keeping a detached command's output; it is dropped", "kid", e.k.name, "command", e.id, "error", err)
	}
	e.log = log
}

// unknown says why nobody knows how a command ended.
func (e *execution) unknown() string {
	if e.adopted.IsZero() {
		return "the command has ended, but kid-init does not say how"
	}
	return "the command has ended, and nobody was there to see how: it was another sandboxd's, and this kernel does not keep it (Linux 6.15 and later do)"
}

// endedWithout gives a command the end that its own sandboxd could not record.
func (m *Manager) endedWithout(e *execution) {
	e.exit, e.ended = &wire.ExecExit{Result: resultFailed, Code: codeKilled, Detail: restarted}, time.Now()
	m.log(e.k, audit.Record{Event: audit.EventExecEnded, Actor: e.actor, Outcome: audit.OutcomeFail, Detail: restarted,
		Fields: execFields(wire.ExecRequest{Argv: e.argv}, e.exit)})
}

// keep shows a detached command that has ended further, with its output; of any other nothing is kept.
func (m *Manager) keep(e *execution, rec execRecord) {
	close(e.done)
	close(e.fed)
	if e.free {
		m.openOutput(e)
		if e.log != nil {
			e.log.End()
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !e.free {
		if rec.Exit == nil { // else its group is to be left alone after the next restart, too
			m.dropRecord(e)
		}
		return
	}
	m.show(e)
	if rec.Exit != nil {
		return
	}
	if err := m.putRecord(e); err != nil {
		m.cfg.Log.Error("noting that a command has ended", "kid", e.k.name, "command", e.id, "error", err)
	}
}

// show makes it one of the kid's commands. Call it with mu held.
func (m *Manager) show(e *execution) {
	if e.k.execs == nil {
		e.k.execs = map[string]*execution{}
	}
	e.k.execs[e.id] = e
}

// dropUnclaimed makes the store forget what is of no command that runs.
func (m *Manager) dropUnclaimed() error {
	if m.cfg.Kept == nil {
		return nil
	}
	ids, err := m.cfg.Kept.List()
	if err != nil {
		return err
	}
	m.mu.Lock()
	runs := map[string]bool{}
	for _, k := range m.kids {
		for _, e := range k.execs {
			runs[e.id] = runs[e.id] || e.exit == nil
		}
	}
	m.mu.Unlock()
	var errs []error
	for _, id := range ids {
		if !runs[id] {
			errs = append(errs, m.cfg.Kept.Drop(id))
		}
	}
	return errors.Join(errs...)
}
