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

// preparer is a file that wants to be asked before it is written to. The records that it returns are written next.
type preparer interface {
	Prepare() ([]Record, error)
}

// signer is a file whose syncs sign what was written, now and then: it says whether that is due.
type signer interface{ SignDue() bool }

// ender is a file whose last sync is another.
type ender interface{ End() error }

// Logger appends records to one log. Log may be called by any goroutine. One goroutine writes and another syncs, so that
// a slow sync holds nothing up. Close ends both.
type Logger struct {
	instance, daemon string
	bootID           string
	redact           *redactor
	now              func() time.Time
	scan             atomic.Pointer[func(string) string]              // nil: nothing more than redact does
	cardOf           atomic.Pointer[func(session, kid string) string] // nil: nobody knows

	mu      sync.Mutex // guards what follows
	taken   uint64     // records that were put into the queue
	waiting []waiter   // for a sync, in the order of their targets
	wall    time.Time  // of the last record
	boot    time.Duration

	queue  chan Record
	wake   chan struct{}
	stop   chan struct{}
	done   chan struct{}
	closed atomic.Bool
	lost   atomic.Uint64         // records that did not get into the queue, not yet told in a gap record
	failed atomic.Pointer[error] // why the last write failed; nil where it did not
	busy   atomic.Int64          // CLOCK_BOOTTIME since when the disk has had a write, 0: it has none
	late   atomic.Int64          // the same of a sync
	stats  counters

	jobs   chan []waiter // to the goroutine that syncs
	synced chan struct{} // it is done

	// Of the writer goroutine only.
	f        file
	good     int64 // length of the file up to the last whole record
	entropy  *ulid.MonotonicEntropy
	idTime   uint64 // of the last ID, in milliseconds
	encoded  uint64 // records that left the queue
	written  uint64 // of these, those in the file
	syncing  bool
	syncDue  bool // something was written since the last sync
	prepared bool
}

// waiter waits until so many records are on disk.
type waiter struct {
	target uint64
	reply  chan error // with room for one
}

// syncEvery is how often what nobody waits for is put on disk all the same, and checkpoints are made.
const syncEvery = time.Second

// Open opens (or makes) the log at path for appending; the directory must exist and holds no other log. A last line that
// a crash tore is closed with a newline, so that the next record stands alone, and a gap record says so.
func Open(path, instance, daemon string) (*Logger, error) {
	return OpenWith(path, instance, daemon, Options{})
}

// Options are for logs that are not as usual. The zero value is the usual.
type Options struct {
	ShardBytes int64            // how long a piece gets before another is begun; 0: 256 MiB
	Now        func() time.Time // wall clock; nil: the machine's
}

// OpenWith is Open with options.
func OpenWith(path, instance, daemon string, o Options) (*Logger, error) {
	s := newStore(path, instance, daemon)
	l := prepareLogger(s, 0, instance, daemon)
	s.encode = l.own
	if o.ShardBytes > 0 {
		s.shardBytes = o.ShardBytes
	}
	if o.Now != nil {
		s.now, l.now = o.Now, o.Now
	}
	notes, err := s.Prepare()
	if err != nil {
		return nil, err
	}
	for _, r := range notes {
		l.Log(r)
	}
	l.start()
	return l, nil
}

// OpenLate is Open for the daemon that must start even when its log cannot be opened (killswitchd): the log is opened at
// the first write and tried again until it opens; records wait in the queue meanwhile.
func OpenLate(path, instance, daemon string) *Logger {
	s := newStore(path, instance, daemon)
	l := prepareLogger(s, 0, instance, daemon)
	s.encode = l.own
	l.start()
	return l
}

func newStore(path, instance, daemon string) *store {
	return &store{path: path, instance: instance, daemon: daemon, shardBytes: shardBytes, now: time.Now}
}

func newLogger(f file, size int64, instance, daemon string) *Logger {
	l := prepareLogger(f, size, instance, daemon)
	l.start()
	return l
}

