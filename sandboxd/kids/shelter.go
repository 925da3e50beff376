package kids

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

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

// shelter makes the store have what it should have of the command now.
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
		e.kept = false
		err = errors.Join(err, m.cfg.Kept.Drop(e.id)) // what cannot be dropped is dropped by a successor
	}
	if err != nil {
		m.cfg.Log.Error("making a detached command outlive this sandboxd", "kid", e.k.name, "command", e.id, "error", err)
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
	e.kept, e.keptInput = true, input
	return nil
}
