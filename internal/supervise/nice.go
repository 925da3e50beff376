package supervise

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

// favour gives a process that leads a session of its own, and has one thread yet, its place in the queue for
// the processors; threads that it makes later inherit it. Where the kernel groups the processes of a session
// (autogroup, sched(7)), nice values count within the group alone, and the group has a value of its own. On
// pure cgroup v2 the weights that setup gave the daemons' cgroups come on top.
func favour(pid, nice int) error {
	err := unix.Setpriority(unix.PRIO_PROCESS, pid, nice)
	file := fmt.Sprintf("/proc/%d/autogroup", pid)
	groupErr := os.WriteFile(file, []byte(strconv.Itoa(nice)), 0)
	if errors.Is(groupErr, os.ErrNotExist) { // this kernel has no such groups
		groupErr = nil
	}
	return errors.Join(err, groupErr)
}
