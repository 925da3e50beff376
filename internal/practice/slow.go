package practice

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// A slow reader first reads as fast as it can, until the sender's kernel has learned that it may queue a lot, and
// then little.
const (
	slowAfter = 8 << 20
	slowChunk = 4 << 10
	slowPause = 20 * time.Millisecond
	slowLook  = time.Millisecond // how often the kernel is asked what has arrived
)

// readSlowly reads c slowly until it ends. What counts as arrived is what the kernel received (tcp(7),
// tcpi_bytes_received), not what was read: most of it is read much later.
func (s *Sink) readSlowly(st *Stream, c net.Conn) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return
	}
	ended := make(chan struct{})
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		s.watchArrivals(st, tcp, ended)
	}()
	defer func() {
		close(ended)
		<-watched // it uses the connection, which is closed next
	}()
	buf := make([]byte, 256<<10)
	for read := 0; read < slowAfter; {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		read += n
	}
	for {
		if _, err := c.Read(buf[:slowChunk]); err != nil {
			return
		}
		time.Sleep(slowPause) // this is what makes it slow
	}
}

func (s *Sink) watchArrivals(st *Stream, c *net.TCPConn, ended <-chan struct{}) {
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	tick := time.NewTicker(slowLook)
	defer tick.Stop()
	var last uint64
	for {
		var info *unix.TCPInfo
		err := raw.Control(func(fd uintptr) {
			info, _ = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) // nil says so
		})
		if err != nil {
			return
		}
		if info != nil && info.Bytes_received > last {
			last = info.Bytes_received
			s.mu.Lock()
			st.LastByte, st.Bytes = Now(), int64(last)
			s.mu.Unlock()
		}
		select {
		case <-ended:
			return
		case <-tick.C:
		}
	}
}
