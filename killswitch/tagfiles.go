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

// TagFiles keeps tags in a directory, one JSON file each; released ones lie in a directory below it.
//
// A file appears under its name only when it is whole. A file under a temporary name is what a crash in the
// middle of a stop leaves: it is taken as a tag if it is whole. Everything that cannot be read counts as a tag
// on everything, since what it said is not known.
type TagFiles struct{ dir string }

// NewTagFiles returns the tags in dir, which it makes where it is missing.
func NewTagFiles(dir string) TagFiles {
	os.MkdirAll(filepath.Join(dir, releasedDir), 0o750) //nolint:errcheck // Load and Put say what is wrong
	return TagFiles{dir: dir}
}

const (
	releasedDir = "released"
	tagSuffix   = ".json"
	newPrefix   = ".new-"
)

// maxReleased is how many released tags are remembered, to answer a second release clearly.
const maxReleased = 256

// Load reads everything; see Tags.
func (f TagFiles) Load() (hanging, released, damaged []wire.Tag) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, nil, []wire.Tag{damagedTag("tags", f.dir, err)}
	}
	for _, e := range entries {
		name := strings.TrimPrefix(e.Name(), newPrefix)
		id, isTag := strings.CutSuffix(name, tagSuffix)
		if !isTag || e.IsDir() {
			continue
		}
		path := filepath.Join(f.dir, e.Name())
		t, err := readTag(path, id)
		if err != nil {
			damaged = append(damaged, damagedTag(id, path, err))
			continue
		}
		// A whole temporary file and the file itself may both be there: they say the same.
		if !slices.ContainsFunc(hanging, func(h wire.Tag) bool { return h.Stop == t.Stop }) {
			hanging = append(hanging, t)
		}
	}
	return hanging, f.loadReleased(), damaged
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
			os.Remove(path) //nolint:errcheck // tried again at the next start
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
		Stop: id, Scope: wire.Scope{All: true}, Layers: wire.AllLayers(), By: "unreadable file", Cause: "damaged",
		Reason: fmt.Sprintf("%s cannot be read (%v), so it is not known what it stops: look at it, remove it, and restart killswitchd", path, err),
	}
}

// Put writes a tag whole: into a temporary file, fsynced, renamed, and the directory fsynced.
func (f TagFiles) Put(t wire.Tag) error {
	if err := putFile(f.dir, t); err != nil {
		return fmt.Errorf("keeping tag %s: %w", t.Stop, err)
	}
	return nil
}

// Release notes a release and then removes the tag. A crash between the two leaves the tag hanging.
func (f TagFiles) Release(t wire.Tag) error {
	err := putFile(filepath.Join(f.dir, releasedDir), t)
	for _, prefix := range []string{newPrefix, ""} {
		if err == nil {
			if err = os.Remove(filepath.Join(f.dir, prefix+t.Stop+tagSuffix)); errors.Is(err, fs.ErrNotExist) {
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
		os.Remove(tmp) //nolint:errcheck // a torn rest would count as a tag on everything
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