func prepareLogger(f file, size int64, instance, daemon string) *Logger {
	boot, _ := bootclock.Boot() // "" where it is not known
	return &Logger{
		instance: instance, daemon: daemon, bootID: boot, redact: newRedactor(), now: time.Now,
		entropy: ulid.Monotonic(rand.Reader, 0),
		queue:   make(chan Record, queueLen), wake: make(chan struct{}, 1),
		stop: make(chan struct{}), done: make(chan struct{}),
		jobs: make(chan []waiter, 1), synced: make(chan struct{}, 1),
		f: f, good: size,
	}
}

func (l *Logger) start() {
	go l.syncer()
	go l.write()
}

// Log queues r. It never waits for the disk: when the queue is full the record is counted as lost, and a
// gap record carries the count. After Close records are dropped. A record that has a Boot keeps it: the kernel said when
// it happened.
func (l *Logger) Log(r Record) { l.enqueue(r, nil) }

// LogDurable is Log for records that must not be lost: it returns when r is on disk, together with what others wait for
// at the same time, or with ctx's error. After an error the record may be there all the same.
func (l *Logger) LogDurable(ctx context.Context, r Record) error {
	w := &waiter{reply: make(chan error, 1)}
	if !l.enqueue(r, w) {
		return errors.New("recording: the audit log is closed, or has no room for more records")
	}
	return l.await(ctx, w)
}

// enqueue says whether the record is in the queue; w, where it is not nil, waits for it then.
func (l *Logger) enqueue(r Record, w *waiter) bool {
	l.redact.record(&r)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed.Load() {
		return false
	}
	l.stamp(&r)
	if !l.push(r) {
		return false
	}
	if w != nil {
		w.target = l.taken
		l.waiting = append(l.waiting, *w)
	}
	return true
}

// clockStep is by how much the wall clock and the boot clock may go apart between two records without a gap record.
const clockStep = 2 * time.Second

// stamp gives r its times. l.mu is held.
func (l *Logger) stamp(r *Record) {
	r.Version, r.Instance, r.Daemon, r.BootID = Version, l.instance, l.daemon, l.bootID
	now, boot := l.now().UTC().Round(0), bootclock.Now()
	if step := now.Sub(l.wall) - (boot - l.boot); l.boot != 0 && step.Abs() > clockStep {
		jump := gapOf("clock", 0, fmt.Sprintf("the wall clock was set by %v: order and length are told by boot_ns", step.Round(time.Millisecond)))
		jump.Version, jump.Instance, jump.Daemon, jump.BootID, jump.Time, jump.Boot = r.Version, r.Instance, r.Daemon, r.BootID, now, boot
		l.push(jump)
	}
	l.wall, l.boot = now, boot
	if r.Boot <= 0 || r.Boot > boot {
		r.Boot = boot
	}
	r.Time = now.Add(r.Boot - boot)
}

// push puts r into the queue, or counts it as lost. l.mu is held.
func (l *Logger) push(r Record) bool {
	select {
	case l.queue <- r:
		l.taken++
		return true
	default:
		l.lost.Add(1)
		l.stats.lost.Add(1)
		return false
	}
}

// slow is how long the disk may take for one write before Err tells of it, and slowSync how long for a sync, which
// waits for everybody's writes.
const (
	slow     = 250 * time.Millisecond
	slowSync = 10 * time.Second
)

// Err is why the log takes no records at the moment: the last attempt to write failed and none has succeeded since,
// or the disk does not come back from a call. Records wait meanwhile, as Log says. It is nil where all is well.
func (l *Logger) Err() error {
	if p := l.failed.Load(); p != nil {
		return *p
	}
	if err := hung(&l.busy, slow); err != nil {
		return err
	}
	return hung(&l.late, slowSync)
}

func hung(since *atomic.Int64, limit time.Duration) error {
	began := time.Duration(since.Load())
	if d := bootclock.Now() - began; began != 0 && d > limit {
		return fmt.Errorf("writing the audit log: the disk has not answered for %v", d.Round(time.Millisecond))
	}
	return nil
}

