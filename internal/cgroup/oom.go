package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// OOM tells when a cgroup has run out of memory. The caller closes it.
type OOM struct {
	v2, v1 string
	events *os.File // an eventfd on v1, an inotify descriptor on v2
}

// WatchOOM watches the cgroup whose directory in the v2 hierarchy is v2dir. memoryDir is its directory in the v1
// hierarchy of the memory controller, "" where that controller is in v2.
func WatchOOM(v2dir, memoryDir string) (*OOM, error) {
	o := &OOM{v2: v2dir, v1: memoryDir}
	var fd int
	var err error
	if memoryDir != "" {
		fd, err = oomEvents(memoryDir)
	} else {
		fd, err = modifications(filepath.Join(v2dir, "memory.events"))
	}
	if err != nil {
		return nil, fmt.Errorf("watching a cgroup for lack of memory: %w", err)
	}
	o.events = os.NewFile(uintptr(fd), "oom events") // polled: no thread waits
	return o, nil
}

// oomEvents returns an eventfd that the kernel writes to when the cgroup, or one below it, runs out of memory, before it
// kills anything (admin-guide/cgroup-v1/memory.rst).
func oomEvents(dir string) (int, error) {
	control, err := open(filepath.Join(dir, "memory.oom_control"), unix.O_RDONLY)
	if err != nil {
		return -1, err
	}
	defer unix.Close(control) // the kernel keeps what it needs of it
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("making an eventfd: %w", err)
	}
	if err := write(filepath.Join(dir, "cgroup.event_control"), fmt.Sprintf("%d %d", fd, control)); err != nil {
		unix.Close(fd) // already failing
		return -1, err
	}
	return fd, nil
}

// modifications returns an inotify descriptor for a file of cgroupfs: cgroup v2 reports the changes of its event files
// in this way (admin-guide/cgroup-v2.rst).
func modifications(file string) (int, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return -1, fmt.Errorf("making an inotify descriptor: %w", err)
	}
	if _, err := unix.InotifyAddWatch(fd, file, unix.IN_MODIFY); err != nil {
		unix.Close(fd) // already failing
		return -1, &fs.PathError{Op: "watch", Path: file, Err: err}
	}
	return fd, nil
}

// Wait returns nil when something happened: on v1 the cgroup ran out of memory or is being removed, on v2 any of its
// memory events, which Kills tells apart. It returns os.ErrClosed after Close.
func (o *OOM) Wait() error {
	var buf [4096]byte
	if _, err := o.events.Read(buf[:]); err != nil {
		return fmt.Errorf("waiting for a cgroup to run out of memory: %w", err)
	}
	return nil
}

// Certain says whether an event of Wait means by itself that memory ran out, as it does on v1.
func (o *OOM) Certain() bool { return o.v1 != "" }

// Close ends Wait.
func (o *OOM) Close() error { return o.events.Close() }

// Kills is OOMKills of the cgroup.
func (o *OOM) Kills() (uint64, error) { return OOMKills(o.v2, o.v1) }

// OOMKills returns how many processes of a cgroup and of those below it were killed for lack of memory, whoever's limit
// that was. Directories are as for WatchOOM. On v1 each cgroup counts its own, so those of one that was removed are
// missing. A cgroup that is not there has none.
func OOMKills(v2dir, memoryDir string) (uint64, error) {
	if memoryDir == "" {
		return oomKills(filepath.Join(v2dir, "memory.events"))
	}
	var sum uint64
	err := filepath.WalkDir(memoryDir, func(path string, d fs.DirEntry, err error) error {
		if gone(err) {
			return nil
		}
		if err != nil || !d.IsDir() {
			return err
		}
		n, err := oomKills(filepath.Join(path, "memory.oom_control"))
		sum += n
		return err
	})
	return sum, err
}

// oomKills reads the line oom_kill of a file. One that is gone has none.
func oomKills(file string) (uint64, error) {
	raw, err := os.ReadFile(file)
	if gone(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("reading how much was killed for lack of memory: %w", err)
	}
	for line := range bytes.Lines(raw) {
		if text, ok := bytes.CutPrefix(line, []byte("oom_kill ")); ok {
			return strconv.ParseUint(string(bytes.TrimSpace(text)), 10, 64)
		}
	}
	return 0, errors.New("reading how much was killed for lack of memory: " + file + " says no oom_kill")
}
