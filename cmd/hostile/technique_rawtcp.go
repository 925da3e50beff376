package main

import "time"

var _ = register(technique{
	Name:   "rawtcp",
	What:   "ten plain TCP connections to an allowed name, each sending all the time",
	Layers: []string{"network"},
	Signs:  []sign{{What: "via", Via: "raw", N: 64 << 10}},
	run: func(s *scene) error {
		for range 10 {
			go func() {
				for {
					if conn, err := dial(s.ticks); err == nil {
						trickle(s, conn, "raw")
						conn.Close() // it failed
					}
					time.Sleep(50 * time.Millisecond)
				}
			}()
		}
		return nil
	},
})
