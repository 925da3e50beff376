package runtime

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Keep returns copies of the descriptors that the command needs to outlive this process, and that Adopt takes: its pidfd,
// which says how it ended also to a process that it was not a child of; its output; and with input, where it has no
// terminal, the end of a pipe that holds its input open. They are the caller's to close. errors.Is(err, os.ErrClosed)
// where the command has ended.
func (r *Running) Keep(input bool) (files []int, err error) {
	defer func() {
		if err != nil {
			closeFDs(files)
			files, err = nil, fmt.Errorf("copying a command's descriptors: %w", err)
		}
	}()
	all := []*os.File{r.handle, r.Stdout}
	if r.Stderr != nil {
		all = append(all, r.Stderr)
		if input {
			all = append(all, r.Stdin)
		}
	}
	for _, f := range all {
		if f == nil {
			return files, os.ErrClosed
		}
		raw, err := f.SyscallConn()
		if err != nil {
			return files, err
		}
		n := -1
		var dupErr error
		if raw.Control(func(fd uintptr) { n, dupErr = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) }) != nil {
			return files, os.ErrClosed
		}
		if dupErr != nil {
			return files, dupErr
		}
		files = append(files, n)
	}
	return files, nil
}

func closeFDs(files []int) {
	for _, fd := range files {
		unix.Close(fd) // nothing was written
	}
}

// Adopt goes on with a command that another process of this program started in the container, in the cgroup called
// group. files are what Keep returned there, and are taken over in any case; Stdin is nil where the command's input has
// ended. It may have ended itself since: how, the kernel says since Linux 6.15, an older one only to whoever looks before
// it is reaped.
func (r *Runc) Adopt(id, group string, files []int) (*Running, error) {
	var open []*os.File
	for _, fd := range files {
		open = append(open, os.NewFile(uintptr(fd), "kept"))
	}
	run, ended, err := r.adopt(id, group, open)
	if err != nil {
		closeFiles(open...)
		return nil, fmt.Errorf("adopting a command of container %s: %w", id, err)
	}
	if ended {
		run.followAdopted() // so that nobody takes it for one whose time is over
	} else {
		go run.followAdopted()
	}
	return run, nil
}

func (r *Runc) adopt(id, group string, files []*os.File) (_ *Running, ended bool, err error) {
	if len(files) < 2 || len(files) > 4 {
		return nil, false, fmt.Errorf("%d descriptors were kept", len(files))
	}
	if !strings.HasPrefix(group, groupPrefix) || strings.Contains(group, "/") {
		return nil, false, fmt.Errorf("%q is no cgroup of a command", group)
	}
	paths, err := cgroupPaths(filepath.Join(r.root, id))
	if err != nil {
		return nil, false, err
	}
	if paths[""] == "" {
		return nil, false, errNotUnified
	}
	run := &Running{handle: files[0], Stdout: files[1], adopted: true, done: make(chan struct{})}
	switch len(files) {
	case 2:
		run.Stdin = run.Stdout // a terminal
	case 3:
		run.Stderr = files[2]
	case 4:
		run.Stderr, run.Stdin = files[2], files[3]
	}
	for _, dir := range paths {
		run.group.dirs = append(run.group.dirs, filepath.Join(dir, group))
	}
	run.group.unified = filepath.Join(paths[""], group)
	if ended, err = readable(run.handle); err != nil {
		return nil, false, err
	}
	if run.PID, err = pidOf(run.handle); err != nil {
		return nil, false, err
	}
	if ended || run.PID <= 0 {
		return run, true, nil
	}
	// The pidfd is this program's own and names no other process than the command. That it is where it was put is
	// looked at all the same.
	rel, err := cgroupOf(run.PID)
	if now, endErr := readable(run.handle); endErr == nil && now {
		return run, true, nil
	}
	if err == nil && (rel == "" || !strings.HasSuffix(run.group.unified, rel)) {
		err = fmt.Errorf("process %d is in the cgroup %q and not in %s", run.PID, rel, run.group.unified)
	}
	return run, false, err
}

// pidOf is the pid of a pidfd's process, negative where it was reaped (pidfd_open(2)).
func pidOf(handle *os.File) (pid int, err error) {
	raw, err := handle.SyscallConn()
	if err != nil {
		return 0, err
	}
	var readErr error
	err = raw.Control(func(fd uintptr) { pid, readErr = pidOfFD(int(fd)) })
	return pid, errors.Join(err, readErr)
}

func pidOfFD(handle int) (int, error) {
	info, err := os.ReadFile(filepath.Join("/proc/self/fdinfo", strconv.Itoa(handle)))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if value, ok := strings.CutPrefix(line, "Pid:"); ok {
			return strconv.Atoi(strings.TrimSpace(value))
		}
	}
	return 0, errors.New("what was kept as a command's process is none")
}

// followAdopted waits for the end of a command that somebody else reaps.
func (r *Running) followAdopted() {
	defer close(r.done)
	defer r.handle.Close()
	r.exit = Exit{Unknown: true}
	if awaitEnd(r.handle) != nil {
		return
	}
	raw, err := r.handle.SyscallConn()
	if err == nil {
		err = r.handle.SetReadDeadline(time.Now().Add(reportGrace))
	}
	if err != nil {
		return
	}
	raw.Read(func(fd uintptr) (known bool) { // again when it is reaped, or at the deadline
		r.exit, known = endOf(int(fd), r.PID)
		return known
	})
}

// endOf says how the process of a pidfd that has ended did. known is false where that may still come.
func endOf(handle, pid int) (e Exit, known bool) {
	before, err := pidOfFD(handle)
	if err != nil {
		return Exit{Unknown: true}, true
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	if err := unix.IoctlPidfdInfo(handle, &info); err == nil && info.Mask&unix.PIDFD_INFO_EXIT != 0 {
		return exitOf(unix.WaitStatus(info.Exit_code)), true
	}
	if before < 0 {
		return Exit{Unknown: true}, true // it was reaped, and this kernel does not tell
	}
	status, ok := zombieStatus(pid)
	if after, err := pidOfFD(handle); err == nil && after == pid && ok {
		return exitOf(status), true // the pid was its own all the while
	}
	return Exit{Unknown: true}, false
}

// zombieStatus reads how a process ended that nobody has reaped (proc_pid_stat(5), exit_code).
func zombieStatus(pid int) (unix.WaitStatus, bool) {
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return 0, false
	}
	fields := bytes.Fields(raw[bytes.LastIndexByte(raw, ')')+1:])
	const state, exitCode = 0, 49 // the third and the last but none, behind the name
	if len(fields) <= exitCode || string(fields[state]) != "Z" {
		return 0, false
	}
	n, err := strconv.ParseUint(string(fields[exitCode]), 10, 32)
	if err != nil || n > math.MaxUint16 {
		return 0, false
	}
	return unix.WaitStatus(n), true
}
