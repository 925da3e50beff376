package kids

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/wire"
	"tagout/sandboxd/runtime"
)

// What a detached command needs to outlive this process is copied to the store: the reading ends of its output, so that
// it is not cut off, its pidfd, by which a successor learns how it ended, and the writing end of an input that has not
// ended. The store has that from when the command is detached and has got all the input that came with its request.

// handedOver notes that it has got that.
func (m *Manager) handedOver(e *execution) {
	m.mu.Lock()
	e.handed = true
	e.over = e.input == nil
	m.mu.Unlock()
	m.shelter(e)
}

// inputOver notes that the command's input ends now, and makes the store hold it open no longer.
func (m *Manager) inputOver(e *execution) {
	m.mu.Lock()
	e.over = true
	m.mu.Unlock()
	m.shelter(e)
}

// shelter makes the store have what it should have of the command now. What did not succeed is tried again by reshelter.
func (m *Manager) shelter(e *execution) {
	if m.cfg.Kept == nil {
		return
	}
	e.storing.Lock()
	defer e.storing.Unlock()
	m.mu.Lock()
	run, input := e.run, !e.over
	wanted := e.free && e.handed && run != nil && e.exit == nil
	m.mu.Unlock()
	var err error
	if wanted && !(e.kept && e.keptInput == input) {
		err = m.putAway(e, run, input)
	}
	if e.kept && (!wanted || err != nil) {
		m.noteKept(e, false)
		err = errors.Join(err, m.cfg.Kept.Drop(e.id)) // what cannot be dropped now is by reshelter
	}
	if err == nil {
		return
	}
	m.cfg.Log.Error("making a detached command outlive this sandboxd", "kid", e.k.name, "command", e.id, "error", err)
	if wanted && !e.unkept {
		e.unkept = true
		m.log(e.k, audit.Record{Event: audit.EventExecUnkept, Actor: instance.Sandboxd, Outcome: audit.OutcomeFail, Detail: err.Error(),
			Fields: execFields(wire.ExecRequest{Argv: e.argv}, nil)})
	}
}

// noteKept notes whether the store has what the command needs. Call it with storing held.
func (m *Manager) noteKept(e *execution, kept bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.kept = kept
}

// reshelterEvery is how long a store that has died, or did not take something, goes unnoticed.
const reshelterEvery = 5 * time.Second

// keepSheltered looks after what the store keeps until ctx ends.
func (m *Manager) keepSheltered(ctx context.Context) {
	tick := time.NewTicker(reshelterEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			m.reshelter()
		}
	}
}

// reshelter gives the store what it has not, or has no more, and makes it forget what has ended.
func (m *Manager) reshelter() {
	if m.cfg.Kept == nil {
		return
	}
	m.mu.Lock()
	var all, kept []*execution
	for _, k := range m.kids {
		for _, e := range k.execs {
			if e.free && e.exit == nil {
				all = append(all, e)
			}
			if e.kept {
				kept = append(kept, e)
			}
		}
	}
	m.mu.Unlock()
	ids, err := m.cfg.Kept.List()
	for _, e := range kept {
		if err != nil || !slices.Contains(ids, e.id) { // what cannot be asked for is lost, until it is put again
			e.storing.Lock()
			m.noteKept(e, false)
			e.storing.Unlock()
		}
	}
	for _, e := range all {
		m.shelter(e)
	}
	if err := errors.Join(err, m.dropUnclaimed()); err != nil {
		m.cfg.Log.Error("looking after what the store of descriptors keeps", "error", err)
	}
}

func (m *Manager) putAway(e *execution, run *runtime.Running, input bool) error {
	files, err := run.Keep(input)
	if errors.Is(err, os.ErrClosed) {
		return nil // it has just ended
	}
	if err != nil {
		return err
	}
	defer func() {
		for _, fd := range files {
			unix.Close(fd) // the store has its own
		}
	}()
	if err := m.cfg.Kept.Put(e.id, files); err != nil {
		return err
	}
	m.noteKept(e, true)
	e.keptInput, e.unkept = input, false
	return nil
}
