package killswitch

import (
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// leaderlessEnv makes this binary a process whose first thread has ended and whose second has not.
const leaderlessEnv = "TAGOUT_TEST_LEADERLESS"

func init() {
	if os.Getenv(leaderlessEnv) == "" {
		return
	}
	runtime.LockOSThread() // init runs on the first thread
	up := make(chan struct{})
	go func() {
		runtime.LockOSThread()
		close(up)
		for {
			unix.Pause() // returns after a signal
		}
	}()
	<-up
	unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0) // of this thread alone
}

// TestAZombieWithALivingThreadIsSaidToLive (S06): what holds a killed process may be a thread that is not its first,
// and /proc/PID/stat says of the process that it is a zombie.
func TestAZombieWithALivingThreadIsSaidToLive(t *testing.T) {
	cmd := exec.Command("/proc/self/exe", "-test.run=^$")
	cmd.Env = append(os.Environ(), leaderlessEnv+"=1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill() // it may have ended
		cmd.Wait()         // killed
	}()
	var p Process
	for end := time.Now().Add(10 * time.Second); p.State != "Z"; runtime.Gosched() {
		var ok bool
		if p, ok = readStat(strconv.Itoa(cmd.Process.Pid)); !ok || time.Now().After(end) {
			t.Fatalf("its first thread did not end: %+v", p)
		}
	}
	p.PID = cmd.Process.Pid
	if got := holding(p); got == "Z" || got == "X" {
		t.Errorf("state %s, and a thread lives", got)
	}
}
