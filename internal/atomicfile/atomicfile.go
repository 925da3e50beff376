// Package atomicfile writes files whole or not at all.
package atomicfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Write makes or replaces file with data, synced to disk, and never readable for anybody else in between. A uid
// or gid of -1 stays what it is. What a kill in the middle leaves is called .new-* and lies beside file.
func Write(file string, data []byte, mode fs.FileMode, uid, gid int) error {
	tmp, err := os.CreateTemp(filepath.Dir(file), ".new-*") // mode 0600
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
