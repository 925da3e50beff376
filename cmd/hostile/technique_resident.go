package main

import (
	"time"

	"golang.org/x/sys/unix"
)

var _ = register(technique{
	Name:   "resident",
	What:   "four processes that fill most of the memory that the card allows: the kernel frees it page by page",
	Layers: []string{"session"},
	Signs:  []sign{{What: "resident"}},
	run: func(s *scene) error {
		for range 4 {
			if _, err := s.spawnRole("filler"); err != nil {
				return err
			}
		}
		return nil
	},
	roles: map[string]func(*scene){"filler": fill},
})

func fill(s *scene) {
	mem, err := unix.Mmap(-1, 0, int(s.memory/4), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return
	}
	for {
		for i := 0; i < len(mem); i += 4096 {
			mem[i]++
		}
		time.Sleep(50 * time.Millisecond)
	}
}
