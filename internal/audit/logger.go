package audit

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oklog/ulid/v2"
	"tagout/internal/bootclock"
)

const (
	queueLen   = 16384                  // records that may wait for the disk; more are counted as lost
	retryEvery = 200 * time.Millisecond // while the disk refuses
	closeLimit = 3 * time.Second
	maxBatch   = 512 << 10 // bytes written with one write(2)
)

// file is what the logger needs of *os.File, so that tests can inject faults.
type file interface {
	io.Writer
	Sync() error
	Truncate(size int64) error
	Close() error
}

// Logger appends records to one file. Log may be called by any goroutine; one writer goroutine owns the
// file. Close ends the writer.
type Logger struct {
	instance, daemon string
	bootID           string
	redact           *redactor

	mu      sync.Mutex // guards entropy and the order of IDs in the queue
	entropy *ulid.MonotonicEntropy

	queue  chan Record
	syncs  chan chan error
	stop   chan struct{}
	done   chan struct{}
	closed atomic.Bool
	lost   atomic.Uint64         // records that did not get into the queue, not yet told in a gap record
	failed atomic.Pointer[error] // why the last write failed; nil where it did not
	busy   atomic.Int64          // CLOCK_BOOTTIME since when the disk has had a call, 0: it has none

	f    file  // writer goroutine only
	good int64 // writer goroutine only: length of the file up to the last whole record
}

// Open opens (or makes) the log at path for appending; the directory must exist. A last line that a crash
// tore is closed with a newline, so that the next record stands alone, and a gap record says so.
func Open(path, instance, daemon string) (*Logger, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o640)
	if err != nil {
		return nil, fmt.Errorf("opening the audit log: %w", err)
	}
	torn, size, err := closeTornLine(f)
	if err != nil {
		f.Close() // already failing
		return nil, fmt.Errorf("opening the audit log %s: %w", path, err)
	}
	l := newLogger(f, size, instance, daemon)
	if torn {
		l.Log(Record{Event: EventGap, Count: 1, Detail: "the last record before this one was cut off by a crash"})
	}
	return l, nil
}

func newLogger(f file, size int64, instance, daemon string) *Logger {
	boot, _ := bootclock.Boot() // "" where it is not known
	l := &Logger{
		instance: instance, daemon: daemon, bootID: boot, redact: newRedactor(),
		entropy: ulid.Monotonic(rand.Reader, 0),
		queue:   make(chan Record, queueLen), syncs: make(chan chan error),
		stop: make(chan struct{}), done: make(chan struct{}),
		f: f, good: size,
	}
	go l.write()
	return l
}

// Log queues r. It never waits for the disk: when the queue is full the record is counted as lost, and a
// gap record carries the count. After Close records are dropped. A record that has a Boot keeps it: the kernel said when
// it happened.
func (l *Logger) Log(r Record) {
	l.redact.record(&r)
	r.Version, r.Instance, r.Daemon, r.BootID = Version, l.instance, l.daemon, l.bootID
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		return
	}
	now, boot := time.Now().UTC(), bootclock.Now()
	if r.Boot <= 0 || r.Boot > boot {
		r.Boot = boot
	}
	r.Time = now.Add(r.Boot - boot)
	r.ID = l.newID(now)
	select {
	case l.queue <- r:
	default:
		l.lost.Add(1)
	}
}

// slow is how long the disk may take for one call before Err tells of it.
const slow = 250 * time.Millisecond

// Err is why the log takes no records at the moment: the last attempt to write failed and none has succeeded since,
// or the disk does not come back from a call. Records wait meanwhile, as Log says. It is nil where all is well.
func (l *Logger) Err() error {
	if p := l.failed.Load(); p != nil {
		return *p
	}
	if since := l.busy.Load(); since != 0 {
		if d := bootclock.Now() - time.Duration(since); d > slow {
			return fmt.Errorf("writing the audit log: the disk has not answered for %v", d.Round(time.Millisecond))
		}
	}
	return nil
}

// timed does a call to the disk and lets Err know how long it takes.
func (l *Logger) timed(call func() error) error {
	l.busy.Store(int64(bootclock.Now()))
	defer l.busy.Store(0)
	return call()
}

// AddSecret makes the logger replace value, and its usual encodings, in every record from now on.
func (l *Logger) AddSecret(value string) { l.redact.add(value) }

// Sync returns when everything logged before is on disk, or with ctx's error when the disk takes too long.
func (l *Logger) Sync(ctx context.Context) error {
	reply := make(chan error, 1)
	select {
	case l.syncs <- reply:
	case <-l.done:
		return errors.New("syncing the audit log: it is closed")
	case <-ctx.Done():
		return fmt.Errorf("syncing the audit log: %w", ctx.Err())
	}
	select {
	case err := <-reply:
		return err
	case <-ctx.Done():
		return fmt.Errorf("syncing the audit log: %w", ctx.Err())
	}
}

