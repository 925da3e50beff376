package audit

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/sys/unix"

	"tagout/internal/bootclock"
)

// shardBytes is how long a shard may get before another is begun; one is begun each day (UTC) in any case.
const shardBytes = 256 << 20

// store is a daemon's log on disk: the live file, the closed shards, the tree and its checkpoints. It holds its
// directory open, so that what is mounted over it later leaves it alone. Write and Prepare belong to one goroutine, Sync
// to another; mu is for what they share.
type store struct {
	path, instance, daemon string
	shardBytes             int64
	encode                 func(Record) []byte // a line of the logger's own
	now                    func() time.Time    // wall clock

	root *os.Root // nil: nothing is open
	lock *os.File

	mu      sync.Mutex
	live    *os.File // nil: none could be made yet
	size    int64    // of what was written whole
	spoilt  bool     // behind size are bytes of a write that failed
	first   uint64   // sequence number of the live file's first record
	known   bool     // first is known, of the live file or of the one before it
	day     string   // UTC, on which the live file was begun
	tree    tree
	hashes  *os.File
	signer  note.Signer
	old     []*os.File // closed shards that are not known to be on disk
	renamed bool       // the directories are not known to be on disk
	distrst bool       // a sync failed: what the kernel had not written may be lost
	notes   []Record   // to be recorded next
	gone    uint64     // records of a directory that was removed

	signed   uint64        // records that the newest checkpoint covers
	signedAt time.Duration // CLOCK_BOOTTIME
}

func (s *store) name() string { return filepath.Base(s.path) }

func (s *store) note(r Record) { s.notes = append(s.notes, r) }

// gapOf is a gap record that is not about records that found no place.
func gapOf(cause string, lost uint64, detail string) Record {
	return Record{Event: EventGap, Count: lost, Detail: detail, Fields: map[string]string{FieldCause: cause}}
}

// Prepare makes sure that the next Write goes where it should: it opens what is not open, repairs what somebody else
// did to the live file, and begins another shard when it is time. The records that it returns are to be written.
func (s *store) Prepare() ([]Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.root == nil {
		if err := s.restart(); err != nil {
			return nil, fmt.Errorf("opening the audit log %s: %w", s.path, err)
		}
	}
	if err := s.check(); err != nil {
		return nil, fmt.Errorf("going on with the audit log %s: %w", s.path, err)
	}
	if err := s.tree.keep(s.hashes); err != nil {
		return nil, err
	}
	if s.size > 0 && (s.size >= s.shardBytes || s.day != s.today()) {
		if err := s.rotate(); err != nil {
			return nil, fmt.Errorf("beginning another piece of the audit log %s: %w", s.path, err)
		}
	}
	notes := s.notes
	s.notes = nil
	return notes, nil
}

func (s *store) today() string { return s.now().UTC().Format(time.DateOnly) }

// open takes the log's lock and finds out where it stands.
func (s *store) open() error {
	root, err := os.OpenRoot(filepath.Dir(s.path))
	if err != nil {
		return err
	}
	s.root = root
	for _, dir := range []string{TreeDir, shardsDir} {
		if err := root.Mkdir(dir, 0o750); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if s.lock, err = root.OpenFile(lockFile, os.O_CREATE|os.O_RDWR, 0o640); err != nil {
		return err
	}
	if err := takeLock(s.lock); err != nil {
		return err
	}
	if s.hashes, err = root.OpenFile(HashFile, os.O_CREATE|os.O_RDWR, 0o640); err != nil {
		return err
	}
	if err := s.openKey(); err != nil {
		return err
	}
	return s.recover()
}

// lockPatience is how long a lock may outlive its holder: a program that it was just starting has a copy of the
// descriptor until its execve.
const lockPatience = time.Second

func takeLock(f *os.File) error {
	for begun := bootclock.Now(); ; time.Sleep(5 * time.Millisecond) { // nobody is told when a lock is free
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case !errors.Is(err, unix.EWOULDBLOCK):
			return err
		case bootclock.Now()-begun > lockPatience:
			return errors.New("another process writes it")
		}
	}
}

// close lets everything go; what is not on disk stays where it is.
func (s *store) close() {
	for _, f := range append([]*os.File{s.live, s.hashes, s.lock}, s.old...) {
		if f != nil {
			f.Close() // what had to be on disk was synced
		}
	}
	if s.root != nil {
		s.root.Close() // only read
	}
	s.root, s.live, s.hashes, s.lock, s.old, s.tree, s.notes, s.known = nil, nil, nil, nil, nil, tree{}, nil, false
}

