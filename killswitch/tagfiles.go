package killswitch

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tagout/internal/wire"
)

// TagFiles keeps tags in a directory, one JSON file each; released ones lie in a directory below it. Notes of
// stops whose tag is not on disk yet lie in another directory, in memory (tmpfs).
//
// A file appears under its name only when it is whole. A file under a temporary name is what a crash in the
// middle of a stop leaves: it is taken as a tag if it is whole. Everything that cannot be read counts as a tag
// on everything, since what it said is not known.
type TagFiles struct{ dir, notes string }

// NewTagFiles returns the tags in dir, which it makes where it is missing, and the notes in the directory
// notes, which must exist.
func NewTagFiles(dir, notes string) TagFiles {
	os.MkdirAll(filepath.Join(dir, releasedDir), 0o750) // Load and Put say what is wrong
	return TagFiles{dir: dir, notes: notes}
}

const (
	releasedDir = "released"
	tagSuffix   = ".json"
	newPrefix   = ".new-"
)

// maxReleased is how many released tags are remembered, to answer a second release clearly.
const maxReleased = 256

// Load reads everything; see Tags. A directory of notes that is missing holds none.
func (f TagFiles) Load() Kept {
	var k Kept
	k.Hanging, k.Damaged = loadDir(f.dir)
	if _, err := os.Lstat(f.notes); err == nil {
		var damaged []wire.Tag
		k.Noted, damaged = loadDir(f.notes)
		k.Damaged = append(k.Damaged, damaged...)
	}
	// What a killed process left half-written is told whole by its note.
	k.Damaged = slices.DeleteFunc(k.Damaged, func(d wire.Tag) bool { return holds(k.Noted, d.Stop) })
	k.Released = f.loadReleased()
	k.Noted = slices.DeleteFunc(k.Noted, func(n wire.Tag) bool { return holds(k.Hanging, n.Stop) || holds(k.Released, n.Stop) })
	return k
}

func holds(tags []wire.Tag, stop string) bool {
	return slices.ContainsFunc(tags, func(t wire.Tag) bool { return t.Stop == stop })
}

// loadDir reads the tags of one directory.
func loadDir(dir string) (whole, damaged []wire.Tag) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, []wire.Tag{damagedTag("tags", dir, err)}
	}
	for _, e := range entries {
		name := strings.TrimPrefix(e.Name(), newPrefix)
		id, isTag := strings.CutSuffix(name, tagSuffix)
		if !isTag || e.IsDir() {
			continue
		}
		path := filepath.Join(dir, e.Name())
		t, err := readTag(path, id)
		if err != nil {
			damaged = append(damaged, damagedTag(id, path, err))
			continue
		}
		// A whole temporary file and the file itself may both be there: they say the same.
		if !holds(whole, t.Stop) {
			whole = append(whole, t)
		}
	}
	return whole, damaged
}

func (f TagFiles) loadReleased() []wire.Tag {
	dir := filepath.Join(f.dir, releasedDir)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil // only makes a second release less well explained
	}
	var out []wire.Tag
	for i, e := range entries { // sorted by name, and so by age
		path := filepath.Join(dir, e.Name())
		if len(entries)-i > maxReleased {
			os.Remove(path) // tried again at the next start
			continue
		}
		id, _ := strings.CutSuffix(e.Name(), tagSuffix)
		if t, err := readTag(path, id); err == nil {
			out = append(out, t)
		}
	}
	return out
}

func readTag(path, id string) (wire.Tag, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return wire.Tag{}, err
	}
	var t wire.Tag
	if err := json.Unmarshal(raw, &t); err != nil {
		return wire.Tag{}, err
	}
	if t.Stop != id {
		return wire.Tag{}, fmt.Errorf("it holds tag %q", t.Stop)
	}
	if len(t.Layers) == 0 {
		return wire.Tag{}, errors.New("it names no layer")
	}
	return t, checkScope(t.Scope)
}

// damagedTag stands for a file that cannot be read.
func damagedTag(id, path string, err error) wire.Tag {
	return wire.Tag{
		Stop: id, Scope: wire.Scope{All: true}, Layers: wire.AllLayers(), By: "unreadable file", Cause: causeDamaged,
		Reason: fmt.Sprintf("%s cannot be read (%v), so it is not known what it stops: look at it, remove it, and restart killswitchd", path, err),
	}
}

// Note writes a tag whole into the directory of notes, without a sync: a process that is killed loses nothing of
// it. Until the last step the file has a name that Load passes over, because nothing has fired then.
func (f TagFiles) Note(t wire.Tag) error {
	raw, err := json.Marshal(t)
	if err != nil {
		return fmt.Errorf("noting tag %s: %w", t.Stop, err)
	}
	tmp := filepath.Join(f.notes, ".note-"+t.Stop)
	err = os.WriteFile(tmp, raw, 0o640)
	if err == nil {
		err = os.Rename(tmp, f.note(t))
	}
	if err != nil {
		os.Remove(tmp) // it may not be there
		return fmt.Errorf("noting tag %s: %w", t.Stop, err)
	}
	return nil
}

func (f TagFiles) note(t wire.Tag) string { return filepath.Join(f.notes, t.Stop+tagSuffix) }

// Put writes a tag whole: into a temporary file, fsynced, renamed, and the directory fsynced.
func (f TagFiles) Put(t wire.Tag) error {
	if err := putFile(f.dir, t); err != nil {
		return fmt.Errorf("keeping tag %s: %w", t.Stop, err)
	}
	os.Remove(f.note(t)) // it says the same and does no harm
	return nil
}

// Release notes a release and then removes the tag. A crash between the two leaves the tag hanging.
func (f TagFiles) Release(t wire.Tag) error {
	err := putFile(filepath.Join(f.dir, releasedDir), t)
	name := t.Stop + tagSuffix
	for _, path := range []string{f.note(t), filepath.Join(f.dir, newPrefix+name), filepath.Join(f.dir, name)} {
		if err == nil {
			if err = os.Remove(path); errors.Is(err, fs.ErrNotExist) {
				err = nil
			}
		}
	}
	if err == nil {
		err = syncDir(f.dir)
	}
	if err != nil {
		return fmt.Errorf("releasing tag %s: %w", t.Stop, err)
	}
	return nil
}

func putFile(dir string, t wire.Tag) error {
	raw, err := json.MarshalIndent(t, "", "  ")
	if err != nil {
		return err
	}
	name := t.Stop + tagSuffix
	tmp := filepath.Join(dir, newPrefix+name)
	if err := writeSynced(tmp, append(raw, '\n')); err != nil {
		os.Remove(tmp) // a torn rest would count as a tag on everything
		return err
	}
	if err := os.Rename(tmp, filepath.Join(dir, name)); err != nil {
		return err
	}
	return syncDir(dir)
}

func writeSynced(path string, raw []byte) error {
	w, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o640)
	if err != nil {
		return err
	}
	_, err = w.Write(raw)
	return errors.Join(err, w.Sync(), w.Close())
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
