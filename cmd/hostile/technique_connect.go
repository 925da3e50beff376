package main

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"time"
)

var _ = register(technique{
	Name:   "connect",
	What:   "tunnels by CONNECT through the explicit proxy, kept alive with a kilobyte every few milliseconds",
	Layers: []string{"network"},
	Signs:  []sign{{What: "via", Via: "connect", N: 32 << 10}},
	run: func(s *scene) error {
		gw, err := gateway()
		if err != nil {
			return err
		}
		for range 4 {
			go func() {
				for {
					keepTunnel(s, net.JoinHostPort(gw, "3128"))
					time.Sleep(50 * time.Millisecond)
				}
			}()
		}
		return nil
	},
})

func keepTunnel(s *scene, proxy string) {
	conn, err := dial(proxy)
	if err != nil {
		return
	}
	defer conn.Close() // it failed
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", s.ticks, s.ticks)
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodConnect})
	if err != nil || resp.StatusCode != http.StatusOK {
		s.denied()
		return
	}
	trickle(s, conn, "connect")
}

// trickle sends a kilobyte every few milliseconds until that fails.
func trickle(s *scene, conn net.Conn, via string) {
	err := send(conn, fmt.Appendf(nil, "bulk %s %s\n", s.tag, via))
	for err == nil {
		err = send(conn, make([]byte, 1<<10))
		s.did()
		time.Sleep(3 * time.Millisecond)
	}
}
