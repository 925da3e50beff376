// Command kid-init is the first process of every kid. It does nothing but keep the kid's namespaces alive:
// every command of a kid is started beside it. The kernel itself reaps what the kid's processes orphan,
// because kid-init ignores SIGCHLD (wait(2), NOTES). No process of the kid can end it: it runs under a uid of
// its own, so that they may not signal or trace it.
//
// With the argument "hold" it waits for the end of its standard input instead: that is how sandboxd holds a
// new user and network namespace open until it has pinned them. With "proof ADDRESS NAME" it looks NAME up at the
// resolver at ADDRESS, again and again: that is the kid of one of killswitchd's proofs.
package main

import (
	"os"
	"os/signal"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

func main() {
	debug.SetGCPercent(-1) // it never allocates again
	signal.Ignore()
	if len(os.Args) == 2 && os.Args[1] == "hold" {
		hold()
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "proof" {
		lookUp(os.Args[2], os.Args[3])
	}
	for {
		unix.Pause() // it only ever returns EINTR
	}
}

// hold returns when standard input ends: its other end belongs to sandboxd, also when sandboxd is killed.
func hold() {
	var b [1]byte
	for {
		n, err := unix.Read(0, b[:])
		if n == 0 && err == nil || err != nil && err != unix.EINTR {
			return
		}
	}
}
