package main

import "time"

var _ = register(technique{
	Name:   "orphans",
	What:   "forty grandchildren by double fork, each in a session of its own and called like a kernel thread",
	Layers: []string{"session"},
	Signs:  []sign{{What: "renamed", N: 40}},
	run:    orphans,
})

func orphans(s *scene) error {
	for s.done.Load() < 40 {
		if forkSleeper(false) == 0 {
			s.did()
		} else {
			s.denied()
			time.Sleep(retryEvery)
		}
	}
	return nil
}
