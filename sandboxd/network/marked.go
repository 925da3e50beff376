package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"time"

	"tagout/internal/cgroup"
)

// arrival is how long a packet that was sent over loopback may take.
const arrival = 500 * time.Millisecond

// refusedCode is what kid-init ends with where a program at its cgroup dropped its packet.
const refusedCode = 3

// SendMarked sends one packet with a session's mark out of a cgroup of the v2 hierarchy, to this machine itself, and
// says whether it arrived. The programs at that cgroup judge it as they judge those of the daemon that lives there,
// which has no part in it and need not be alive: a socket belongs to the cgroup in which it was made. sender is the
// path of kid-init, which is in the cgroup for some milliseconds.
func SendMarked(ctx context.Context, sender, cgroupDir string, mark uint32, nonce string) (arrived bool, err error) {
	what := "sending a packet from " + cgroupDir
	sink, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.1:0")))
	if err != nil {
		return false, fmt.Errorf("%s: %w", what, err)
	}
	defer sink.Close() // only read
	port := sink.LocalAddr().(*net.UDPAddr).Port
	cmd := exec.CommandContext(ctx, sender, "packet", strconv.FormatUint(uint64(mark), 10), strconv.Itoa(port), nonce)
	err = runIn(cgroupDir, cmd)
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() == refusedCode:
		return false, nil
	case err != nil:
		return false, fmt.Errorf("%s: %w", what, err)
	}
	return arrives(sink, nonce)
}

// runIn runs a command that waits for the end of its standard input, and moves it to a cgroup meanwhile. It is not born
// there (CLONE_INTO_CGROUP): since Linux 6.14 the kernel kills such a child where its parent's own cgroup was ever killed
// through cgroup.kill more or less often than the other, as that of a daemon which was started again.
func runIn(dir string, cmd *exec.Cmd) error {
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	joined := cgroup.Join(dir, cmd.Process.Pid)
	if joined != nil {
		cmd.Process.Kill() // it has sent nothing
	}
	in.Close() // lets it go
	return errors.Join(joined, cmd.Wait())
}

// arrives waits for the packet.
func arrives(sink *net.UDPConn, nonce string) (bool, error) {
	if err := sink.SetReadDeadline(time.Now().Add(arrival)); err != nil { // monotonic
		return false, err
	}
	buf := make([]byte, 512)
	for {
		n, _, err := sink.ReadFromUDPAddrPort(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return false, nil
		}
		if err != nil {
			return false, fmt.Errorf("waiting for a packet: %w", err)
		}
		if bytes.Equal(buf[:n], []byte(nonce)) {
			return true, nil
		}
	}
}
