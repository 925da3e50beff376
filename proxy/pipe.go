package proxy

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// pipe is what splice(2) needs between two sockets. Only directions in which bytes move hold one.
type pipe struct{ r, w int }

// sparePipes keeps a few for the next direction; what does not fit is closed.
var sparePipes = make(chan *pipe, 32)

// takePipe returns an empty pipe, nil where the process or its user has none left.
func takePipe() *pipe {
	select {
	case p := <-sparePipes:
		return p
	default:
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil
	}
	// A larger pipe moves more in a step. The kernel may refuse (pipe-user-pages-soft, pipe(7)): then it is smaller.
	unix.FcntlInt(uintptr(fds[0]), unix.F_SETPIPE_SZ, spliceMax) // see above
	return &pipe{r: fds[0], w: fds[1]}
}

// giveBack keeps an empty pipe for others and closes any other.
func (p *pipe) giveBack(empty bool) {
	if empty {
		select {
		case sparePipes <- p:
			return
		default:
		}
	}
	p.close()
}

func (p *pipe) close() {
	unix.Close(p.r) // nothing is lost
	unix.Close(p.w) // nothing is lost
}

// trimEvery is how often half of the spare pipes are closed: after a burst their descriptors are free again.
const trimEvery = 2 * time.Second

// trimPipes closes spare pipes until ctx ends.
func trimPipes(ctx context.Context) {
	tick := time.NewTicker(trimEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			dropSpares((len(sparePipes) + 1) / 2)
		}
	}
}

// dropSpares closes up to n spare pipes.
func dropSpares(n int) {
	for range n {
		select {
		case p := <-sparePipes:
			p.close()
		default:
			return
		}
	}
}
