package main

import (
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// diskDir is where the drill mounts a disk into the kid, and freezes it.
const diskDir = "/workspace/disk"

var _ = register(technique{
	Name:   "diskwait",
	What:   "two processes that write to a disk which has stopped answering: not even SIGKILL ends them before it does",
	Layers: []string{"session"},
	Signs:  []sign{{What: "uninterrupted", N: 2}},
	Host:   "disk",
	run: func(s *scene) error {
		for range 2 {
			if _, err := s.spawnRole("writer"); err != nil {
				return err
			}
		}
		return nil
	},
	roles: map[string]func(*scene){"writer": writeDisk},
})

// writeDisk waits for the disk and then writes for ever.
func writeDisk(*scene) {
	file := filepath.Join(diskDir, strconv.Itoa(os.Getpid()))
	for {
		if err := os.WriteFile(file, make([]byte, 64<<10), 0o600); err != nil {
			time.Sleep(10 * time.Millisecond) // it is not there yet
		}
		time.Sleep(time.Millisecond)
	}
}
