package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"

	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"tagout/internal/wire"
)

// terminal is the one that this process runs in, as far as there is one.
type terminal struct {
	in  *os.File // standard input, where that is a terminal
	out *os.File // likewise
}

func (a *app) terminal() *terminal {
	var t terminal
	if f, ok := a.in.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		t.in = f
	}
	if f, ok := a.out.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		t.out = f
	}
	return &t
}

// size is the terminal's, or what terminals once had.
func (t *terminal) size() *wire.TermSize {
	for _, f := range []*os.File{t.in, t.out} {
		if f == nil {
			continue
		}
		if cols, rows, err := term.GetSize(int(f.Fd())); err == nil && rows > 0 && cols > 0 {
			return &wire.TermSize{Rows: uint16(rows), Cols: uint16(cols)} // the kernel has them as such
		}
	}
	return &wire.TermSize{Rows: 24, Cols: 80}
}

// rawTerminal is a terminal that hands every key through.
type rawTerminal struct {
	*terminal
	fd      int
	before  *term.State
	end     context.CancelCauseFunc
	signals chan os.Signal
	sized   chan struct{} // of one: it may have another size
	done    chan struct{} // closed when it is given back

	mu   sync.Mutex
	back bool // guarded by mu; it is given back
}

// take hands each key through, and tells of the size: once, and whenever it changes. Signals that would end this process
// call end instead; one that suspends it does so with the terminal as it was. The caller calls restore.
func (t *terminal) take(resized func(wire.TermSize), end context.CancelCauseFunc) (*rawTerminal, error) {
	r := &rawTerminal{terminal: t, fd: int(t.in.Fd()), end: end, signals: make(chan os.Signal, 16), sized: make(chan struct{}, 1), done: make(chan struct{})}
	signal.Notify(r.signals, caught()...)
	var err error
	if r.before, err = term.MakeRaw(r.fd); err != nil {
		signal.Stop(r.signals)
		return nil, fmt.Errorf("taking the terminal over: %w", err)
	}
	r.changed()
	go r.follow()
	go r.tell(resized)
	return r, nil
}

// caught lists what must not end this process with the terminal as nobody wants it, beside what ends lists, and what
// tells of the terminal.
func caught() []os.Signal {
	out := []os.Signal{unix.SIGQUIT, unix.SIGABRT, unix.SIGALRM, unix.SIGUSR1, unix.SIGUSR2, unix.SIGWINCH, unix.SIGCONT}
	if !signal.Ignored(unix.SIGTSTP) {
		out = append(out, unix.SIGTSTP)
	}
	return out
}

func (r *rawTerminal) follow() {
	for {
		select {
		case <-r.done:
			return
		case s := <-r.signals:
			switch s {
			case unix.SIGWINCH:
				r.changed()
			case unix.SIGTSTP:
				r.suspend()
			case unix.SIGCONT: // whoever went on with us had the terminal meanwhile
				r.again()
				r.changed()
			default:
				r.end(&coded{exitInterrupted, fmt.Errorf("interrupted: %v", s)})
			}
		}
	}
}

func (r *rawTerminal) changed() {
	select {
	case r.sized <- struct{}{}:
	default: // it is known
	}
}

// tell is apart from follow: whom it tells may be slow.
func (r *rawTerminal) tell(resized func(wire.TermSize)) {
	for {
		select {
		case <-r.done:
			return
		case <-r.sized:
			resized(*r.size())
		}
	}
}

func (r *rawTerminal) suspend() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back {
		return
	}
	term.Restore(r.fd, r.before)           // a terminal that is gone shows elsewhere
	unix.Kill(unix.Getpid(), unix.SIGSTOP) // ourselves: it cannot be refused
}

func (r *rawTerminal) again() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.back {
		term.MakeRaw(r.fd) // as above
	}
}

// restore gives the terminal back as it was. It may be called again, and of one that was not taken.
func (r *rawTerminal) restore() {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.back {
		return
	}
	r.back = true
	term.Restore(r.fd, r.before) // as above
	signal.Stop(r.signals)
	close(r.done)
}
