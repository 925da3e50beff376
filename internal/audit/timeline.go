package audit

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sort"
	"time"
)

// maxLine bounds one record; a longer line is reported as unreadable.
const maxLine = 1 << 20

// Timeline reads every log below dir (inst.AuditDir()) and returns the records that match accepts, in the
// order in which they happened: by boot, then by the boot clock, which no change of the wall clock disturbs.
// Lines that are no record are counted in unreadable and left out. Encrypted shards are read with unseal, and left out
// where there is none.
func Timeline(dir string, match func(*Record) bool, unseal ...Unseal) (records []Record, unreadable int, err error) {
	shards, err := Shards(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, 0, err
	}
	if len(shards) == 0 {
		return nil, 0, fmt.Errorf("reading the audit logs: there are none in %s: is this the right instance?", dir)
	}
	for _, s := range shards {
		if s.Sealed && len(unseal) == 0 {
			continue
		}
		bad, err := s.read(func(r *Record) {
			if match(r) {
				records = append(records, *r)
			}
		}, unseal...)
		if err != nil {
			return nil, 0, err
		}
		unreadable += bad
	}
	sortRecords(records)
	return records, unreadable, nil
}

func (s Shard) read(each func(*Record), unseal ...Unseal) (unreadable int, err error) {
	f, err := s.Open(unseal...)
	if err != nil {
		return 0, err
	}
	defer f.Close() // only read
	lines := bufio.NewScanner(f)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var r Record
		if json.Unmarshal(lines.Bytes(), &r) != nil {
			unreadable++
			continue
		}
		each(&r)
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return unreadable + 1, nil
	}
	if err := lines.Err(); err != nil {
		return unreadable, fmt.Errorf("reading the audit log %s: %w", s.Path, err)
	}
	return unreadable, nil
}

// sortRecords orders boots by their earliest wall time and records within a boot by the boot clock.
func sortRecords(records []Record) {
	began := map[string]time.Time{}
	for _, r := range records {
		if t, ok := began[r.BootID]; !ok || r.Time.Before(t) {
			began[r.BootID] = r.Time
		}
	}
	sort.SliceStable(records, func(i, j int) bool {
		a, b := &records[i], &records[j]
		if a.BootID != b.BootID {
			return began[a.BootID].Before(began[b.BootID])
		}
		if a.Boot != b.Boot {
			return a.Boot < b.Boot
		}
		return a.ID < b.ID
	})
}
