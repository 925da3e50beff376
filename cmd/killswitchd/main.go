// Command killswitchd is the watchdog of a Tagout instance; see package killswitch.
package main

import (
	"tagout/internal/daemon"
	"tagout/internal/instance"
)

func main() { daemon.Main(instance.Killswitchd, run) }