// timed does a call to the disk and lets Err know how long it takes.
func timed(since *atomic.Int64, call func() error) error {
	since.Store(int64(bootclock.Now()))
	defer since.Store(0)
	return call()
}

// AddSecret makes the logger replace value, and its usual encodings, in every record from now on.
func (l *Logger) AddSecret(value string) { l.redact.add(value) }

// DropSecret makes the logger forget a value that is worth nothing any more: it was revoked where it was issued.
func (l *Logger) DropSecret(value string) { l.redact.drop(value) }

// Sync returns when everything logged before is on disk, or with ctx's error when the disk takes too long. Many who wait
// at the same time have one fsync.
func (l *Logger) Sync(ctx context.Context) error {
	w := &waiter{reply: make(chan error, 1)}
	l.mu.Lock()
	closed := l.closed.Load()
	if !closed {
		w.target = l.taken
		l.waiting = append(l.waiting, *w)
	}
	l.mu.Unlock()
	if closed {
		return errors.New("syncing the audit log: it is closed")
	}
	return l.await(ctx, w)
}

func (l *Logger) await(ctx context.Context, w *waiter) error {
	select {
	case l.wake <- struct{}{}:
	default:
	}
	select {
	case err := <-w.reply:
		return err
	case <-ctx.Done():
		return fmt.Errorf("syncing the audit log: %w", ctx.Err())
	case <-l.done:
	}
	select { // it may have been the last thing that was done
	case err := <-w.reply:
		return err
	default:
		return errors.New("syncing the audit log: it was closed meanwhile")
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

// newID returns an ID that is greater than all before, whatever the clock does.
func (l *Logger) newID(t time.Time) string {
	l.idTime = max(l.idTime, ulid.Timestamp(t))
	id, err := ulid.New(l.idTime, l.entropy)
	if err != nil { // the monotonic counter ran over: go on with the next millisecond
		l.idTime++
		id = ulid.MustNew(l.idTime, l.entropy)
	}
	return id.String()
}

// own encodes a record of the logger's own, which takes no way through the queue. Only the writer goroutine calls it.
func (l *Logger) own(r Record) []byte {
	var b bytes.Buffer
	l.encodeOwn(&b, r)
	return b.Bytes()
}

func (l *Logger) encodeOwn(batch *bytes.Buffer, r Record) {
	r.Version, r.Instance, r.Daemon, r.BootID = Version, l.instance, l.daemon, l.bootID
	r.Time, r.Boot = l.now().UTC().Round(0), bootclock.Now()
	r.ID = l.newID(r.Time)
	encode(batch, r)
}

// write is the writer goroutine: it takes what is queued, writes it with as few calls as it can and, while
// the disk refuses, tries again with the same bytes.
func (l *Logger) write() {
	defer close(l.done)
	var batch bytes.Buffer
	tick := time.NewTicker(syncEvery)
	defer tick.Stop()
	for {
		select {
		case r := <-l.queue:
			l.prepare(&batch) // what fails here is tried again with the write
			l.encode(&batch, r)
			l.drain(&batch)
			if !l.flush(&batch, l.stop) {
				l.end(&batch)
				return
			}
		case <-l.wake:
		case <-l.synced:
			l.syncing = false
		case <-tick.C:
			s, ok := l.f.(signer)
			l.startSync(l.syncDue || ok && s.SignDue())
		case <-l.stop:
			l.end(&batch)
			return
		}
		l.startSync(false)
	}
}

// prepare asks the file whether it can be written to.
func (l *Logger) prepare(batch *bytes.Buffer) error {
	p, ok := l.f.(preparer)
	if !ok {
		return nil
	}
	var notes []Record
	err := timed(&l.busy, func() (err error) { notes, err = p.Prepare(); return err })
	l.prepared = err == nil
	for _, r := range notes {
		l.encodeOwn(batch, r)
	}
	return err
}

func (l *Logger) encode(batch *bytes.Buffer, r Record) {
	r.ID = l.newID(r.Time)
	l.finish(&r)
	encode(batch, r)
	l.encoded++
}

// startSync has the syncs done that are waited for, in one, or one that is due anyway. While one is under way the next
// gathers.
func (l *Logger) startSync(due bool) {
	if l.syncing {
		return
	}
	l.mu.Lock()
	n := 0
	for n < len(l.waiting) && l.waiting[n].target <= l.written {
		n++
	}
	ready := l.waiting[:n:n]
	if l.waiting = l.waiting[n:]; len(l.waiting) == 0 {
		l.waiting = nil
	}
	l.mu.Unlock()
	if n == 0 && !due {
		return
	}
	l.syncing, l.syncDue = true, false
	l.jobs <- ready // there is room: none is under way
}

// syncer is the goroutine that waits for the disk.
func (l *Logger) syncer() {
	for {
		select {
		case waiters := <-l.jobs:
			answer(waiters, l.syncOnce(l.f.Sync))
			l.synced <- struct{}{} // there is room: it is taken before the next job
		case <-l.done:
			return
		}
	}
}

func (l *Logger) syncOnce(sync func() error) error {
	l.stats.syncs.Add(1)
	return timed(&l.late, sync)
}

func answer(waiters []waiter, err error) {
	for _, w := range waiters {
		w.reply <- err
	}
}

// end writes what is queued, once: closing, one try is all there is.
func (l *Logger) end(batch *bytes.Buffer) {
	for more := true; more; more = len(l.queue) > 0 {
		l.drain(batch)
		if l.appendOnce(batch) != nil {
			break
		}
	}
	if l.syncing {
		<-l.synced
	}
	sync := l.f.Sync
	if e, ok := l.f.(ender); ok {
		sync = e.End
	}
	err := l.syncOnce(sync)
	l.mu.Lock()
	waiting := l.waiting
	l.waiting = nil
	l.mu.Unlock()
	for _, w := range waiting {
		if err == nil && w.target > l.written {
			err = errors.New("syncing the audit log: it was closed while the disk refused")
		}
		w.reply <- err
	}
}

// drain adds what is queued, up to maxBatch, and then the gap that is known of.
func (l *Logger) drain(batch *bytes.Buffer) {
	for batch.Len() < maxBatch {
		select {
		case r := <-l.queue:
			l.encode(batch, r)
			continue
		default:
		}
		break
	}
	if n := l.lost.Swap(0); n > 0 {
		l.encodeOwn(batch, Record{Event: EventGap, Count: n, Detail: "records were lost because the disk did not keep up"})
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
	var err error
	if !l.prepared {
		err = l.prepare(batch)
	}
	if err == nil {
		err = timed(&l.busy, func() (err error) { n, err = l.f.Write(batch.Bytes()); return err })
	}
	l.prepared = false
	if err != nil {
		if n > 0 {
			err = errors.Join(err, l.f.Truncate(l.good))
		}
		err = fmt.Errorf("writing the audit log: %w", err)
		l.failed.Store(&err)
		return err
	}
	l.failed.Store(nil)
	l.stats.bytes.Add(uint64(n))
	l.stats.records.Add(l.encoded - l.written)
	l.good += int64(n)
	l.written, l.syncDue = l.encoded, true
	batch.Reset()
	return nil
}

// counters are of this process.
type counters struct{ records, lost, syncs, bytes atomic.Uint64 }

// Stats is what a logger did since it was opened.
type Stats struct {
	Records, Bytes uint64 // written
	Lost           uint64 // that found no room in the queue
	Syncs          uint64 // fsyncs, each for all who waited
}

// Stats may be called by any goroutine.
func (l *Logger) Stats() Stats {
	c := &l.stats
	return Stats{Records: c.records.Load(), Bytes: c.bytes.Load(), Lost: c.lost.Load(), Syncs: c.syncs.Load()}
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
