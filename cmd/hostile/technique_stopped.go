package main

import (
	"syscall"
	"time"
)

var _ = register(technique{
	Name:   "stopped",
	What:   "twelve processes stopped with SIGSTOP, which no signal but SIGKILL and SIGCONT reaches",
	Layers: []string{"session"},
	Signs:  []sign{{What: "stopped", N: 12}},
	run:    stopAll,
	roles:  map[string]func(*scene){"target": idle},
})

func stopAll(s *scene) error {
	for range 12 {
		cmd, err := s.spawnRole("target")
		if err != nil {
			return err
		}
		go func() {
			for {
				if cmd.Process.Signal(syscall.SIGSTOP) == nil {
					s.did()
				}
				time.Sleep(50 * time.Millisecond) // again, should anybody wake it
			}
		}()
	}
	return nil
}
