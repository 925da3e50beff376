// Package netdump asks the kernel for whole lists. A list of the machine's links comes in parts; where somebody adds or
// removes one in between, another box or a container engine say, the kernel says so and the list may lack what did not
// change. Such a list must not be taken for the truth, nor for a failure: it is asked for again.
package netdump

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
)

// attempts bounds how often a list is asked for. A dump takes a fraction of a millisecond, so that many interruptions
// in a row mean changes without an end.
const attempts = 50

// Whole returns what dump returns once nothing interrupted it, asking again where something did. Where every attempt is
// interrupted it returns no list and an error that wraps netlink.ErrDumpInterrupted; any other error is returned as it
// is, at once.
func Whole[T any](dump func() ([]T, error)) ([]T, error) {
	for range attempts {
		list, err := dump()
		if err == nil {
			return list, nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, err
		}
	}
	return nil, fmt.Errorf("something changes this machine's network faster than it can be listed, %d attempts in a row: find what adds and removes links (`ip monitor link`), then try again: %w",
		attempts, netlink.ErrDumpInterrupted)
}
