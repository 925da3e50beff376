package audit

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// recover finds out where the log stands and brings its tree and its live file together. The tree never gets smaller:
// records that it has and that are in no file are gone, and a gap record says which.
func (s *store) recover() error {
	if err := s.loadTree(); err != nil {
		return err
	}
	kept := s.tree.n
	last, signed := s.lastSigned()
	if signed {
		s.signed = last.Size
	}
	closed, err := closedShards(filepath.Dir(s.path), s.daemon)
	if err != nil {
		return err
	}
	for i := range closed { // the directory may be under another mount by now
		closed[i].Path = filepath.Join(shardsDir, filepath.Base(closed[i].Path))
	}
	torn, there, err := s.openLive(closed)
	if err != nil {
		return err
	}
	end := s.first
	if there {
		lines, err := countWhole(s.live)
		if err != nil {
			return err
		}
		end += lines
	} else if end, err = s.endOf(closed); err != nil {
		return err
	}
	if err := s.catchUp(closed, end, there); err != nil {
		return err
	}
	gone := s.tree.n > end
	switch {
	case gone:
		s.note(lostRecords("lost", end, s.tree.n, "records were written and are gone: the file was cut or removed, or the machine crashed before they were on disk"))
	case torn:
		s.note(gapOf("crash", 1, "the last record before this one was cut off by a crash"))
	case signed && last.Size < end:
		s.note(gapOf("crash", 0, fmt.Sprintf("the daemon did not end cleanly: of the records before this one, %d were in no checkpoint yet, and what waited in its memory is gone", end-last.Size)))
	}
	if signed && last.Size > max(kept, end) {
		s.note(lostRecords("lost", max(kept, end), last.Size, "a checkpoint of this log covers more records than there are: the log was set back"))
	}
	switch {
	case !there:
		return s.begin()
	case gone:
		return s.rotate()
	}
	return s.tree.keep(s.hashes)
}

// loadTree reads the tree as far as its file is whole.
func (s *store) loadTree() error {
	info, err := s.hashes.Stat()
	if err != nil {
		return err
	}
	const size = int64(len(Hash{}))
	n := leavesOf(uint64(info.Size() / size))
	whole := int64(storedHashes(n)) * size
	if info.Size() != whole {
		if err := s.hashes.Truncate(whole); err != nil {
			return err
		}
	}
	s.tree, err = readTree(s.hashes, n)
	return err
}

// openLive opens the live file, where there is one, and closes a last line that was cut off.
func (s *store) openLive(closed []Shard) (torn, there bool, err error) {
	f, err := s.root.OpenFile(s.name(), os.O_RDWR|os.O_APPEND, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return false, false, nil
	}
	if err != nil {
		return false, false, err
	}
	s.live, s.day = f, s.today()
	info, err := f.Stat()
	if err != nil {
		return false, true, err
	}
	if !info.Mode().IsRegular() {
		return false, true, errors.New("it is no regular file: move it away")
	}
	if info.Size() > 0 {
		s.day = info.ModTime().UTC().Format("2006-01-02")
	} else if s.tree.n > 0 || len(closed) > 0 { // nothing was ever in it: one with a number is made
		s.live = nil
		return false, false, errors.Join(f.Close(), s.root.Remove(s.name()))
	}
	first, ok, err := readHeader(io.NewSectionReader(f, 0, maxLine))
	if err == nil && !ok {
		first, err = s.endOf(closed)
	}
	if err != nil {
		return false, true, err
	}
	s.first, s.size, s.known = first, info.Size(), true
	whole, err := countWhole(f)
	if err != nil || s.tree.n > first+whole { // cut: what is left of a record that was whole is no record
		return false, true, err
	}
	torn, s.size, err = closeTornLine(f)
	return torn, true, err
}

// endOf is the sequence number behind the closed shards. Behind an encrypted one, whose lines nobody here can count, it
// is where the tree ends.
func (s *store) endOf(closed []Shard) (uint64, error) {
	if len(closed) == 0 {
		return 0, nil
	}
	last := closed[len(closed)-1]
	if last.Sealed {
		return max(s.tree.n, last.First), nil
	}
	f, err := s.root.Open(last.Path)
	if err != nil {
		return 0, err
	}
	defer f.Close() // only read
	n, err := countWhole(f)
	return last.First + n, err
}

// catchUp adds to the tree what is in the files and not in it.
func (s *store) catchUp(closed []Shard, end uint64, live bool) error {
	for _, c := range closed {
		if s.tree.n >= end {
			return nil
		}
		if c.Sealed || c.First > s.tree.n {
			continue
		}
		f, err := s.root.Open(c.Path)
		if err != nil {
			return err
		}
		if err = errors.Join(s.catchUpFrom(f, c.First), f.Close()); err != nil {
			return err
		}
	}
	if !live {
		return nil
	}
	if s.tree.n < s.first {
		s.note(lostRecords("tree", s.tree.n, s.first, "the tree of this log was lost, and with it the hashes of records that are in no readable file: they cannot be verified any more"))
		for s.tree.n < s.first {
			s.tree.add(Hash{})
		}
	}
	return s.catchUpFrom(s.live, s.first)
}

// catchUpFrom adds the lines of a file, from the one that the tree needs next.
func (s *store) catchUpFrom(f *os.File, first uint64) error {
	lines := bufio.NewReaderSize(io.NewSectionReader(f, 0, 1<<62), 1<<20)
	for n := first; ; n++ {
		line, err := readLine(lines)
		if errors.Is(err, io.EOF) {
			return s.tree.keep(s.hashes)
		}
		if err != nil {
			return err
		}
		if n < s.tree.n {
			continue
		}
		s.tree.addLine(line)
		if len(s.tree.unkept) > 4<<20 {
			if err := s.tree.keep(s.hashes); err != nil {
				return err
			}
		}
	}
}

// readLine returns the next whole line, without its end; it is valid until the next call. An unfinished one is io.EOF.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if !errors.Is(err, bufio.ErrBufferFull) {
		return bytes.TrimSuffix(line, []byte{'\n'}), err
	}
	long := bytes.Clone(line)
	for errors.Is(err, bufio.ErrBufferFull) {
		line, err = r.ReadSlice('\n')
		long = append(long, line...)
	}
	return bytes.TrimSuffix(long, []byte{'\n'}), err
}

// countWhole counts the whole lines of a file.
func countWhole(f *os.File) (uint64, error) {
	return countIn(io.NewSectionReader(f, 0, 1<<62))
}

func copyBytes(to, from *os.File, n int64) error {
	_, err := io.Copy(to, io.NewSectionReader(from, 0, n))
	return err
}
