package kids

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"time"

	"tagout/internal/wire"
	"tagout/sandboxd/outlog"
)

// newExecs is how often whoever follows a kid's output looks for commands that were started since.
const newExecs = 200 * time.Millisecond

// Logs sends what is kept of the output of the kid's detached commands: one command after the other, the oldest first. With
// follow it goes on with what follows and with commands that are started later, until the kid is gone, ctx ends or send
// fails. No command, and no end of a kid, waits for a caller who is slow: what such a caller has not got is counted, or
// gone with the kid. send is called by one goroutine at a time.
func (m *Manager) Logs(ctx context.Context, name string, follow bool, send func(wire.LogFrame) error) error {
	m.mu.Lock()
	k := m.kids[name]
	m.mu.Unlock()
	if k == nil {
		return notFound(name)
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &logReader{m: m, send: send, cancel: cancel, follow: follow, seen: map[string]bool{}}
	defer r.wg.Wait()
	if !follow {
		defer cancel()
		r.show(ctx, k)
		return nil
	}
	look := time.NewTicker(newExecs)
	defer look.Stop()
	for {
		r.show(ctx, k)
		select {
		case <-look.C:
		case <-k.released:
			return nil // and so have its commands
		case <-ctx.Done():
			return nil
		}
	}
}

// logReader sends one caller the output of a kid's commands.
type logReader struct {
	m      *Manager
	cancel func() // ends it
	follow bool
	seen   map[string]bool // commands that are shown; the looking goroutine's
	wg     sync.WaitGroup

	mu   sync.Mutex
	send func(wire.LogFrame) error // one at a time, by mu
}

// show shows the detached commands that it has not seen yet.
func (r *logReader) show(ctx context.Context, k *kid) {
	r.m.mu.Lock()
	var fresh []*execution
	logs := map[*execution]*outlog.Log{}
	for _, e := range k.execs {
		if e.free && !r.seen[e.id] {
			r.seen[e.id] = true
			fresh, logs[e] = append(fresh, e), e.log
		}
	}
	r.m.mu.Unlock()
	slices.SortFunc(fresh, func(a, b *execution) int { return cmp.Compare(a.id, b.id) })
	for _, e := range fresh {
		if r.follow {
			r.wg.Go(func() { r.command(ctx, e, logs[e]) })
		} else {
			r.command(ctx, e, logs[e])
		}
	}
}

func (r *logReader) frame(f wire.LogFrame) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.send(f); err != nil {
		r.cancel()
		return false
	}
	return true
}

// command sends one command's output; log is nil where none is kept.
func (r *logReader) command(ctx context.Context, e *execution, log *outlog.Log) {
	r.m.mu.Lock()
	view := e.view()
	r.m.mu.Unlock()
	view.Exit = nil // it comes last
	if !r.frame(wire.LogFrame{ID: e.id, Exec: &view}) || log != nil && !r.output(ctx, e.id, log) {
		return
	}
	if r.follow {
		select {
		case <-e.done:
		case <-ctx.Done():
			return
		}
	}
	r.m.mu.Lock()
	exit := e.exit
	r.m.mu.Unlock()
	if exit != nil {
		r.frame(wire.LogFrame{ID: e.id, Exit: exit}) // the last
	}
}

// output sends what is in the log, and with follow what comes. It says whether the caller still listens.
func (r *logReader) output(ctx context.Context, id string, log *outlog.Log) bool {
	end := log.Written()
	for pos := int64(0); r.follow || pos < end; {
		p, next, err := log.Next(ctx, pos)
		switch {
		case ctx.Err() != nil:
			return false
		case err != nil:
			return true // it has ended, or was forgotten
		}
		f := wire.LogFrame{ID: id, Lost: p.Lost, Stdout: p.Data}
		if p.Stream == outlog.Stderr {
			f.Stdout, f.Stderr = nil, p.Data
		}
		if !r.frame(f) {
			return false
		}
		pos = next
	}
	return true
}