// Write appends whole lines, or nothing.
func (s *store) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.root == nil || s.live == nil {
		return 0, errors.New("it is not open")
	}
	if n, err := s.live.Write(p); err != nil {
		s.spoilt = n > 0
		s.mend() // tried again before the next one
		return 0, err
	}
	s.size += int64(len(p))
	s.grow(p)
	s.tree.keep(s.hashes) // what the disk does not take now is tried again before the next write
	return len(p), nil
}

// grow adds whole lines to the tree.
func (s *store) grow(lines []byte) {
	for begin := 0; begin < len(lines); {
		end := begin
		for lines[end] != '\n' {
			end++
		}
		s.tree.addLine(lines[begin:end])
		begin = end + 1
	}
}

// mend takes back what a failed write left.
func (s *store) mend() error {
	if !s.spoilt {
		return nil
	}
	if err := s.live.Truncate(s.size); err != nil {
		return err
	}
	s.spoilt = false
	return nil
}

// check finds out whether the live file is still the one that is written to, and whole; if not it goes on in another,
// saves what can be saved and says so.
func (s *store) check() error {
	if s.live == nil {
		return s.begin()
	}
	if err := s.mend(); err != nil {
		return err
	}
	ours, err := s.live.Stat()
	if err != nil {
		return err
	}
	there, err := s.root.Lstat(s.name())
	switch {
	case errors.Is(err, fs.ErrNotExist) && s.orphaned():
		return s.restart()
	case errors.Is(err, fs.ErrNotExist):
		return s.rescue("the live file of this log was removed")
	case err != nil:
		return err
	case !os.SameFile(ours, there):
		aside := s.name() + ".foreign-" + s.now().UTC().Format(shardTime)
		if err := s.root.Rename(s.name(), aside); err != nil {
			return err
		}
		return s.rescue("the live file of this log was replaced by another, which is kept as " + aside)
	case ours.Size() < s.size:
		return s.wasCut(ours.Size())
	case ours.Size() > s.size:
		s.note(gapOf("foreign", 0, fmt.Sprintf("somebody else wrote %d bytes into the live file of this log: they are not in its tree", ours.Size()-s.size)))
		return s.rotate()
	case s.distrst:
		s.distrst = false
		s.note(gapOf("disk", 0, fmt.Sprintf("the disk did not keep what was written: records before number %d may be missing after a crash", s.tree.n)))
		return s.rotate()
	}
	return nil
}

// orphaned says whether the log's directory has no name any more.
func (s *store) orphaned() bool {
	info, err := s.root.Stat(".")
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && st.Nlink == 0
}

// restart begins a new log where the directory of this one was removed and there is one again.
func (s *store) restart() error {
	gone := s.gone + s.tree.n
	s.close()
	s.gone = gone
	if err := s.open(); err != nil {
		s.close()
		return err
	}
	if s.gone > 0 {
		s.note(gapOf("removed", s.gone, "the directory of this log was removed, and all records in it: a new log begins"))
		s.gone = 0
	}
	return nil
}

// wasCut goes on in another file behind one that somebody else made shorter.
func (s *store) wasCut(size int64) error {
	left, err := countWhole(s.live)
	if err != nil {
		return err
	}
	from, to := s.first+left, s.tree.n
	s.note(lostRecords("cut", from, to, fmt.Sprintf("the live file of this log was cut to %d bytes", size)))
	return s.rotate()
}

// lostRecords is the gap record of records that were written and are gone.
func lostRecords(cause string, from, to uint64, detail string) Record {
	r := gapOf(cause, to-from, detail)
	r.Fields[FieldFrom], r.Fields[FieldTo] = fmt.Sprint(from), fmt.Sprint(to)
	return r
}

