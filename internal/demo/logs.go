package demo

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"tagout/internal/audit"
	"tagout/internal/instance"
)

// readAudit reads the whole records of all daemons' audit files. A last line that is still being written is
// left out.
func readAudit(inst instance.Instance) ([]audit.Record, error) {
	var out []audit.Record
	for _, d := range instance.Daemons() {
		raw, err := os.ReadFile(inst.AuditFile(d))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("reading the audit log of %s: %w", d, err)
		}
		for line := range bytes.Lines(raw) {
			if !bytes.HasSuffix(line, []byte("\n")) {
				break
			}
			var r audit.Record
			if err := json.Unmarshal(line, &r); err != nil {
				return nil, fmt.Errorf("reading the audit log of %s: %w", d, err)
			}
			out = append(out, r)
		}
	}
	return out, nil
}

// readLogs returns the bytes of all audit files, for the search for the secret.
func readLogs(inst instance.Instance) []byte {
	var out []byte
	for _, d := range instance.Daemons() {
		raw, err := os.ReadFile(inst.AuditFile(d))
		if err == nil {
			out = append(out, raw...)
		}
	}
	return out
}
