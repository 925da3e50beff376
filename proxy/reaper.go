package proxy

import (
	"context"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// reap ends idle connections and writes the interim counts of long ones, until ctx ends. The kernel keeps the
// clock (TCP_INFO): relayed bytes pass no code of ours that could.
func (p *Proxy) reap(ctx context.Context) {
	l := p.cfg.Limits
	tick := time.NewTicker(max(min(l.Idle, l.Progress)/4, 10*time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, e := range p.sessions.all() {
			for _, c := range e.live() {
				c.tend(time.Now())
			}
		}
	}
}

// tend looks after one connection. Called by the reaper only.
func (c *conn) tend(now time.Time) {
	l := c.p.cfg.Limits
	for _, s := range c.sockets() {
		if !s.kept {
			s.kept = s.control(keepAlive) == nil // closed: there is no need any more
		}
	}
	if now.Sub(c.start) > l.Idle && c.quiet() > l.Idle {
		c.cut(reason.Idle, "no byte in either direction for "+l.Idle.String())
		return
	}
	late := now.Sub(c.progress)
	if late < l.Progress {
		return
	}
	c.progress = c.progress.Add(late.Truncate(l.Progress)) // from the start on: one look that is late delays no later one
	c.mu.Lock()
	opened, tunnel := c.opened, c.tunnel
	c.mu.Unlock()
	if !opened {
		return
	}
	r := c.record(audit.EventConnProgress, audit.OutcomeOK, reason.OK, "")
	r.Bytes = &audit.Bytes{Up: c.up.Load(), Down: c.down.Load()}
	if info, ok := tcpInfo(tunnel); ok { // what the relay's last step has not told yet
		r.Bytes.Up = max(r.Bytes.Up, int64(info.Bytes_sent-info.Bytes_retrans)) // below 1<<63
		r.Bytes.Down = max(r.Bytes.Down, int64(info.Bytes_received))            // below 1<<63
	}
	r.Fields["duration_ms"] = millis(now.Sub(c.start))
	c.p.cfg.Audit.Log(r)
}

// quiet returns for how long no byte has moved on any of the connection's sockets.
func (c *conn) quiet() time.Duration {
	quiet := time.Since(c.start)
	for _, tc := range append(c.sockets(), c.client) {
		info, ok := tcpInfo(tc)
		if !ok {
			continue
		}
		last := min(info.Last_data_recv, info.Last_data_sent)
		quiet = min(quiet, time.Duration(last)*time.Millisecond)
	}
	return quiet
}

// tcpInfo reads TCP_INFO (tcp(7), linux/tcp.h); ok is false for nil and for a closed socket.
func tcpInfo(tc *sock) (info *unix.TCPInfo, ok bool) {
	if tc == nil {
		return nil, false
	}
	err := tc.control(func(fd int) (err error) {
		info, err = unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		return err
	})
	return info, err == nil
}
