package main

import (
	"fmt"
	"time"
)

var _ = register(technique{
	Name:   "queued",
	What:   "eight uploads to a reader that has all but stopped: 4 MB wait in the kernel's queues on the way",
	Layers: []string{"network", "session"},
	Signs:  []sign{{What: "queued", N: 4 << 20}},
	run: func(s *scene) error {
		for range 8 {
			go queue(s)
		}
		return nil
	},
})

// queue writes for as long as the kernel takes it; work is in bytes.
func queue(s *scene) {
	block := make([]byte, 16<<10)
	for {
		conn, err := dial(s.ticks)
		if err != nil {
			continue
		}
		_, err = fmt.Fprintf(conn, "slow %s queued\n", s.tag)
		for err == nil {
			var n int
			n, err = conn.Write(block)
			s.done.Add(int64(n))
		}
		conn.Close() // it failed
		time.Sleep(50 * time.Millisecond)
	}
}
