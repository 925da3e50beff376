package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// shardsDir is the directory, in a daemon's, of its closed shards.
const shardsDir = "shards"

// sealedExt ends the name of a closed shard that is encrypted with age.
const sealedExt = ".age"

// shardTime is the form of the time, UTC, in a closed shard's name: when it was closed.
const shardTime = "20060102T150405Z"

// shardName is the name of a closed shard: the sequence number of its first record, and when it was closed.
var shardName = regexp.MustCompile(`^([0-9]{12,19})-([0-9]{8}T[0-9]{6}Z)\.jsonl(\.age)?$`)

// Shard is one piece of a daemon's log: JSON lines, each a record, without a hole. The sequence number of a record is
// its place in the daemon's log, from 0: First plus the number of lines before it.
type Shard struct {
	Daemon, Path string
	Live         bool      // it is still appended to
	Sealed       bool      // encrypted with age
	First        uint64    // sequence number of its first record
	Closed       time.Time // by its name, wall clock, UTC; zero of a live one
}

// Unseal returns what an encrypted shard holds (package audit/seal has one for age).
type Unseal func(io.Reader) (io.Reader, error)

// ErrSealed is the error of opening an encrypted shard without the means.
var ErrSealed = errors.New("the shard is encrypted: name the identity of one of its recipients")

// Open returns the shard's lines. The caller closes it.
func (s Shard) Open(unseal ...Unseal) (io.ReadCloser, error) {
	if s.Sealed && len(unseal) == 0 {
		return nil, fmt.Errorf("opening %s: %w", s.Path, ErrSealed)
	}
	f, err := s.file()
	if err != nil {
		return nil, fmt.Errorf("reading the audit log: %w", err)
	}
	if !s.Sealed {
		return f, nil
	}
	var all error
	for _, open := range unseal {
		if _, err := f.Seek(0, io.SeekStart); err != nil {
			f.Close() // only read
			return nil, fmt.Errorf("reading the audit log: %w", err)
		}
		r, err := open(f)
		if err == nil {
			return &unsealed{Reader: r, file: f}, nil
		}
		all = errors.Join(all, err)
	}
	f.Close() // only read
	return nil, fmt.Errorf("opening %s: %w", s.Path, all)
}

// file opens the shard's file. A live one may have been closed since it was listed, and has another name then.
func (s Shard) file() (*os.File, error) {
	f, err := os.Open(s.Path)
	if !s.Live || err != nil && !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	if err == nil {
		first, ok, err := readHeader(f)
		if err == nil && (!ok || first <= s.First) {
			_, err = f.Seek(0, io.SeekStart)
		}
		if err != nil {
			f.Close() // only read
			return nil, err
		}
		if !ok || first <= s.First {
			return f, nil
		}
		f.Close() // only read
	}
	closed, _ := filepath.Glob(filepath.Join(filepath.Dir(s.Path), shardsDir, fmt.Sprintf("%012d-*.jsonl", s.First)))
	if len(closed) == 0 {
		return nil, &fs.PathError{Op: "open", Path: s.Path, Err: fs.ErrNotExist}
	}
	return os.Open(closed[0])
}

type unsealed struct {
	io.Reader
	file *os.File
}

func (u *unsealed) Close() error { return u.file.Close() }

// Shards returns the pieces of all logs below dir (inst.AuditDir()), closed ones and the live one, oldest first for
// each daemon.
func Shards(dir string) ([]Shard, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing the audit logs: %w", err)
	}
	var out []Shard
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		shards, err := shardsOf(filepath.Join(dir, e.Name()), e.Name())
		if err != nil {
			return nil, fmt.Errorf("listing the audit logs: %w", err)
		}
		out = append(out, shards...)
	}
	return out, nil
}

// ShardsOf is Shards for one daemon.
func ShardsOf(dir, daemon string) ([]Shard, error) {
	out, err := shardsOf(filepath.Join(dir, daemon), daemon)
	if err != nil {
		return nil, fmt.Errorf("listing the audit logs: %w", err)
	}
	return out, nil
}

