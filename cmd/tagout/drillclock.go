package main

import (
	"context"
	"os"
	"time"

	"github.com/spf13/cobra"

	"tagout/internal/clockstep"
	"tagout/internal/drill"
	"tagout/internal/instance"
)

// holdClock is the name of the command that clockHelper starts.
const holdClock = "hold-clock"

// holdClockCommand holds the step of a drill's clock. It is a process of its own so that it steps back when the drill
// is killed, and it is for nobody else.
func (a *app) holdClockCommand() *cobra.Command {
	return &cobra.Command{
		Use: holdClock, Short: "Hold the machine's clock an hour forward until standard input ends (a drill does it)", Args: cobra.NoArgs, Hidden: true,
		RunE: func(*cobra.Command, []string) error {
			return clockstep.Hold(drill.ClockStep, drill.ClockLimit, a.in, a.out)
		},
	}
}

// clockHelper is the command line of this program as the one who holds the clock.
func clockHelper() ([]string, error) {
	self, err := os.Executable()
	return []string{self, "drill", holdClock}, err
}

// clockWait is how long a drill may have the clock stepped, and some more.
const clockWait = 5 * time.Second

// rightClock puts the clock right that a drill which was killed left stepped.
func rightClock(instance.Instance) error {
	ctx, cancel := context.WithTimeout(context.Background(), clockWait)
	defer cancel()
	return clockstep.Recover(ctx)
}
