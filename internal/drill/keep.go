package drill

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"tagout/internal/atomicfile"
	"tagout/internal/authority"
	"tagout/internal/drillhistory"
)

// BoxKey returns the private key that signs the drills of a machine where nobody gives another, and its public half.
// It lies in dir, where it is made at the first drill; the public half lies beside it for whoever verifies.
func BoxKey(dir, host string) (private, public string, err error) {
	file := filepath.Join(dir, "key")
	raw, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		raw, err = makeBoxKey(dir, file, host)
	}
	if err == nil {
		private = strings.TrimSpace(string(raw))
		public, err = authority.Public(private)
	}
	if err == nil {
		err = atomicfile.Write(file+".pub", []byte(public+"\n"), 0o644, -1, -1)
	}
	if err != nil {
		return "", "", fmt.Errorf("reading the box's drill key: %w", err)
	}
	return private, public, nil
}

// makeBoxKey makes the key; of two that do so at once, both get the first one's.
func makeBoxKey(dir, file, host string) ([]byte, error) {
	private, _, err := authority.NewKey("drill@" + host)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil { // the history is for everybody, the key for root
		return nil, err
	}
	tmp, err := os.CreateTemp(dir, ".new-*") // mode 0600
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp.Name()) // it has another name by then
	_, err = tmp.WriteString(private + "\n")
	if err = errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return nil, err
	}
	if err := os.Link(tmp.Name(), file); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return os.ReadFile(file)
}

// Entry is the report as the history keeps it.
func (rep *Report) Entry() drillhistory.Entry {
	e := drillhistory.Entry{
		Started: rep.Started, Took: rep.Took, By: rep.By, Tagout: rep.Environment.Tagout, Kernel: rep.Environment.Kernel,
		Verdict: string(rep.Verdict), Why: rep.Why, Whole: rep.Whole, Runs: rep.Runs, Techniques: len(rep.Techniques),
		Slowest: map[string]time.Duration{},
	}
	for _, r := range rep.Results {
		if r.Skipped != "" {
			e.Skipped = append(e.Skipped, r.Case)
		}
		for _, l := range r.Layers {
			if r.Kind == KindStop && l.Stopped {
				e.Slowest[string(l.Layer)] = max(e.Slowest[string(l.Layer)], l.Observed)
			}
		}
	}
	return e
}
