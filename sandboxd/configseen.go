package sandboxd

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/rogpeppe/go-internal/diff"

	"tagout/internal/atomicfile"
	"tagout/internal/audit"
	"tagout/internal/instance"
)

// seenName is the file, in sandboxd's directory, with the box's configuration as it was at the last start.
const seenName = "box.seen.yaml"

// noteConfig records how the box's configuration differs from that of the last start. Killed between the record and the
// note of it, a successor records it again.
func noteConfig(cfg Config) error {
	now, err := os.ReadFile(cfg.Inst.BoxConfig())
	if err != nil {
		return fmt.Errorf("recording the box's configuration: %w", err)
	}
	file := filepath.Join(cfg.Inst.StateDir(), instance.Sandboxd, seenName)
	before, err := os.ReadFile(file)
	first := errors.Is(err, fs.ErrNotExist)
	if err != nil && !first {
		return fmt.Errorf("recording how the box's configuration has changed: %w", err)
	}
	if !first && string(before) == string(now) {
		return nil
	}
	rec := audit.Record{Event: audit.EventConfigChanged, Outcome: audit.OutcomeOK, Detail: "the box's configuration has changed since sandboxd was last started",
		Fields: map[string]string{"after_sha256": hexSum(now), "diff": string(diff.Diff("before", before, "after", now))}}
	if first {
		rec.Detail = "the box's configuration, as sandboxd sees it for the first time"
	} else {
		rec.Fields["before_sha256"] = hexSum(before)
	}
	cfg.Audit.Log(rec)
	if err := errors.Join(atomicfile.Sweep(file), atomicfile.Write(file, now, 0o600, -1, -1)); err != nil {
		return fmt.Errorf("noting the box's configuration, so that the next start can tell what has changed: %w", err)
	}
	return nil
}

func hexSum(raw []byte) string { sum := sha256.Sum256(raw); return hex.EncodeToString(sum[:]) }
