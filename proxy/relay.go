package proxy

import (
	"errors"
	"io"
	"net"
	"sync"
)

// relayStep is after how many bytes of a direction the counters are brought up to date. Within a step bytes
// move from socket to socket inside the kernel (splice(2)).
const relayStep = 1 << 20

// relay moves bytes both ways until both directions have ended. The end of one direction is passed on as
// such (half-close); a direction that breaks takes the other one with it, as a reset. count gets every byte
// that the other side took.
func relay(client, server *net.TCPConn, count func(up, down int64)) error {
	var wg sync.WaitGroup
	var upErr, downErr error
	wg.Go(func() { upErr = oneWay(server, client, func(n int64) { count(n, 0) }) })
	downErr = oneWay(client, server, func(n int64) { count(0, n) })
	wg.Wait()
	return errors.Join(upErr, downErr)
}

func oneWay(dst, src *net.TCPConn, count func(int64)) error {
	for {
		// net.TCPConn.ReadFrom splices from a TCPConn inside a LimitedReader.
		n, err := dst.ReadFrom(&io.LimitedReader{R: src, N: relayStep})
		count(n)
		if err != nil {
			reset(dst)
			reset(src)
			return err
		}
		if n < relayStep {
			// The reader is gone already where this fails, and the other direction finds out.
			dst.CloseWrite() //nolint:errcheck // see above
			return nil
		}
	}
}
