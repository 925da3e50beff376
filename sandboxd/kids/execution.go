package kids

import (
	"context"
	"errors"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/outlog"
	"tagout/sandboxd/runtime"
)

// Bounds. What is above is refused and not queued: whoever asks can come back.
const (
	maxExecs     = 256     // commands of one kid at a time
	maxBoxExecs  = 1024    // and of all
	keptExecs    = 32      // detached commands of one kid that have ended
	keptOutput   = 1 << 20 // bytes of a detached command's output
	pendingInput = 1       // pieces that wait for a command to read
)

// execution is one command of a kid.
type execution struct {
	id    string
	k     *kid
	began time.Time
	argv  []string // as it is shown
	actor string
	tty   bool

	timeout time.Duration // 0: none
	due     time.Duration // when it is over, on the boot clock; 0: never

	input chan wire.ExecInput // what follows ExecRequest.Stdin; nil: nothing
	fed   chan struct{}       // closed when the command gets no more input

	ctx      context.Context // its end ends the command; the cause says why
	cancel   context.CancelCauseFunc
	out      *stream
	detached chan struct{} // closed when nobody's going away ends it any more
	adopted  time.Time     // when this sandboxd took it over from another; zero: it is its own
	loss     string        // what of its output that cost; may be empty
	done     chan struct{} // closed when it has ended

	// Guarded by Manager.mu.
	size    *wire.TermSize // of its terminal, where it changed before the command had started
	free    bool           // detached is closed
	log     *outlog.Log
	run     *runtime.Running // nil: it has not started
	exit    *wire.ExecExit   // nil: it has not ended
	ended   time.Time
	lingers bool // what it left running holds its cgroup
	handed  bool // it has got all the input that came with its request
	over    bool // its input has ended

	storing   sync.Mutex // held while the store is told of the command
	kept      bool       // written with storing and Manager.mu held, read with one of them; the store has its descriptors
	keptInput bool       // guarded by storing; that of its input too
	unkept    bool       // guarded by storing; a record says that it has not
}

// endedBy is the cause of a command's end that somebody asked for.
type endedBy struct{ actor, why string }

func (e *endedBy) Error() string {
	if e.why == "" {
		return "ended by " + e.actor
	}
	return "ended by " + e.actor + ": " + e.why
}

// errGone is the cause where whoever asked for the command went away.
var errGone = errors.New("whoever asked for it went away")

// Exec runs a command in the kid and sends its output, byte for byte: first a frame with its id, at the end exactly one
// that says how it ended. An error means that nothing was started and nothing was sent. send is called by one
// goroutine at a time; when it fails, or ctx ends, the command and all that it started are killed. What a command
// leaves running in the background when it ends by itself goes on.
//
// A detached command is on its way when Exec returns, after the first frame.
func (m *Manager) Exec(ctx context.Context, name, actor string, r wire.ExecRequest, send func(wire.ExecFrame) error) error {
	return m.ExecInput(ctx, name, actor, r, nil, send)
}

// ExecInput is Exec for a caller who goes on sending Stdin and EOF. A piece is received when there is room for it; what
// arrives after the command's end, or after EOF, is dropped. See also ResizeExec and DetachExec.
func (m *Manager) ExecInput(ctx context.Context, name, actor string, r wire.ExecRequest, input <-chan wire.ExecInput, send func(wire.ExecFrame) error) error {
	if r.Shell != "" && len(r.Argv) == 0 {
		r.Argv = []string{"/bin/sh", "-c", r.Shell}
	} else if r.Shell != "" {
		return m.execRefused(name, actor, r, refuse(Invalid, reason.Malformed, "both a command and a line for the shell were given: leave out one"))
	}
	k, err := m.admitExec(ctx, name, r)
	if ReasonOf(err) == reason.LooksLikeKey && err != nil {
		r = wire.ExecRequest{Argv: []string{"(left out)"}} // the record says why
	}
	if err != nil {
		return m.execRefused(name, actor, r, err)
	}
	e, err := m.register(k, actor, r)
	if err != nil {
		return m.execRefused(name, actor, r, err)
	}
	e.out = &stream{send: send, failed: func() { m.leave(e) }}
	e.out.frame(wire.ExecFrame{ID: e.id})
	if r.Detach {
		m.detach(e)
	}
	gone := context.AfterFunc(ctx, func() { m.leave(e) })
	defer gone()
	go m.conduct(e, r)
	return m.accompany(ctx, e, input)
}

// execRefused records and returns why there is no command.
func (m *Manager) execRefused(name, actor string, r wire.ExecRequest, err error) error {
	m.cfg.Audit.Log(audit.Record{Event: audit.EventExecEnded, Kid: name, Actor: actor, Outcome: audit.OutcomeDeny,
		Reason: ReasonOf(err), Detail: err.Error(), Fields: execFields(r, nil)})
	return err
}

