package wire

import "time"

// Watched is sandboxd's word, renewed every second in a file of the run directory, that it watches which programs
// kids start and which files they write.
type Watched struct {
	At       time.Duration `json:"at_ns"` // CLOCK_BOOTTIME
	Sessions []string      `json:"sessions"`
}
