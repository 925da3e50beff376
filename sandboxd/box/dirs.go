package box

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"tagout/internal/atomicfile"
	"tagout/internal/instance"
)

// dir is one directory of the instance.
type dir struct {
	path     string
	mode     fs.FileMode
	uid, gid int
	deep     bool // what is in it belongs to the same user
}

// kidDirs lists the directories in which a living kid has files.
func kidDirs(i instance.Instance) []dir {
	return []dir{
		{path: i.SessionDir(), mode: 0o750, gid: i.GroupID()},
		{path: i.NetNSDir(), mode: 0o700},
		{path: i.RuncRoot(), mode: 0o700},
		{path: filepath.Dir(i.KidDir("any")), mode: 0o711}, // a kid's root, mapped to an unprivileged user, passes through
	}
}

// tree lists the instance's directories, parents first.
func tree(i instance.Instance) []dir {
	gid := i.GroupID()
	run := func(name string) string { return filepath.Join(i.RunDir(), name) }
	out := []dir{{path: i.RunDir(), mode: 0o755}}
	out = append(out, kidDirs(i)...)
	out = append(out, []dir{
		{path: run("sock"), mode: 0o755},
		{path: run("pid"), mode: 0o755},
		{path: run("log"), mode: 0o750, gid: gid},
		{path: i.StopDir(), mode: 0o700, uid: i.UID(instance.Killswitchd), gid: gid, deep: true},
		{path: i.TripDir(), mode: 0o700, uid: i.UID(instance.Killswitchd), gid: gid, deep: true},
		{path: i.DNSStateDir(), mode: 0o700, uid: i.UID(instance.DNSFilter), gid: gid, deep: true},
		{path: i.StateDir(), mode: 0o755},
		{path: i.AuditDir(), mode: 0o755},
		{path: i.CardDir(), mode: 0o750, gid: gid},
		{path: i.TagDir(), mode: 0o750, uid: i.UID(instance.Killswitchd), gid: gid, deep: true},
		{path: i.OrderDir(), mode: 0o750, uid: i.UID(instance.Killswitchd), gid: gid, deep: true},
		{path: i.CreddDir(), mode: 0o700, uid: i.UID(instance.Credd), gid: gid, deep: true},
		{path: i.CADir(), mode: 0o755},
	}...)
	out = append(out, dir{path: filepath.Dir(i.AuditFile(instance.CLI)), mode: fs.ModeSetgid | 0o750, gid: gid, deep: true})
	for _, d := range instance.Daemons() {
		out = append(out,
			dir{path: filepath.Dir(i.Socket(d)), mode: 0o750, uid: i.UID(d), gid: gid},
			// Setgid: sandboxd's log, too, belongs to the group. killswitchd reads all of them.
			dir{path: filepath.Dir(i.AuditFile(d)), mode: fs.ModeSetgid | 0o750, uid: i.UID(d), gid: gid, deep: true})
	}
	return out
}

func makeDirs(_ context.Context, j *job) error {
	for _, root := range []string{filepath.Dir(j.inst.RunDir()), filepath.Dir(j.inst.StateDir())} {
		if err := os.MkdirAll(root, 0o755); err != nil { // names are not secret
			return err
		}
	}
	// Under the lock nobody else writes here: what is there was left by a setup that was killed.
	for _, dir := range []string{j.inst.StateDir(), j.inst.CADir()} {
		old, err := filepath.Glob(filepath.Join(dir, ".new-*"))
		for _, path := range old {
			err = errors.Join(err, removeFile(path))
		}
		if err != nil {
			return err
		}
	}
	for _, d := range tree(j.inst) {
		err := os.Mkdir(d.path, 0o700)
		if err == nil {
			j.undo = append(j.undo, func(context.Context) error { return removeTree(d.path) })
		} else if !errors.Is(err, fs.ErrExist) {
			return err
		}
		if err := d.own(); err != nil {
			return err
		}
	}
	return nil
}

// own gives the directory, and what is in it where it is deep, to its user: after a reboot the instance may
// have another slot, and with it other uids. Nothing is followed out of the directory.
func (d dir) own() error {
	info, err := os.Lstat(d.path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is not a directory: move it away", d.path)
	}
	if err := os.Lchown(d.path, d.uid, d.gid); err != nil {
		return err
	}
	if err := os.Chmod(d.path, d.mode); err != nil {
		return err
	}
	if !d.deep {
		return nil
	}
	root, err := os.OpenRoot(d.path)
	if err != nil {
		return err
	}
	defer root.Close() // only read
	return fs.WalkDir(root.FS(), ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || name == "." {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		// A second name of a file could lie anywhere: its owner is not ours to change.
		if st, ok := info.Sys().(*syscall.Stat_t); !ok || (info.Mode().IsRegular() && st.Nlink > 1) {
			return fmt.Errorf("%s has more than one name: move it away", filepath.Join(d.path, name))
		}
		return root.Lchown(name, d.uid, d.gid)
	})
}

// writeConfig replaces box.yaml whole, and the files that are compiled out of it. It may hold a webhook's address,
// so only the instance reads it.
func writeConfig(_ context.Context, j *job) error {
	files := map[string][]byte{j.inst.BoxConfig(): j.cfg}
	for name, raw := range j.compiled {
		files[filepath.Join(j.inst.StateDir(), name)] = raw
	}
	for file, raw := range files {
		if err := j.replace(file, raw, 0o640); err != nil {
			return err
		}
	}
	return nil
}

// replace writes a file of the instance whole, and notes how to take that back.
func (j *job) replace(file string, raw []byte, mode fs.FileMode) error {
	old, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		j.undo = append(j.undo, func(context.Context) error { return removeFile(file) })
	case err != nil:
		return err
	default:
		j.undo = append(j.undo, func(context.Context) error { return atomicfile.Write(file, old, mode, 0, j.inst.GroupID()) })
	}
	return atomicfile.Write(file, raw, mode, 0, j.inst.GroupID())
}

func removeFile(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
