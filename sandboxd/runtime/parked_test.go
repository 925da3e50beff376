package runtime

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

// TestSignalsEndNoChild: those that Go's runtime sends to its own threads end a poll(2) that does not even wait, and the
// child of kid-init that was looked at was taken for dead.
func TestSignalsEndNoChild(t *testing.T) {
	cmd := exec.Command("/bin/sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // killed on purpose
	handle, err := pidfd(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close() // only looked at
	p := &parked{handle: handle}
	done := make(chan struct{})
	signalled := make(chan int)
	go func() {
		for n := 0; ; n++ {
			select {
			case <-done:
				signalled <- n
				return
			default:
				unix.Kill(os.Getpid(), unix.SIGURG) // we are there
			}
		}
	}()
	dead := 0
	for range 200_000 {
		if !p.alive() {
			dead++
		}
	}
	close(done)
	if n := <-signalled; dead > 0 || n < 100 {
		t.Errorf("a living child was taken for dead %d times, at %d signals", dead, n)
	}
}