// register makes the command one of the kid's, and leaves a record of it for a successor.
func (m *Manager) register(k *kid, actor string, r wire.ExecRequest) (*execution, error) {
	e := &execution{
		id: strings.ToLower(ulid.Make().String()), k: k, began: time.Now(), argv: shown(r.Argv), actor: actor, tty: r.TTY != nil,
		fed: make(chan struct{}), detached: make(chan struct{}), done: make(chan struct{}),
	}
	e.ctx, e.cancel = context.WithCancelCause(context.Background())
	if r.Timeout > 0 {
		e.timeout, e.due = r.Timeout, bootclock.Now()+r.Timeout
	}
	if r.Input {
		e.input = make(chan wire.ExecInput, pendingInput)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	all := 0
	for _, other := range m.kids {
		all += other.running()
	}
	switch {
	case k.running() >= maxExecs:
		return nil, refuse(Capacity, reason.Capacity, "%d commands run in kid %s already: wait for one to end", maxExecs, k.name)
	case all >= maxBoxExecs:
		return nil, refuse(Capacity, reason.Capacity, "%d commands run in the kids of this box already: wait for one to end", maxBoxExecs)
	}
	if m.kids[k.name] != k {
		return nil, notFound(k.name)
	}
	if err := m.newRecord(e); err != nil {
		return nil, err
	}
	m.show(e)
	return e, nil
}

// running counts the commands that have not ended. Call it with Manager.mu held.
func (k *kid) running() int {
	n := 0
	for _, e := range k.execs {
		if e.exit == nil {
			n++
		}
	}
	return n
}

// shown is as much of a command as is kept for people.
func shown(argv []string) []string {
	const words, bytes = 64, 512
	var out []string
	left := bytes
	for i, a := range argv {
		if i == words || len(a) > left {
			return append(out, audit.WithoutLastWord(a[:min(left, len(a))]))
		}
		out = append(out, a)
		left -= len(a)
	}
	return out
}

// conduct runs the command from its start to its end, whoever listens.
func (m *Manager) conduct(e *execution, r wire.ExecRequest) {
	defer e.cancel(nil)
	k := e.k
	m.touch(k)
	defer m.touch(k)
	fields := execFields(r, nil)
	fields["exec"] = e.id
	m.log(k, audit.Record{Event: audit.EventExecStarted, Actor: e.actor, Outcome: audit.OutcomeOK, Fields: fields})
	exit := m.runCommand(e.ctx, e, r)
	m.conclude(e, r, &exit)
}

// conclude records and tells how a command has ended.
func (m *Manager) conclude(e *execution, r wire.ExecRequest, exit *wire.ExecExit) {
	outcome := audit.OutcomeOK
	if exit.Result != resultExited {
		outcome = audit.OutcomeFail
	}
	fields := execFields(r, exit)
	fields["exec"] = e.id
	m.log(e.k, audit.Record{Event: audit.EventExecEnded, Actor: e.actor, Outcome: outcome, Detail: exit.Detail, Fields: fields})
	m.cfg.Metrics.ExecEnded(exit.Result, time.Since(e.began))
	m.noteEnded(e, exit)
}

// leave ends the command when its caller has gone, unless it is detached.
func (m *Manager) leave(e *execution) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !e.free {
		e.cancel(errGone)
	}
}

// accompany passes the caller's input on until the command has ended or is detached.
func (m *Manager) accompany(ctx context.Context, e *execution, input <-chan wire.ExecInput) error {
	for {
		select {
		case <-e.done:
			return nil
		case <-e.detached:
			return nil
		case in, ok := <-input:
			if !ok {
				input = nil // the caller goes on listening, or ctx ends
				continue
			}
			e.pass(ctx, e.detached, in) // what the command had no room for when its caller detaches is dropped
		}
	}
}

// pass gives one piece of input to the command. It waits until there is room for it, or until nobody needs it any more.
func (e *execution) pass(ctx context.Context, enough <-chan struct{}, in wire.ExecInput) {
	if e.input == nil {
		return
	}
	select {
	case e.input <- in:
	case <-enough:
	case <-e.fed:
	case <-e.done:
	case <-ctx.Done():
	}
}