// shardsOf looks again where a shard was closed meanwhile.
func shardsOf(dir, daemon string) ([]Shard, error) {
	closed, err := closedShards(dir, daemon)
	for {
		if err != nil {
			return nil, err
		}
		live, err := liveShards(dir, daemon, closed)
		if err != nil {
			return nil, err
		}
		again, err := closedShards(dir, daemon)
		if err != nil {
			return nil, err
		}
		if slices.Equal(closed, again) {
			return append(closed, live...), nil
		}
		closed = again
	}
}

func closedShards(dir, daemon string) ([]Shard, error) {
	entries, err := os.ReadDir(filepath.Join(dir, shardsDir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var out []Shard
	for _, e := range entries { // sorted: a plain shard comes before its encrypted twin
		s, ok := parseShard(e.Name())
		if n := len(out); !ok || !e.Type().IsRegular() || n > 0 && out[n-1].First == s.First && out[n-1].Closed.Equal(s.Closed) {
			continue // encrypting it was not finished
		}
		s.Daemon, s.Path = daemon, filepath.Join(dir, shardsDir, e.Name())
		out = append(out, s)
	}
	slices.SortStableFunc(out, func(a, b Shard) int { return int(int64(a.First) - int64(b.First)) })
	return out, nil
}

func parseShard(name string) (Shard, bool) {
	m := shardName.FindStringSubmatch(name)
	if m == nil {
		return Shard{}, false
	}
	first, err := strconv.ParseUint(m[1], 10, 63)
	closed, timeErr := time.Parse(shardTime, m[2])
	return Shard{First: first, Closed: closed, Sealed: m[3] == sealedExt}, err == nil && timeErr == nil
}

func liveShards(dir, daemon string, closed []Shard) ([]Shard, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []Shard
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".jsonl") || !e.Type().IsRegular() {
			continue
		}
		s := Shard{Daemon: daemon, Path: filepath.Join(dir, e.Name()), Live: true}
		if s.First, err = firstOf(s.Path, closed); err != nil {
			return nil, err
		}
		out = append(out, s)
	}
	return out, nil
}

// firstOf returns the sequence number of a live file's first record. The file says it itself; one that does not is the
// log's first, or follows the last closed shard.
func firstOf(path string, closed []Shard) (uint64, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) { // it was closed just now
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close() // only read
	if first, ok, err := readHeader(f); ok || err != nil {
		return first, err
	}
	if len(closed) == 0 {
		return 0, nil
	}
	last := closed[len(closed)-1]
	if last.Sealed {
		return last.First, nil // nobody can count its lines: it is there or after
	}
	n, err := countLines(last.Path)
	return last.First + n, err
}

// readHeader is headerFirst for the start of a file.
func readHeader(f io.Reader) (uint64, bool, error) {
	line, err := bufio.NewReaderSize(io.LimitReader(f, maxLine), 4096).ReadBytes('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, false, err
	}
	first, ok := headerFirst(line)
	return first, ok, nil
}

// headerFirst returns the sequence number that a shard's first line says it has.
func headerFirst(line []byte) (uint64, bool) {
	var r Record
	if json.Unmarshal(line, &r) != nil || r.Event != EventShardBegan {
		return 0, false
	}
	first, err := strconv.ParseUint(r.Fields[FieldFirst], 10, 63)
	return first, err == nil
}

func countLines(path string) (uint64, error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close() // only read
	return countIn(f)
}

func countIn(r io.Reader) (n uint64, err error) {
	buf := make([]byte, 256<<10)
	for {
		k, err := r.Read(buf)
		n += uint64(bytes.Count(buf[:k], []byte{'\n'}))
		if errors.Is(err, io.EOF) {
			return n, nil
		}
		if err != nil {
			return n, err
		}
	}
}
