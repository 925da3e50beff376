package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"tagout/internal/execsocket"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// Times of somebody who leaves a command.
const (
	settleLimit = time.Second     // for what was typed before to arrive
	leaveLimit  = 5 * time.Second // for sandboxd to let them go
)

// typedAhead is how many reads of a terminal, of 4 KiB at most, may wait to be sent: the keys that leave are found behind
// them.
const typedAhead = 4096

// talk is a command that gets its input from here.
type talk struct {
	kid   string
	route string
	first *wire.ExecRequest // what to run; nil: it runs
	raw   *terminal         // what is typed goes to the command, each key; nil: standard input does, to its end
	keys  detachKeys

	socket *execsocket.Client
	id     string
	taken  *rawTerminal // raw, once the command runs
	exit   *wire.ExecExit
}

// talk passes input and output on until the command has ended. The error carries the command's own exit code.
func (a *app) talk(ctx context.Context, t talk) error {
	inst, err := a.open()
	if err != nil {
		return err
	}
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	if t.socket, err = execsocket.Dial(ctx, inst.Socket(instance.Sandboxd), t.route); err != nil {
		return unanswered(inst, instance.Sandboxd, err)
	}
	defer t.socket.Close()
	if t.first != nil {
		if err := t.socket.Start(*t.first); err != nil {
			return err
		}
	}
	err = t.listen(ctx, a, end)
	t.taken.restore() // before anything is told
	err = t.over(ctx, a, err)
	if t.taken != nil && err != nil && err.Error() != "" {
		fmt.Fprintln(a.err) // what the command wrote last may be no whole line
	}
	return err
}

// listen passes frames on until there are no more.
func (t *talk) listen(ctx context.Context, a *app, end context.CancelCauseFunc) error {
	defer func() { t.taken.restore() }() // whatever goes wrong
	return t.socket.Each(func(line json.RawMessage, f wire.ExecFrame) error {
		if f.ID != "" && t.id == "" { // it was not refused
			t.id = f.ID
			if err := t.begin(ctx, a.in, end); err != nil {
				return err
			}
		}
		if f.Exit != nil {
			t.exit = f.Exit
			t.taken.restore()
		}
		return a.frame(ctx, line, f)
	})
}

// over says what the end of listen means.
func (t *talk) over(ctx context.Context, a *app, err error) error {
	back := fmt.Sprintf("`tagout attach %s %s`", t.kid, t.id)
	if a.instance != instance.DefaultName {
		back = fmt.Sprintf("`tagout attach --instance %s %s %s`", a.instance, t.kid, t.id)
	}
	switch {
	case err == nil:
		return exitOf(*t.exit)
	case errors.Is(err, execsocket.ErrLeft):
		fmt.Fprintf(a.err, "\ntagout: the command goes on: %s goes back to it\n", back) // nobody is left to be told
		return nil
	case errors.Is(err, execsocket.ErrCut) && t.first == nil:
		return fmt.Errorf("the connection to sandboxd ended before the command did: where `tagout execs %s` shows that it goes on, %s goes back to it", t.kid, back)
	case errors.Is(err, execsocket.ErrCut):
		return errors.New("the connection to sandboxd ended before the command did: see `tagout list`")
	case ctx.Err() != nil && errors.Is(context.Cause(ctx), context.Canceled):
		return &coded{exitInterrupted, errors.New("interrupted")}
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return err
}

// begin starts to send input.
func (t *talk) begin(ctx context.Context, in io.Reader, end context.CancelCauseFunc) (err error) {
	if t.raw != nil {
		resized := func(size wire.TermSize) { t.socket.Resize(size) } // a connection that is gone shows elsewhere
		if t.taken, err = t.raw.take(resized, end); err != nil {
			return err
		}
	}
	if t.raw != nil || t.first == nil || t.first.Input {
		go t.send(ctx, in, end)
	}
	return nil
}

// send passes input on until it ends, somebody leaves, or nobody listens any more, which shows elsewhere.
func (t *talk) send(ctx context.Context, in io.Reader, end context.CancelCauseFunc) {
	pieces, sent := t.sender()
	buf := make([]byte, 32<<10)
	for {
		n, err := in.Read(buf)
		data, leaves, within := buf[:n], false, ctx
		if t.raw != nil {
			if data, leaves = t.keys.scan(data); leaves {
				var cancel context.CancelFunc
				within, cancel = context.WithTimeout(ctx, settleLimit)
				defer cancel()
			}
		}
		if len(data) > 0 {
			select {
			case pieces <- bytes.Clone(data): // no larger than it is
			case <-sent:
				return
			case <-within.Done(): // the command does not read
			}
		}
		switch {
		case leaves:
			close(pieces)
			t.leave(ctx, within, sent, end)
			return
		case errors.Is(err, io.EOF):
			close(pieces)
			<-sent
			t.socket.EndInput() // as above
			return
		case err != nil:
			end(fmt.Errorf("reading standard input: %w", err))
			return
		}
	}
}

// sender sends pieces until they are closed, or cannot be sent; sent is closed then.
func (t *talk) sender() (pieces chan<- []byte, sent <-chan struct{}) {
	ahead := 0
	if t.raw != nil {
		ahead = typedAhead
	}
	in, over := make(chan []byte, ahead), make(chan struct{})
	go func() {
		defer close(over)
		for p := range in {
			if _, err := t.socket.Write(p); err != nil {
				return
			}
		}
	}()
	return in, over
}

// leave asks to let the command run on, once what was typed before has arrived or within has ended.
func (t *talk) leave(ctx, within context.Context, sent <-chan struct{}, end context.CancelCauseFunc) {
	select {
	case <-sent:
		t.socket.Settle(within) // what the command does not read it does not get
	case <-within.Done(): // as above
	}
	late := time.AfterFunc(leaveLimit, func() {
		end(&coded{exitUnreachable, errors.New("sandboxd does not answer: whether the command goes on shows in `tagout execs`")})
	})
	context.AfterFunc(ctx, func() { late.Stop() })
	t.socket.Detach() // a connection that is gone shows elsewhere
}
