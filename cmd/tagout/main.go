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
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGINT, unix.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}
