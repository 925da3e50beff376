package runtime

import (
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"slices"

	gorunc "github.com/containerd/go-runc"
	"golang.org/x/sys/unix"
)

// creates says whether a call of runc makes a container.
func creates(c *exec.Cmd) bool { return slices.Contains(c.Args, "create") }

// inOwnTime calls start on a thread whose children are born in a time namespace of their own, in which the monotonic
// clock starts at nought (time_namespaces(7)): the runc of Debian 12 knows no such namespaces, so it is started in one. The
// boot clock is left as it is: runc tells processes by when they started on it, from inside and from outside. The thread
// ends with the call, so start must not make it the one whose end kills the child. Linux before 6.1 cannot do that for a
// child that shares its parent's memory until it runs another program.
func inOwnTime(start func() (chan gorunc.Exit, error)) (exit chan gorunc.Exit, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		goruntime.LockOSThread() // for good: nothing else may run on it
		if err = newTime(); err == nil {
			exit, err = start()
		}
	}()
	<-done
	return exit, err
}

func newTime() error {
	if err := unix.Unshare(unix.CLONE_NEWTIME); err != nil {
		return fmt.Errorf("making a time namespace: Linux 6.1 or later, built with CONFIG_TIME_NS, is needed: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return fmt.Errorf("reading the clock: %w", err)
	}
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/timens_offsets", unix.Gettid()), fmt.Appendf(nil, "monotonic %d 0\n", -now.Sec), 0); err != nil {
		return fmt.Errorf("setting the clock of a time namespace: %w", err)
	}
	return nil
}

// timeOf is the time namespace of a container's kid-init, for nsenter(1): no process with more than one thread can join
// one (setns(2)), and no Go program ever has just one.
func timeOf(pid int) string { return fmt.Sprintf("/proc/%d/ns/time", pid) }
