package main

import (
	"fmt"
	"syscall"
	"time"
)

var _ = register(technique{
	Name:   "signals",
	What:   "eight processes that ignore every signal that can be ignored, and are sent them all the time",
	Layers: []string{"session"},
	Signs:  []sign{{What: "processes", N: 10}, {What: "work", N: 50}},
	run:    shrugOff,
	roles: map[string]func(*scene){"target": func(*scene) {
		fmt.Println("deaf") // from here on
		forever()
	}},
})

// shrugOff counts signals after which the target was still there.
func shrugOff(s *scene) error {
	var pids []int
	for range 8 {
		cmd := child(s.config, "target")
		deaf, err := cmd.StdoutPipe()
		if err == nil {
			err = cmd.Start()
		}
		if err == nil {
			_, err = deaf.Read(make([]byte, 1)) // one that has only begun still hears
		}
		if err != nil {
			return err
		}
		pids = append(pids, cmd.Process.Pid)
	}
	signals := []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGALRM}
	for i := 0; ; i++ {
		pid := pids[i%len(pids)]
		err := syscall.Kill(pid, signals[i%len(signals)])
		if err == nil && syscall.Kill(pid, 0) == nil {
			s.did()
		}
		time.Sleep(time.Millisecond)
	}
}
