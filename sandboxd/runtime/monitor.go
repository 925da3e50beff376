package runtime

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"time"

	gorunc "github.com/containerd/go-runc"
	"golang.org/x/sys/unix"
)

// lingering is how long a call's output may stay open when the call itself has ended.
const lingering = time.Second

// monitor is how go-runc starts runc and waits for it.
type monitor struct{ gorunc.ProcessMonitor }

// go-runc has one for the process, to be set before it is used.
func init() { gorunc.Monitor = monitor{gorunc.Monitor} }

// Start starts a call that takes what it has started with it. One that makes a container is started in a new time
// namespace.
func (m monitor) Start(c *exec.Cmd) (chan gorunc.Exit, error) {
	bound(c)
	if creates(c) {
		return inOwnTime(func() (chan gorunc.Exit, error) { return m.ProcessMonitor.Start(c) })
	}
	return m.ProcessMonitor.Start(c)
}

// StartLocked is Start, for a caller whose end ends the call.
func (m monitor) StartLocked(c *exec.Cmd) (chan gorunc.Exit, error) {
	bound(c)
	return m.ProcessMonitor.StartLocked(c)
}

// bound puts a call of the runtime's program into a process group of its own. When its time is over, all of that is killed:
// the program's children would otherwise run on, and hold the call's output open.
func bound(c *exec.Cmd) {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Setpgid = true
	c.WaitDelay = lingering
	c.Cancel = func() error {
		err := unix.Kill(-c.Process.Pid, unix.SIGKILL)
		if errors.Is(err, unix.ESRCH) {
			return os.ErrProcessDone
		}
		return err
	}
}
