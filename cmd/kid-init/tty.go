package main

import (
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// withTerminal is for a command that did not come through kid-init: it has a session of its own, and standard input
// is a terminal that is not its controlling one yet.
func withTerminal(argv []string) {
	err := unix.IoctlSetInt(0, unix.TIOCSCTTY, 0)
	path := ""
	if err == nil {
		path, err = exec.LookPath(argv[0])
	}
	if err == nil {
		err = unix.Exec(path, argv, os.Environ())
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(127)
}
