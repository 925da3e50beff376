// Command kid-init is the first process of every kid. It keeps the kid's namespaces alive, reaps what the kid's
// processes orphan, and forks a child for every command that sandboxd orders over the socket that it inherited
// (package kidinit). Nobody else can order anything: there is no other way to it. No process of the kid can end it: it
// runs under a uid of its own, so that they may not signal or trace it.
//
// It holds three capabilities, in the kid's own user namespace alone: to change uid and gid, which its children do
// before they become a command, and to give up capabilities, which they do too. sandboxd believes nothing of what it
// says but how a command ended.
//
// With the argument "hold" it waits for the end of its standard input instead: that is how sandboxd holds a
// new user and network namespace open until it has pinned them. With "proof ADDRESS NAME" it looks NAME up at the
// resolver at ADDRESS, again and again: that is the kid of one of killswitchd's proofs. With "packet MARK PORT TEXT" it
// sends one packet over loopback and ends: that is another part of them. With "tty COMMAND…" it makes its standard
// input its controlling terminal and becomes the command. With "store" it is a store of descriptors (package fdstore): that
// is how the commands of a box outlive its sandboxd.
package main

import (
	"os"
	"os/signal"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"tagout/internal/kidinit"
)

func main() {
	debug.SetGCPercent(-1) // nothing below allocates as long as it runs
	if len(os.Args) > 2 && os.Args[1] == "tty" {
		withTerminal(os.Args[2:])
	}
	signal.Ignore()
	if len(os.Args) > 1 && os.Args[1] == "store" {
		keep()
	}
	if len(os.Args) == 2 && os.Args[1] == "hold" {
		hold()
		return
	}
	if len(os.Args) == 5 && os.Args[1] == "packet" {
		sendMarked(os.Args[2], os.Args[3], os.Args[4])
	}
	if os.Getpid() != 1 { // somebody in the kid has started it
		os.Exit(2)
	}
	if len(os.Args) == 4 && os.Args[1] == "proof" {
		lookUp(os.Args[2], os.Args[3])
	}
	if kind, err := unix.GetsockoptInt(kidinit.MasterFD, unix.SOL_SOCKET, unix.SO_TYPE); err == nil && kind == unix.SOCK_SEQPACKET {
		unix.CloseOnExec(kidinit.MasterFD)
		newServer(kidinit.MasterFD).serve()
	}
	wait()
}

// wait keeps the namespaces alive and reaps, when nobody gives orders or ever will again.
func wait() {
	signal.Ignore(unix.SIGCHLD) // the kernel reaps by itself (wait(2), NOTES)
	for {
		if _, err := unix.Wait4(-1, nil, 0, nil); err == unix.ECHILD {
			unix.Pause() // it only ever returns EINTR
		}
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
