package card

import (
	"fmt"
	"math"
	"strconv"
	"time"

	"tagout/internal/yamlx"
)

// Sizes, in bytes.
const (
	kib int64 = 1 << 10
	mib       = kib << 10
	gib       = mib << 10
)

// readSize reads a number with a binary unit, between low and high bytes; def stands for a missing key.
func readSize(v yamlx.Value, def, low, high int64) int64 {
	if n, ok := v.Size(low, high); ok {
		return n
	}
	return def
}

// readCount reads a whole number from low to high.
func readCount(v yamlx.Value, def, low, high int64) int64 {
	n, ok := v.Int()
	if !ok {
		return def
	}
	if n < low || n > high {
		v.Refuse(fmt.Sprintf("write a number from %d to %d", low, high), "%d is out of range", n)
		return def
	}
	return n
}

// readCores reads a number of CPU cores, fractions allowed.
func readCores(v yamlx.Value, def, low, high float64) float64 {
	n, ok := v.Number()
	if !ok {
		return def
	}
	if n < low || n > high || math.IsNaN(n) {
		v.Refuse(fmt.Sprintf("write a number from %g to %g", low, high), "%g is out of range", n)
		return def
	}
	return n
}

// readDuration reads a duration as Go writes it, from low to high.
func readDuration(v yamlx.Value, low, high time.Duration) time.Duration {
	s, ok := v.Text()
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		v.Refuse("write a number with ms, s, m or h behind it, such as `10s`", "%s is not a duration", yamlx.Quote(s))
	case d < low || d > high:
		v.Refuse(fmt.Sprintf("write a time from %s to %s", low, formatTime(high)), "%s is out of range", s)
	}
	return d
}

func formatTime(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'g', -1, 64) + "s" }
