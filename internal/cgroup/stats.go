package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Stats is what a cgroup and those below it use and have used. What the kernel does not say is nil; a limit of 0 is none.
type Stats struct {
	User, System time.Duration  // processor time
	CPUs         float64        // limit: 1.5 is one and a half processors
	Throttled    *time.Duration // waited for that limit, all processors together

	Memory, MemoryLimit uint64 // bytes
	MemoryPeak          *uint64

	Tasks, TaskLimit uint64 // processes and threads, zombies included

	IO *IOStats
}

// IOStats is what went from and to disks, by all of them.
type IOStats struct{ ReadBytes, WrittenBytes, Reads, Writes uint64 }

// Stats reads them. The error wraps fs.ErrNotExist where the cgroup is not there.
func (l Layout) Stats(rel string) (Stats, error) {
	var s Stats
	var err error
	if s.User, s.System, err = CPUSplit(l.V2(rel)); err != nil {
		return Stats{}, err
	}
	err = errors.Join(l.cpuLimit(rel, &s), l.memory(rel, &s), l.tasks(rel, &s), l.io(rel, &s))
	if err != nil {
		return Stats{}, fmt.Errorf("reading what a cgroup uses: %w", err)
	}
	return s, nil
}

// cpuLimit reads cpu.stat and the limit; on v1 the times are nanoseconds, on v2 microseconds.
func (l Layout) cpuLimit(rel string, s *Stats) error {
	dir, name, unit := l.V2(rel), "throttled_usec", time.Microsecond
	quota, period := "", ""
	if v1 := l.V1("cpu", rel); v1 != "" {
		dir, name, unit = v1, "throttled_time", time.Nanosecond
		var qErr, pErr error
		quota, qErr = text(dir, "cpu.cfs_quota_us")
		period, pErr = text(dir, "cpu.cfs_period_us")
		if err := errors.Join(qErr, pErr); err != nil {
			return err
		}
	} else {
		line, err := text(dir, "cpu.max")
		if errors.Is(err, fs.ErrNotExist) {
			return nil // the controller is off
		}
		if err != nil {
			return err
		}
		quota, period, _ = strings.Cut(line, " ")
	}
	if q, err := strconv.ParseFloat(quota, 64); err == nil && q > 0 { // "max" and -1 are none
		p, err := strconv.ParseFloat(period, 64)
		if err != nil || p <= 0 {
			return fmt.Errorf("%s: a period of %q", dir, period)
		}
		s.CPUs = q / p
	}
	raw, err := text(dir, "cpu.stat")
	if err != nil {
		return err
	}
	if n, ok := keyedNumber(raw, name); ok && n <= math.MaxInt64/1000 {
		d := time.Duration(n) * unit // no overflow, see above
		s.Throttled = &d
	}
	return nil
}

func (l Layout) memory(rel string, s *Stats) error {
	dir, now, peak, limit := l.V2(rel), "memory.current", "memory.peak", "memory.max"
	if v1 := l.V1("memory", rel); v1 != "" {
		dir, now, peak, limit = v1, "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes"
	}
	used, err := number(dir, now)
	if err != nil {
		return err
	}
	s.Memory = used
	if s.MemoryLimit, err = number(dir, limit); err != nil {
		return err
	}
	if s.MemoryLimit > 1<<62 { // v1 says "none" as a number of pages
		s.MemoryLimit = 0
	}
	most, err := number(dir, peak)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // before Linux 5.19
	}
	s.MemoryPeak = &most
	return err
}

func (l Layout) tasks(rel string, s *Stats) error {
	dir := l.V2(rel)
	if v1 := l.V1("pids", rel); v1 != "" {
		dir = v1
	}
	n, err := Tasks(dir, l.V2(rel))
	if err != nil {
		return err
	}
	s.Tasks = uint64(max(n, 0)) // never below
	if s.TaskLimit, err = number(dir, "pids.max"); errors.Is(err, fs.ErrNotExist) {
		return nil // the controller is off
	}
	return err
}

// io sums up what the kernel counts for each disk (admin-guide/cgroup-v2.rst, cgroup-v1/blkio-controller.rst).
func (l Layout) io(rel string, s *Stats) error {
	if v1 := l.V1("blkio", rel); v1 != "" {
		moved, err := text(v1, "blkio.throttle.io_service_bytes_recursive")
		ops, opErr := text(v1, "blkio.throttle.io_serviced_recursive")
		if err = errors.Join(err, opErr); errors.Is(err, fs.ErrNotExist) {
			return nil // no throttling in this kernel
		}
		s.IO = &IOStats{
			ReadBytes: sumWords(moved, "Read"), WrittenBytes: sumWords(moved, "Write"), Reads: sumWords(ops, "Read"), Writes: sumWords(ops, "Write"),
		}
		return err
	}
	raw, err := text(l.V2(rel), "io.stat")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // the controller is off
	}
	s.IO = &IOStats{ReadBytes: sumPairs(raw, "rbytes"), WrittenBytes: sumPairs(raw, "wbytes"), Reads: sumPairs(raw, "rios"), Writes: sumPairs(raw, "wios")}
	return err
}

// text reads one file of cgroupfs.
func text(dir, name string) (string, error) {
	raw, err := os.ReadFile(filepath.Join(dir, name))
	return string(bytes.TrimSpace(raw)), err
}

// number reads a file that is one number; "max" is 0.
func number(dir, name string) (uint64, error) {
	raw, err := text(dir, name)
	if err != nil || raw == "max" {
		return 0, err
	}
	n, err := strconv.ParseUint(raw, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s/%s: %w", dir, name, err)
	}
	return n, nil
}

// keyedNumber finds the line "key number".
func keyedNumber(raw, key string) (uint64, bool) {
	for line := range strings.Lines(raw) {
		if value, ok := strings.CutPrefix(line, key+" "); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(value), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// sumWords sums up the lines "8:0 word number" of v1.
func sumWords(raw, word string) (sum uint64) {
	for line := range strings.Lines(raw) {
		if f := strings.Fields(line); len(f) == 3 && f[1] == word {
			n, _ := strconv.ParseUint(f[2], 10, 64) // 0 where it is none
			sum += n
		}
	}
	return sum
}

// sumPairs sums up "key=number" in the lines of v2.
func sumPairs(raw, key string) (sum uint64) {
	for word := range strings.FieldsSeq(raw) {
		if value, ok := strings.CutPrefix(word, key+"="); ok {
			n, _ := strconv.ParseUint(value, 10, 64) // 0 where it is none
			sum += n
		}
	}
	return sum
}
