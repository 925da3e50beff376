// Package priority gives processes their place in the queue for the processors. A stop must not wait behind the
// processes that it stops, of which there may be thousands.
//
// Where the kernel groups the processes of a session (autogroup, sched(7)), nice values count within the group alone,
// and the group has a value of its own. So both are set. On pure cgroup v2 the weights that setup gave the daemons'
// cgroups come on top.
package priority

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// First is the value of what comes before everything else (setpriority(2)).
const First = -20

// Give gives a process that leads a session of its own, and has one thread yet, the nice value; threads that it makes
// later inherit it.
func Give(pid, nice int) error {
	err := unix.Setpriority(unix.PRIO_PROCESS, pid, nice)
	groupErr := writeGroup(fmt.Sprintf("/proc/%d/autogroup", pid), nice)
	if errors.Is(groupErr, os.ErrNotExist) { // this kernel has no such groups
		groupErr = nil
	}
	return errors.Join(err, groupErr)
}

// Raise lets this process come before everything else until giveBack is called, as far as it may: what is refused is
// left out, and giveBack is never nil. The group of its session is shared with whoever started it, so giveBack must be
// called; a group that comes first already is somebody else's to give back.
func Raise() (giveBack func()) {
	const group = "/proc/self/autogroup"
	undo := func() {}
	if old, err := groupNice(group); err == nil && old != First && writeGroup(group, First) == nil {
		undo = func() { writeGroup(group, old) } // the session may be over
	}
	old, err := niceOf(0)
	if err != nil || old == First {
		return undo
	}
	setThreads(First)
	return func() {
		setThreads(old)
		undo()
	}
}

// setThreads sets every thread of this process, as far as it may; those that are made later inherit it.
func setThreads(nice int) {
	tasks, _ := filepath.Glob("/proc/self/task/*") // the pattern is right
	for _, task := range tasks {
		if tid, err := strconv.Atoi(filepath.Base(task)); err == nil {
			unix.Setpriority(unix.PRIO_PROCESS, tid, nice) // gone, or refused: as before
		}
	}
}

// niceOf returns the nice value of a thread; 0 is this one. The system call returns 20 less it (getpriority(2), C
// library/kernel differences).
func niceOf(tid int) (int, error) {
	got, err := unix.Getpriority(unix.PRIO_PROCESS, tid)
	return 20 - got, err
}

func writeGroup(file string, nice int) error {
	return os.WriteFile(file, []byte(strconv.Itoa(nice)), 0)
}

// groupNice reads the value of a group, whose file says "/autogroup-ID nice VALUE".
func groupNice(file string) (int, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	_, value, found := bytes.Cut(raw, []byte(" nice "))
	if !found {
		return 0, fmt.Errorf("reading %s: %q names no nice value", file, raw)
	}
	return strconv.Atoi(string(bytes.TrimSpace(value)))
}