// rescue copies the live file, which has no name any more, to where it would have gone, and goes on in another.
func (s *store) rescue(what string) error {
	name := s.closedName()
	f, err := s.root.OpenFile(name+".new", os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	err = copyBytes(f, s.live, s.size)
	if err == nil {
		err = f.Sync()
	}
	if err == nil {
		err = s.root.Rename(name+".new", name)
	}
	if err != nil {
		f.Close() // already failing
		return err
	}
	s.old = append(s.old, s.live, f)
	s.live = nil
	s.note(gapOf("removed", 0, fmt.Sprintf("%s: its %d records were saved as %s", what, s.tree.n-s.first, filepath.Base(name))))
	return s.begin()
}

func (s *store) closedName() string {
	return filepath.Join(shardsDir, fmt.Sprintf("%012d-%s.jsonl", s.first, s.now().UTC().Format(shardTime)))
}

// rotate closes the live file and goes on in another.
func (s *store) rotate() error {
	next, size, err := s.header()
	if err != nil {
		return err
	}
	if err := s.root.Rename(s.name(), s.closedName()); err != nil {
		next.Close() // already failing
		return err
	}
	s.old = append(s.old, s.live)
	s.live = nil
	return s.adopt(next, size)
}

// begin makes the live file where there is none.
func (s *store) begin() error {
	if s.tree.n > 0 {
		next, size, err := s.header()
		if err != nil {
			return err
		}
		return s.adopt(next, size)
	}
	f, err := s.root.OpenFile(s.name(), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o640)
	if err != nil {
		return err
	}
	s.live, s.size, s.first, s.known, s.day, s.renamed = f, 0, 0, true, s.today(), true
	return nil
}

// fresh is the name of a file that is about to be the live one.
func (s *store) fresh() string { return s.name() + ".new" }

// header makes a file that begins with its sequence number.
func (s *store) header() (*os.File, []byte, error) {
	root := s.tree.root()
	fields := map[string]string{FieldFirst: fmt.Sprint(s.tree.n), FieldTree: fmt.Sprintf("%x", root)}
	if s.known {
		fields[FieldPrevious] = fmt.Sprint(s.first)
	}
	line := s.encode(Record{Event: EventShardBegan, Fields: fields})
	f, err := s.root.OpenFile(s.fresh(), os.O_CREATE|os.O_RDWR|os.O_TRUNC|os.O_APPEND, 0o640)
	if err != nil {
		return nil, nil, err
	}
	if _, err := f.Write(line); err != nil {
		f.Close() // already failing
		return nil, nil, err
	}
	return f, line, nil
}

// adopt makes a file with a header the live one.
func (s *store) adopt(f *os.File, header []byte) error {
	if err := s.root.Rename(s.fresh(), s.name()); err != nil {
		f.Close() // already failing
		return err
	}
	s.live, s.size, s.first, s.known, s.day, s.renamed, s.spoilt = f, int64(len(header)), s.tree.n, true, s.today(), true, false
	s.grow(header)
	return s.tree.keep(s.hashes)
}

// Sync puts everything that was written before on disk, and makes a checkpoint when it is time for one.
func (s *store) Sync() error { return s.sync(false) }

// End is the last Sync: what is on disk is covered by a checkpoint.
func (s *store) End() error { return s.sync(true) }

// SignDue says whether records have waited for a checkpoint long enough: the last ones of a log that is idle get one too.
func (s *store) SignDue() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.root != nil && s.live != nil && s.tree.n > s.signed && bootclock.Now()-s.signedAt >= checkpointEvery
}

func (s *store) sync(end bool) error {
	s.mu.Lock()
	if s.root == nil || s.live == nil {
		s.mu.Unlock()
		return fmt.Errorf("syncing the audit log %s: it could not be opened yet", s.path)
	}
	live, old, renamed := s.live, s.old, s.renamed
	s.old, s.renamed = nil, false
	c := Checkpoint{Origin: s.signer.Name(), Size: s.tree.n, Root: s.tree.root()}
	due := c.Size > s.signed && (end || len(old) > 0 || c.Size-s.signed >= checkpointRecords || bootclock.Now()-s.signedAt >= checkpointEvery)
	s.mu.Unlock()

	err := s.toDisk(live, old, renamed)
	s.mu.Lock()
	if err != nil {
		s.old, s.renamed, s.distrst = append(old, s.old...), s.renamed || renamed, true
		s.mu.Unlock()
		return fmt.Errorf("syncing the audit log %s: %w", s.path, err)
	}
	s.mu.Unlock()
	for _, f := range old {
		f.Close() // it was synced
	}
	if !due {
		return nil
	}
	if err := s.sign(c, len(old) > 0); err != nil {
		return err
	}
	s.mu.Lock()
	s.signed, s.signedAt = c.Size, bootclock.Now()
	s.mu.Unlock()
	return nil
}

func (s *store) toDisk(live *os.File, old []*os.File, renamed bool) error {
	for _, f := range append(old[:len(old):len(old)], live) {
		if err := f.Sync(); err != nil {
			return err
		}
	}
	if len(old) > 0 { // what the tree has of a closed shard stays when the shard has gone
		if err := s.hashes.Sync(); err != nil {
			return err
		}
	}
	if !renamed {
		return nil
	}
	for _, name := range []string{".", shardsDir, TreeDir} {
		dir, err := s.root.Open(name)
		if err != nil {
			return err
		}
		err = dir.Sync()
		if errors.Is(err, syscall.EINVAL) { // a filesystem that syncs no directories
			err = nil
		}
		if err = errors.Join(err, dir.Close()); err != nil {
			return err
		}
	}
	return nil
}

// Truncate does nothing: Write takes back what it did not write whole.
func (s *store) Truncate(int64) error { return nil }

func (s *store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.close()
	return nil
}