// Close writes what is queued, once, and closes the file. A disk that hangs is given up on after closeLimit.
func (l *Logger) Close() error {
	l.mu.Lock()
	again := l.closed.Swap(true)
	l.mu.Unlock()
	if again {
		return nil
	}
	close(l.stop)
	select {
	case <-l.done:
		return l.f.Close()
	case <-time.After(closeLimit):
		return errors.New("closing the audit log: the disk does not answer: its last records may be missing")
	}
}

func (l *Logger) newID(t time.Time) string {
	id, err := ulid.New(ulid.Timestamp(t), l.entropy)
	if err != nil { // the monotonic counter ran over: start a new one
		id = ulid.MustNew(ulid.Timestamp(t), rand.Reader)
	}
	return id.String()
}

// write is the writer goroutine: it takes what is queued, writes it with as few calls as it can and, while
// the disk refuses, tries again with the same bytes.
func (l *Logger) write() {
	defer close(l.done)
	var batch bytes.Buffer
	for {
		select {
		case r := <-l.queue:
			encode(&batch, r)
			l.drain(&batch)
			if !l.flush(&batch, l.stop) {
				return
			}
		case reply := <-l.syncs:
			if !l.writeAll(&batch) {
				reply <- errors.New("syncing the audit log: it was closed while the disk refused")
				return
			}
			reply <- l.timed(l.f.Sync)
		case <-l.stop:
			for more := true; more; more = len(l.queue) > 0 {
				l.drain(&batch)
				if l.appendOnce(&batch) != nil { // closing: one try is all there is
					break
				}
			}
			l.f.Sync() // as above
			return
		}
	}
}

// writeAll writes until nothing is queued; false means that the logger was closed meanwhile.
func (l *Logger) writeAll(batch *bytes.Buffer) bool {
	for more := true; more; more = len(l.queue) > 0 {
		l.drain(batch)
		if !l.flush(batch, l.stop) {
			return false
		}
	}
	return true
}

// drain adds what is queued, up to maxBatch, and then the gap that is known of.
func (l *Logger) drain(batch *bytes.Buffer) {
	for batch.Len() < maxBatch {
		select {
		case r := <-l.queue:
			encode(batch, r)
			continue
		default:
		}
		break
	}
	if n := l.lost.Swap(0); n > 0 {
		r := Record{Version: Version, Instance: l.instance, Daemon: l.daemon, BootID: l.bootID, Event: EventGap, Count: n,
			Time: time.Now().UTC(), Boot: bootclock.Now(), Detail: "records were lost because the disk did not keep up"}
		l.mu.Lock()
		r.ID = l.newID(r.Time)
		l.mu.Unlock()
		encode(batch, r)
	}
}

// flush writes batch, retrying until it is written or stop closes; false means stop closed.
func (l *Logger) flush(batch *bytes.Buffer, stop <-chan struct{}) bool {
	for {
		if err := l.appendOnce(batch); err == nil {
			return true
		}
		select {
		case <-stop:
			l.appendOnce(batch) // closing: one try is all there is
			return false
		case <-time.After(retryEvery):
		}
	}
}

// appendOnce writes batch whole or takes back the part of it that was written.
func (l *Logger) appendOnce(batch *bytes.Buffer) error {
	if batch.Len() == 0 {
		return nil
	}
	n := 0
	err := l.timed(func() (err error) { n, err = l.f.Write(batch.Bytes()); return err })
	if err != nil {
		if n > 0 {
			err = errors.Join(err, l.f.Truncate(l.good))
		}
		err = fmt.Errorf("writing the audit log: %w", err)
		l.failed.Store(&err)
		return err
	}
	l.failed.Store(nil)
	l.good += int64(n)
	batch.Reset()
	return nil
}

func encode(batch *bytes.Buffer, r Record) {
	whole := batch.Len()
	if err := json.NewEncoder(batch).Encode(&r); err != nil { // no field can fail to marshal; a record must not vanish all the same
		batch.Truncate(whole)
		fmt.Fprintf(batch, `{"v":%d,"id":%q,"event":%q,"detail":"record could not be encoded"}`+"\n", Version, r.ID, EventGap)
	}
}

func closeTornLine(f *os.File) (torn bool, size int64, err error) {
	size, err = f.Seek(0, io.SeekEnd)
	if err != nil || size == 0 {
		return false, size, err
	}
	last := make([]byte, 1)
	if _, err := f.ReadAt(last, size-1); err != nil {
		return false, size, err
	}
	if last[0] == '\n' {
		return false, size, nil
	}
	n, err := f.Write([]byte{'\n'})
	return true, size + int64(n), err
}
