package auditkeep

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"tagout/internal/alert"
	"tagout/internal/audit"
	"tagout/internal/bootclock"
)

// Witness is one receiver of checkpoints. Exactly one of File, URL and Syslog is set.
type Witness struct {
	Name    string
	File    string
	URL     string
	Key     string // of a witness with a URL that cosigns; empty: it takes a plain POST
	Syslog  string
	Timeout time.Duration // for one attempt
	Queue   int           // checkpoints that may wait; the oldest is dropped, counted and recorded
}

// offered is one checkpoint on its way.
type offered struct {
	daemon string
	note   []byte
}

// sender delivers one checkpoint. An error that wraps errRefused is final.
type sender interface {
	send(ctx context.Context, o offered) error
}

var errRefused = errors.New("it refuses the checkpoint")

// lane is the way to one witness: whatever becomes of it, the others' ways are free.
type lane struct {
	w    Witness
	send sender
	cfg  Config

	mu      sync.Mutex
	queue   []offered
	wake    chan struct{}
	dropped uint64 // not yet recorded
	failing string // why the last attempt failed, "" where it did not
}

func newLane(w Witness, cfg Config) (*lane, error) {
	l := &lane{w: w, cfg: cfg, wake: make(chan struct{}, 1)}
	var err error
	switch {
	case w.File != "":
		l.send = &fileWitness{path: w.File}
	case w.Syslog != "":
		l.send, err = newSyslogWitness(w)
	case w.Key != "":
		l.send, err = newCosigner(w, cfg.Dir)
	default:
		l.send = newPoster(w.URL)
	}
	return l, err
}

// offer gives every log's newest checkpoint to all witnesses, once.
func (k *Keeper) offer() {
	if len(k.lanes) == 0 {
		return
	}
	logs, err := k.logs()
	if err != nil {
		return // told by Tidy
	}
	for _, daemon := range logs {
		raw, err := k.read(daemon, audit.CheckpointFile)
		if err != nil || k.newest(daemon) == string(raw) {
			continue // there is none yet
		}
		k.setNewest(daemon, string(raw))
		for _, l := range k.lanes {
			l.add(offered{daemon, raw})
		}
	}
}

func (k *Keeper) newest(daemon string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.seen["checkpoint "+daemon]
}

func (k *Keeper) setNewest(daemon, signed string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.seen["checkpoint "+daemon] = signed
}

func (l *lane) add(o offered) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) >= max(1, l.w.Queue) {
		l.queue = l.queue[1:]
		l.dropped++
		l.cfg.Metrics.Witnessed(l.w.Name, "dropped")
	}
	l.queue = append(l.queue, o)
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// Pauses between attempts.
const (
	firstPause = 250 * time.Millisecond
	lastPause  = 30 * time.Second
)

// run delivers until ctx ends.
func (l *lane) run(ctx context.Context) {
	pause := firstPause
	var told time.Duration
	for ctx.Err() == nil {
		o, ok := l.first()
		if !ok {
			select {
			case <-ctx.Done():
			case <-l.wake:
			}
			continue
		}
		err := l.try(ctx, o)
		final := err == nil || errors.Is(err, errRefused)
		l.done(o, err, final)
		if now := bootclock.Now(); now-told > time.Minute || errors.Is(err, errRefused) {
			if l.tell(err) {
				told = now
			}
		}
		if final {
			pause = firstPause
			continue
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
		pause = min(2*pause, lastPause)
	}
}

func (l *lane) first() (offered, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return offered{}, false
	}
	return l.queue[0], true
}

// try gives an attempt its time. A call that does not come back, to a file on a dead server, is left behind: the next one
// waits for it.
func (l *lane) try(ctx context.Context, o offered) error {
	ctx, cancel := context.WithTimeout(ctx, l.w.Timeout)
	defer cancel()
	return l.send.send(ctx, o)
}

func (l *lane) done(o offered, err error, final bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	outcome := audit.OutcomeOK
	if err != nil {
		outcome = audit.OutcomeFail
	}
	l.cfg.Metrics.Witnessed(l.w.Name, outcome)
	if final && len(l.queue) > 0 && string(l.queue[0].note) == string(o.note) && l.queue[0].daemon == o.daemon {
		l.queue = l.queue[1:]
	}
}

// tell records what a witness missed or refused, and that it takes checkpoints again; it says whether there was anything.
func (l *lane) tell(err error) bool {
	l.mu.Lock()
	dropped, before := l.dropped, l.failing
	l.dropped, l.failing = 0, ""
	if err != nil {
		l.failing = err.Error()
	}
	l.mu.Unlock()
	if dropped == 0 && (err == nil) == (before == "") && !errors.Is(err, errRefused) {
		return false
	}
	r := audit.Record{Event: audit.EventWitness, Outcome: audit.OutcomeOK, Count: dropped, Detail: "the witness takes checkpoints again", Fields: map[string]string{"witness": l.w.Name}}
	if err != nil {
		r.Outcome, r.Detail = audit.OutcomeFail, "the witness did not take a checkpoint: "+err.Error()
	} else if dropped > 0 {
		r.Outcome, r.Detail = audit.OutcomeFail, "checkpoints were dropped because the witness was too slow; later ones cover the same records"
	}
	l.cfg.Audit.Log(r)
	return true
}

// fileWitness appends checkpoints to a file, elsewhere.
type fileWitness struct {
	path string
	mu   sync.Mutex
	busy bool // a call is still under way
}

func (f *fileWitness) send(ctx context.Context, o offered) error {
	f.mu.Lock()
	if f.busy {
		f.mu.Unlock()
		return fmt.Errorf("%s still does not answer", f.path)
	}
	f.busy = true
	f.mu.Unlock()
	ended := make(chan error, 1)
	go func() {
		err := f.append(o)
		f.mu.Lock()
		f.busy = false
		f.mu.Unlock()
		ended <- err
	}()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return fmt.Errorf("%s does not answer: %w", f.path, ctx.Err())
	}
}

func (f *fileWitness) append(o offered) error {
	line, err := json.Marshal(map[string]string{"time": time.Now().UTC().Format(time.RFC3339), "log": o.daemon, "note": string(o.note)})
	if err != nil {
		return err
	}
	file, err := os.OpenFile(f.path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(line, '\n'))
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// syslogWitness sends each checkpoint as one RFC 5424 message.
type syslogWitness struct{ to *alert.NoteSender }

func newSyslogWitness(w Witness) (sender, error) {
	to, err := alert.NewNoteSender(w.Syslog)
	return syslogWitness{to}, err
}

func (s syslogWitness) send(ctx context.Context, o offered) error {
	return s.to.SendNote(ctx, "checkpoint", o.daemon, o.note)
}
