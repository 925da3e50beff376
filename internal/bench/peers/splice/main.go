// Command splice is the least that a relay can be: it accepts, connects to one fixed server and lets the kernel
// move the bytes. It checks nothing, records nothing and marks nothing; benchmarks measure real proxies by it.
//
//	splice LISTEN SERVER
package main

import (
	"io"
	"log"
	"net"
	"os"
)

func main() {
	l, err := net.Listen("tcp4", os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	for {
		c, err := l.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go relay(c.(*net.TCPConn), os.Args[2])
	}
}

func relay(c *net.TCPConn, to string) {
	defer c.Close()
	s, err := net.Dial("tcp4", to)
	if err != nil {
		return
	}
	defer s.Close()
	go oneWay(s.(*net.TCPConn), c)
	oneWay(c, s.(*net.TCPConn))
}

func oneWay(dst, src *net.TCPConn) {
	io.Copy(dst, src) // splice(2)
	dst.CloseWrite()
}
