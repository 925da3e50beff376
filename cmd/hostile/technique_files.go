package main

import (
	"time"

	"golang.org/x/sys/unix"
)

var _ = register(technique{
	Name:   "files",
	What:   "pipes and sockets up to the limit of open files, each to be closed when the process dies",
	Layers: []string{"session", "network"},
	Signs:  []sign{{What: "files"}, {What: "refused", N: 1}},
	run:    exhaust,
})

func exhaust(s *scene) error {
	for {
		var p [2]int
		err := unix.Pipe2(p[:], unix.O_CLOEXEC)
		if err == nil {
			unix.Write(p[1], make([]byte, 4096)) // so that there is something to throw away
			_, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
		}
		if err != nil {
			s.denied()
			time.Sleep(10 * time.Millisecond)
			continue
		}
		s.did()
	}
}
