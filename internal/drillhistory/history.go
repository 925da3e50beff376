// Package drillhistory keeps what became of the drills of a machine: one small JSON file a drill, written whole or
// not at all. It is apart from package drill so that a daemon can read it without knowing how a drill is run.
//
// Times are wall clock: the history outlives reboots, which every other clock does not.
package drillhistory

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/atomicfile"
)

// Keep is how many entries stay. The last whole drill that passed stays in any case.
const Keep = 500

// Entry is one drill.
type Entry struct {
	ID         string                   `json:"id"` // ULID, of when it was kept
	Started    time.Time                `json:"started"`
	Took       time.Duration            `json:"took_ns"`
	By         string                   `json:"by"`
	Tagout     string                   `json:"tagout"` // version
	Kernel     string                   `json:"kernel"`
	Verdict    string                   `json:"verdict"` // PASS, FAIL or VOID
	Why        string                   `json:"why,omitempty"`
	Whole      bool                     `json:"whole"` // every technique, knock-out and control was run
	Runs       int                      `json:"runs"`
	Techniques int                      `json:"techniques"`
	Slowest    map[string]time.Duration `json:"slowest_ns"` // layer -> the slowest that was seen to stop
	Skipped    []string                 `json:"skipped,omitempty"`
	Report     string                   `json:"report,omitempty"` // directory of the signed report
	SHA256     string                   `json:"sha256,omitempty"` // of its drill.json, hex
	Key        string                   `json:"key,omitempty"`    // public, that it is signed with
}

// Passed says whether the drill counts as one: all of it was run, and all of it passed.
func (e Entry) Passed() bool { return e.Whole && len(e.Skipped) == 0 && e.Verdict == "PASS" }

const suffix = ".json"

// Add keeps an entry in dir, which is made where it is missing, and drops the oldest where there are too many. The
// entry gets its ID here.
func Add(dir string, e Entry) error {
	e.ID = ulid.Make().String()
	raw, err := json.MarshalIndent(e, "", "  ")
	if err == nil {
		err = os.MkdirAll(dir, 0o755) // a daemon of any user reads it
	}
	if err == nil {
		err = atomicfile.Write(filepath.Join(dir, e.ID+suffix), append(raw, '\n'), 0o644, -1, -1)
	}
	if err == nil {
		err = prune(dir)
	}
	if err != nil {
		return fmt.Errorf("keeping the drill in the history: %w", err)
	}
	return nil
}

// List returns the entries, oldest first. What cannot be read is left out and in the error.
func List(dir string) ([]Entry, error) {
	files, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("reading the history of drills: %w", err)
	}
	var out []Entry
	var errs []error
	for _, f := range files {
		id, ok := strings.CutSuffix(f.Name(), suffix)
		if _, err := ulid.ParseStrict(id); !ok || err != nil {
			continue // not an entry
		}
		e, err := read(filepath.Join(dir, f.Name()))
		if err != nil {
			errs = append(errs, fmt.Errorf("reading the history of drills: %w", err))
			continue
		}
		e.ID = id
		out = append(out, e)
	}
	slices.SortStableFunc(out, func(a, b Entry) int { return cmp.Compare(a.ID, b.ID) })
	return out, errors.Join(errs...)
}

func read(file string) (Entry, error) {
	var e Entry
	raw, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(raw, &e)
	}
	if err == nil && e.Started.IsZero() {
		err = errors.New("it says not when")
	}
	if err != nil {
		return e, fmt.Errorf("%s: %w", file, err)
	}
	return e, nil
}

// LastPassed returns when the last whole drill that passed was started; false where there is none.
func LastPassed(dir string) (time.Time, bool) {
	entries, _ := List(dir) // what cannot be read did not pass
	for _, e := range slices.Backward(entries) {
		if e.Passed() {
			return e.Started, true
		}
	}
	return time.Time{}, false
}

func prune(dir string) error {
	entries, _ := List(dir) // what cannot be read is left for somebody to look at
	last := -1
	for i, e := range entries {
		if e.Passed() {
			last = i
		}
	}
	for i := range max(0, len(entries)-Keep) {
		if i == last {
			continue
		}
		if err := os.Remove(filepath.Join(dir, entries[i].ID+suffix)); err != nil {
			return err
		}
	}
	return nil
}
