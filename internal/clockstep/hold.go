package clockstep

import (
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"golang.org/x/sys/unix"
)

// What the helper says, a line each.
const (
	saidStepped = "stepped\n"
	saidLate    = "late\n" // it took the step back by itself, because its time was over
)

// lockFD is the helper's descriptor of the locked note.
const lockFD = 3

// Hold is the helper: it moves the clock by an amount and back, as soon as in ends or limit is over. Start starts it.
// From there on the process takes no signal that can be ignored: it ends soon enough.
func Hold(by, limit time.Duration, in io.Reader, out io.Writer) error {
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGPIPE)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		io.Copy(io.Discard, in) // that it ends is what counts
	}()
	t := time.NewTimer(limit) // on the monotonic clock
	defer t.Stop()
	if err := adjust(by); err != nil {
		return err
	}
	_, lost := io.WriteString(out, saidStepped) // where nobody listens, nobody waits
	late := false
	if lost == nil {
		select {
		case <-ended:
		case <-t.C:
			late = true
		}
	}
	if err := adjust(-by); err != nil {
		return err
	}
	if late {
		io.WriteString(out, saidLate) // as above
	}
	f := os.NewFile(lockFD, noteFile)
	if f == nil {
		return fmt.Errorf("the clock is right again; %s was not handed over", noteFile)
	}
	return f.Truncate(0)
}
