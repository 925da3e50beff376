package main

import (
	"runtime"
	"syscall"
	"time"
)

var _ = register(technique{
	Name:   "clonestorm",
	What:   "150 threads in one process, and 100 processes cloned with one table of files and one working directory",
	Layers: []string{"session"},
	Signs:  []sign{{What: "threads", N: 250}, {What: "processes", N: 100}},
	run:    cloneStorm,
})

func cloneStorm(s *scene) error {
	stormForks = uintptr(syscall.SIGCHLD) | syscall.CLONE_FS | syscall.CLONE_FILES | syscall.CLONE_SYSVSEM | syscall.CLONE_IO
	for s.done.Load() < 100 {
		if forkSleeper(false) == 0 {
			s.did()
		} else {
			s.denied()
			time.Sleep(retryEvery)
		}
	}
	for range 150 {
		go func() {
			runtime.LockOSThread() // for good
			s.did()
			forever()
		}()
	}
	return nil
}
