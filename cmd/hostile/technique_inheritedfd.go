package main

import (
	"fmt"
	"net"
	"os"
	"time"
)

var _ = register(technique{
	Name:   "inheritedfd",
	What:   "helpers that inherit an open connection from a parent which then closes it: the socket is not the sender's own",
	Layers: []string{"network", "session"},
	Signs:  []sign{{What: "via", Via: "inherited", N: 32 << 10}},
	run: func(s *scene) error {
		for range 4 {
			go func() {
				for {
					if err := bequeath(s); err != nil {
						s.denied()
					}
					time.Sleep(50 * time.Millisecond)
				}
			}()
		}
		return nil
	},
	roles: map[string]func(*scene){"heir": heir},
})

// bequeath opens a connection, hands it to a helper and waits for its end.
func bequeath(s *scene) error {
	conn, err := dial(s.ticks)
	if err != nil {
		return err
	}
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return fmt.Errorf("%T is no TCP connection", conn)
	}
	f, err := tcp.File()
	conn.Close() // f is a copy
	if err != nil {
		return err
	}
	cmd := child(s.config, "heir")
	cmd.ExtraFiles = []*os.File{f}
	err = cmd.Start()
	f.Close() // the helper has its own
	if err != nil {
		return err
	}
	s.did()
	return cmd.Wait()
}

func heir(s *scene) {
	conn, err := net.FileConn(os.NewFile(3, "inherited"))
	if err != nil {
		return
	}
	trickle(s, conn, "inherited")
}
