package audit

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"
)

// Recent returns what the logs below dir (inst.AuditDir()) say of one kid's session, in the order of Timeline. Of each
// log it reads the last bytes only, at most so many; cut says that a log is longer. The session began at since: records
// that name a kid and no session count from then on.
func Recent(dir, kid, session string, since time.Time, most int64) (records []Record, cut bool, err error) {
	logs, err := filepath.Glob(filepath.Join(dir, "*", "*.jsonl"))
	if err != nil {
		return nil, false, fmt.Errorf("listing the audit logs: %w", err)
	}
	needles := [][]byte{fmt.Appendf(nil, `"session":%q`, session), fmt.Appendf(nil, `"kid":%q`, kid)}
	for _, log := range logs {
		short, err := lastLines(log, most, func(line []byte) {
			var r Record
			if !bytes.Contains(line, needles[0]) && !bytes.Contains(line, needles[1]) || json.Unmarshal(line, &r) != nil {
				return
			}
			if r.Session == session || r.Session == "" && r.Kid == kid && !r.Time.Before(since) {
				records = append(records, r)
			}
		})
		if err != nil {
			return nil, false, err
		}
		cut = cut || short
	}
	sortRecords(records)
	return records, cut, nil
}

// lastLines calls fn with each whole line in the last bytes of a log.
func lastLines(log string, most int64, fn func(line []byte)) (cut bool, err error) {
	f, err := os.Open(log)
	if err != nil {
		return false, fmt.Errorf("reading the audit log: %w", err)
	}
	defer f.Close() // only read
	info, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("reading the audit log: %w", err)
	}
	if cut = info.Size() > most; cut {
		if _, err := f.Seek(info.Size()-most, io.SeekStart); err != nil {
			return false, fmt.Errorf("reading the audit log: %w", err)
		}
	}
	lines := bufio.NewScanner(io.LimitReader(f, most)) // what is being written meanwhile is left out
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for first := true; lines.Scan(); first = false {
		if !first || !cut { // the first may be the end of one
			fn(lines.Bytes())
		}
	}
	if err := lines.Err(); err != nil && !errors.Is(err, bufio.ErrTooLong) {
		return false, fmt.Errorf("reading the audit log %s: %w", log, err)
	}
	return cut, nil
}
