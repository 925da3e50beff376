package supervise

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// startIn starts cmd so that not one instruction of it runs outside the cgroup at dir: the new program is
// held at its first instruction by ptrace(2), prepared and moved, and let go. prepare gets its pid.
//
// clone3's CLONE_INTO_CGROUP would be simpler, but does not go together with cgroup.kill: since Linux 6.13 a
// child that is born into a cgroup which was ever killed is killed at birth, because the kernel compares the
// kill count of the parent's cgroup with that of the child's (cgroup_post_fork in kernel/cgroup/cgroup.c).
func startIn(cmd *exec.Cmd, dir string, prepare func(pid int)) error {
	runtime.LockOSThread() // a tracer is a thread
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr.Ptrace = true
	if err := cmd.Start(); err != nil {
		return err
	}
	err := holdAndMove(cmd.Process.Pid, dir, prepare)
	if err == nil {
		return nil
	}
	cmd.Process.Kill() // it may be gone already
	cmd.Wait()         // killed on purpose
	return fmt.Errorf("moving it into its cgroup: run `tagout setup` again: %w", err)
}

func holdAndMove(pid int, dir string, prepare func(pid int)) error {
	var status unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &status, unix.WALL, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return fmt.Errorf("waiting for its first instruction: %w", err)
		}
		break
	}
	if !status.Stopped() {
		return fmt.Errorf("it ended before its first instruction: %v", status)
	}
	prepare(pid)
	procs := filepath.Join(dir, "cgroup.procs")
	if err := os.WriteFile(procs, []byte(strconv.Itoa(pid)), 0); err != nil {
		return err
	}
	if err := syscall.PtraceDetach(pid); err != nil {
		return fmt.Errorf("letting it go: %w", err)
	}
	return nil
}
