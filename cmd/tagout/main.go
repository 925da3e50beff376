// Command tagout is the operator's CLI: it sets boxes up and removes them, runs their daemons, spawns and stops
// kids, and reads their logs. It talks to the daemons over their sockets and decides nothing itself.
package main

import (
	"context"
	"os"
	"os/signal"

	"golang.org/x/sys/unix"
)

// version is set by the build.
var version = "unknown"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), ends()...)
	// A reader that goes away must not end a command that has something to take down: writes fail instead.
	signal.Notify(make(chan os.Signal, 1), unix.SIGPIPE)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// ends lists the signals that call a command off, which then takes down what it made. Under nohup(1) a hang-up
// is not one of them.
func ends() []os.Signal {
	out := []os.Signal{unix.SIGINT, unix.SIGTERM}
	if !signal.Ignored(unix.SIGHUP) {
		out = append(out, unix.SIGHUP)
	}
	return out
}