// detach lets the command run on without its caller; from here on its output is kept.
func (m *Manager) detach(e *execution) {
	m.mu.Lock()
	if e.free {
		m.mu.Unlock()
		return
	}
	log, err := outlog.Create(filepath.Join(m.execDir(e), outputName), keptOutput)
	if err != nil {
		m.cfg.Log.Error("keeping a detached command's output; it is dropped", "kid", e.k.name, "command", e.id, "error", err)
	}
	e.free, e.log = true, log
	if err := m.putRecord(e); err != nil {
		m.cfg.Log.Error("noting that a command is detached", "kid", e.k.name, "command", e.id, "error", err)
	}
	m.mu.Unlock()
	m.keepOutput(e, log)
	close(e.detached)
	go m.shelter(e)
}

// keepOutput makes the command's output go into its log, nil where there is none.
func (m *Manager) keepOutput(e *execution, log *outlog.Log) {
	e.out.keep(log, func(err error) {
		m.cfg.Log.Error("keeping a detached command's output; what follows is dropped", "kid", e.k.name, "command", e.id, "error", err)
	})
}

// feed gives the command its input and then the end of it. A command that does not read, or has ended, ends the
// feeding when run is closed.
func (m *Manager) feed(e *execution, run *runtime.Running, r wire.ExecRequest) {
	defer close(e.fed)
	if len(r.Stdin) > 0 {
		run.Write(r.Stdin) // the command need not read its input
	}
	if e.input == nil {
		run.EndInput() // as above
	}
	m.handedOver(e)
	for e.input != nil {
		select {
		case <-e.done:
			return
		case in := <-e.input:
			if in.EOF {
				m.inputOver(e)
				run.EndInput() // as above
				return
			}
			run.Write(in.Stdin) // as above
		}
	}
}

// noteStarted notes what the kernel knows of the command.
func (m *Manager) noteStarted(e *execution, run *runtime.Running) {
	m.mu.Lock()
	defer m.mu.Unlock()
	e.run = run
	if e.size != nil {
		run.Resize(e.size.Rows, e.size.Cols) // one that has ended has no size
	}
	if err := m.putRecord(e); err != nil {
		m.cfg.Log.Error("noting that a command has started", "kid", e.k.name, "command", e.id, "error", err)
	}
}

// noteEnded tells everybody who listens how the command has ended.
func (m *Manager) noteEnded(e *execution, exit *wire.ExecExit) {
	m.mu.Lock()
	e.exit, e.ended = exit, time.Now()
	free, log := e.free, e.log
	if free {
		m.forgetOldest(e.k)
	} else {
		delete(e.k.execs, e.id)
	}
	if free || e.lingers {
		if err := m.putRecord(e); err != nil {
			m.cfg.Log.Error("noting that a command has ended", "kid", e.k.name, "command", e.id, "error", err)
		}
	} else {
		m.dropRecord(e)
	}
	if m.kids[e.k.name] != e.k && log != nil {
		defer log.Close() // its kid has gone, and nobody can ask for it
	}
	m.mu.Unlock()
	if log != nil {
		log.End()
	}
	if !free {
		e.out.frame(wire.ExecFrame{Exit: exit})
	}
	close(e.done)
	m.shelter(e)
}

// forgetOldest keeps the number of commands that have ended within its bound. Call it with mu held.
func (m *Manager) forgetOldest(k *kid) {
	for {
		var oldest *execution
		n := 0
		for _, e := range k.execs {
			if e.exit == nil {
				continue
			}
			n++
			if oldest == nil || e.ended.Before(oldest.ended) {
				oldest = e
			}
		}
		if n <= keptExecs {
			return
		}
		m.forgetExec(oldest)
	}
}

// forgetExec removes what is kept of a command that has ended. Call it with mu held.
func (m *Manager) forgetExec(e *execution) {
	delete(e.k.execs, e.id)
	if e.log != nil {
		e.log.Close() // whoever reads it is told
	}
	if !e.lingers {
		m.dropRecord(e)
	}
}

// forgetExecs gives up what is held for a kid's commands. Call it with mu held.
func (m *Manager) forgetExecs(k *kid) {
	for _, e := range k.execs {
		if e.log != nil && e.exit != nil {
			e.log.Close() // whoever reads it is told
		}
	}
}

func (e *execution) view() wire.Exec {
	return wire.Exec{
		ID: e.id, Argv: e.argv, Actor: e.actor, Started: e.began.UTC(), Detached: e.free, TTY: e.tty, Exit: e.exit, Ended: e.ended.UTC(),
		Adopted: e.adopted.UTC(), Outlives: e.free && e.kept && e.exit == nil,
	}
}

func noExec(kid, id string) error {
	return refuse(NotFound, reason.OK, "there is no command %s in kid %s: `tagout execs %s` shows those that there are", id, kid, kid)
}

func terminal(t *wire.TermSize) *runtime.Size {
	if t == nil {
		return nil
	}
	return &runtime.Size{Rows: t.Rows, Cols: t.Cols}
}
