package main

import (
	"syscall"
	"time"
)

var _ = register(technique{
	Name:   "vforkstorm",
	What:   "six threads that vfork and exec without a pause: parents in the kernel, children that live a moment",
	Layers: []string{"session"},
	Signs:  []sign{{What: "work", N: 50}},
	run:    vforkStorm,
})

// vforkStorm relies on package syscall, which forks with CLONE_VFORK|CLONE_VM.
func vforkStorm(s *scene) error {
	for range 6 {
		go func() {
			for {
				pid, err := syscall.ForkExec("/bin/true", []string{"true"}, &syscall.ProcAttr{})
				if err != nil {
					s.denied()
					time.Sleep(retryEvery)
					continue
				}
				s.did()
				syscall.Wait4(pid, nil, 0, nil) // only reaped
			}
		}()
	}
	return nil
}
