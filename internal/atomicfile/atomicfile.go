// Package atomicfile writes files whole or not at all.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// unfinished begins the name of what is not yet file.
func unfinished(file string) string { return ".new-" + filepath.Base(file) + "-" }

// Write makes or replaces file with data, synced to disk, and never readable for anybody else in between. A uid
// or gid of -1 stays what it is. What a kill in the middle leaves is called .new-* and lies beside file until Sweep.
func Write(file string, data []byte, mode fs.FileMode, uid, gid int) error {
	tmp, err := os.CreateTemp(filepath.Dir(file), unfinished(file)+"*") // mode 0600
	if err != nil {
		return err
	}
	defer os.Remove(tmp.Name()) // gone after the rename
	_, err = tmp.Write(data)
	err = errors.Join(err, tmp.Chown(uid, gid), tmp.Chmod(mode), tmp.Sync(), tmp.Close())
	if err != nil {
		return err
	}
	return os.Rename(tmp.Name(), file)
}

// Sweep removes what writers of file who were killed have left. Nobody may be writing it meanwhile.
func Sweep(file string) error {
	dir := filepath.Dir(file)
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), unfinished(file)) {
			err = errors.Join(err, os.Remove(filepath.Join(dir, e.Name())))
		}
	}
	return err
}

// WriteSynced is Write that returns when the file's name is on disk too.
func WriteSynced(file string, data []byte, mode fs.FileMode, uid, gid int) error {
	if err := Write(file, data, mode, uid, gid); err != nil {
		return err
	}
	return SyncDir(filepath.Dir(file))
}

// SyncDir returns when the names in dir are on disk.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
