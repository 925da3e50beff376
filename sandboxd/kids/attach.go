package kids

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/outlog"
)

// Execs returns the kid's commands: those that run, and detached ones that have ended. The oldest comes first.
func (m *Manager) Execs(_ context.Context, name string) ([]wire.Exec, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	k := m.kids[name]
	if k == nil {
		return nil, notFound(name)
	}
	out := []wire.Exec{}
	for _, e := range k.execs {
		out = append(out, e.view())
	}
	slices.SortFunc(out, func(a, b wire.Exec) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// ExecStatus returns one of them.
func (m *Manager) ExecStatus(_ context.Context, name, id string) (wire.Exec, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e, err := m.find(name, id)
	if err != nil {
		return wire.Exec{}, err
	}
	return e.view(), nil
}

// find returns the command. Call it with mu held.
func (m *Manager) find(name, id string) (*execution, error) {
	k := m.kids[name]
	if k == nil {
		return nil, notFound(name)
	}
	e := k.execs[id]
	if e == nil {
		return nil, noExec(name, id)
	}
	return e, nil
}

// Attach sends what is kept of a detached command's output and what follows, as Exec does, until the command has ended,
// ctx ends or send fails; input is ExecInput's, and nil is nothing. The command does not wait for a caller who is slow:
// what the caller was too slow for is counted in a frame. A command that is not detached has its caller already.
//
// Whoever sends input drives the command: that is refused as a new one would be while a tag hangs, and recorded.
func (m *Manager) Attach(ctx context.Context, name, id, actor string, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error {
	m.mu.Lock()
	e, err := m.find(name, id)
	if err == nil && !e.free {
		err = refuse(Conflict, reason.OK, "command %s in kid %s is not detached: it ends with whoever started it", id, name)
	}
	if err != nil {
		m.mu.Unlock()
		return err
	}
	log := e.log
	m.mu.Unlock()
	if input != nil {
		if err := m.driven(ctx, e, actor); err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		go e.passAll(ctx, input)
	}
	if err := send(wire.ExecFrame{ID: id}); err != nil {
		return nil // nobody listens
	}
	if log != nil {
		if over, err := follow(ctx, log, send); over {
			return err
		}
	}
	select {
	case <-e.done:
		send(wire.ExecFrame{Exit: e.exit}) // it was the last
	case <-ctx.Done():
	}
	return nil
}

// driven says whether the caller may send input to the command now, and records it.
func (m *Manager) driven(ctx context.Context, e *execution, actor string) error {
	err := errors.Join(m.canRecord(), m.clear(ctx, e.k))
	rec := audit.Record{Event: audit.EventExecAttached, Actor: actor, Outcome: audit.OutcomeOK, Fields: map[string]string{"exec": e.id}}
	if err != nil {
		rec.Outcome, rec.Reason, rec.Detail = audit.OutcomeDeny, ReasonOf(err), err.Error()
	}
	m.log(e.k, rec)
	return err
}

// passAll passes an attached caller's input on until it ends or ctx does.
func (e *execution) passAll(ctx context.Context, input <-chan wire.ExecInput) {
	for {
		select {
		case in, ok := <-input:
			if !ok {
				return
			}
			e.pass(ctx, nil, in)
		case <-ctx.Done():
			return
		}
	}
}

// ResizeExec gives a command's terminal another size; one that has none, or has ended, has none to change.
func (m *Manager) ResizeExec(name, id string, size wire.TermSize) error {
	m.mu.Lock()
	e, err := m.find(name, id)
	if err != nil {
		m.mu.Unlock()
		return err
	}
	e.size = &size // for one that has not started
	run := e.run
	m.mu.Unlock()
	if run != nil {
		run.Resize(size.Rows, size.Cols) // as above
	}
	return nil
}

// DetachExec lets a command run on without its caller, for whom Exec returns, and keeps its output from here on. One that
// is detached stays so.
func (m *Manager) DetachExec(name, id string) error {
	m.mu.Lock()
	e, err := m.find(name, id)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	m.detach(e)
	return nil
}

// follow sends what is in the log, as it comes. over is false where the log has ended and the caller still listens.
func follow(ctx context.Context, log *outlog.Log, send func(wire.ExecFrame) error) (over bool, err error) {
	for pos := int64(0); ; {
		p, next, err := log.Next(ctx, pos)
		switch {
		case errors.Is(err, outlog.ErrEnded), errors.Is(err, os.ErrClosed): // the second: it was forgotten, or its kid has gone
			return false, nil
		case ctx.Err() != nil:
			return true, nil
		case err != nil:
			return true, err
		}
		f := wire.ExecFrame{Lost: p.Lost, Stdout: p.Data}
		if p.Stream == outlog.Stderr {
			f.Stdout, f.Stderr = nil, p.Data
		}
		if send(f) != nil {
			return true, nil // nobody listens
		}
		pos = next
	}
}

// EndExec kills a command with all that it started, and returns when it has ended; one that has ended is forgotten. A
// command that is not there is no error.
func (m *Manager) EndExec(ctx context.Context, name, id, actor, why string) error {
	m.mu.Lock()
	e, err := m.find(name, id)
	switch {
	case KindOf(err) == NotFound && m.kids[name] != nil:
		m.mu.Unlock()
		return nil
	case err != nil:
		m.mu.Unlock()
		return err
	case e.exit != nil:
		m.forgetExec(e)
		m.mu.Unlock()
		return nil
	}
	m.mu.Unlock()
	e.cancel(&endedBy{actor, why})
	select {
	case <-e.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
