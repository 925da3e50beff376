// Package trip holds the rules under which a kid stops itself: what is measured, how much of it is too much, and
// which layers fire then. It is pure. Readings and times come from the caller, who says so when it cannot read
// something: a rule that cannot be evaluated for longer than Grace trips, too.
//
// It promises that a rule trips in the first Look whose readings are beyond its limit, and once. Of a rule over a
// window it promises that no more than the limit ever fits into a window without a trip; a window may turn out
// longer than asked for by a 64th of it and the time between two Looks, never shorter.
package trip

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"tagout/internal/wire"
)

// What a rule can be about. The kinds from Canary on are about events; the others are about amounts.
const (
	Denied       = "denied"       // attempts that were refused, within a window
	BytesOut     = "bytesOut"     // IP bytes that left the box for the kid
	WallTime     = "wallTime"     // since the session was made, on CLOCK_BOOTTIME
	CPUTime      = "cpuTime"      // of all its processes together
	Processes    = "processes"    // processes and threads at one time
	Canary       = "canary"       // a canary credential was used, or a canary name asked for
	TokenMisuse  = "tokenMisuse"  // a token was presented where it does not belong
	Exec         = "exec"         // a forbidden program was started
	WriteOutside = "writeOutside" // a file outside the scratch places was written
	AuditGap     = "auditGap"     // records are missing, or a log was cut, replaced or removed
)

// Unreadable is the kind of the rule that stands for rules which cannot be read: nobody knows what they say, so
// nothing they could be about can be measured.
const Unreadable = "unreadable"

// Kinds lists what a rule can be about, in the order of the documentation.
func Kinds() []string {
	return []string{Denied, BytesOut, WallTime, CPUTime, Processes, Canary, TokenMisuse, Exec, WriteOutside, AuditGap}
}

// Event says whether rules of the kind are about something that should never happen, rather than about an amount.
func Event(on string) bool {
	switch on {
	case Canary, TokenMisuse, Exec, WriteOutside, AuditGap:
		return true
	}
	return false
}

// Rule is one trip rule. Whoever read it has checked it; Fires is never empty.
type Rule struct {
	On     string        `json:"on"`
	Over   int64         `json:"over,omitempty"`   // the most that is still allowed: attempts, bytes, nanoseconds, processes; 0 for events
	Within time.Duration `json:"within,omitempty"` // Denied only, nanoseconds
	Paths  []string      `json:"paths,omitempty"`  // Exec only: absolute paths in the kid
	Names  []string      `json:"names,omitempty"`  // Canary only: hosts that nobody has a reason to ask for
	Except []string      `json:"except,omitempty"` // WriteOutside only: absolute directories that count as scratch
	Fires  []wire.Layer  `json:"fires"`
}

// String names the rule for people: what it measures and the limit, without the layers.
func (r Rule) String() string {
	switch r.On {
	case Denied:
		return fmt.Sprintf("%s over %d within %s", r.On, r.Over, Duration(r.Within))
	case Exec:
		return r.On + " of " + strings.Join(r.Paths, ", ")
	}
	if Event(r.On) || r.On == Unreadable {
		return r.On
	}
	return r.On + " over " + amount(r.On, r.Over)
}

// Key tells rules apart: two with the same key trip together.
func (r Rule) Key() string {
	words := []string{r.String(), strings.Join(r.Except, ","), strings.Join(r.Names, ",")}
	for _, l := range r.Fires {
		words = append(words, string(l))
	}
	return strings.Join(words, "|")
}

// Amount is the limit as a card or a box's configuration writes it: a number, or a text with a unit.
func (r Rule) Amount() any {
	switch r.On {
	case BytesOut, WallTime, CPUTime:
		return amount(r.On, r.Over)
	}
	return r.Over
}

// amount writes a measured value or a limit with its unit.
func amount(on string, n int64) string {
	switch on {
	case BytesOut:
		return Size(n)
	case WallTime, CPUTime:
		return Duration(time.Duration(n).Round(time.Millisecond))
	}
	return strconv.FormatInt(n, 10)
}

// Size writes bytes as a card does where they come to a whole number of units, and plainly where they do not.
func Size(n int64) string {
	for _, u := range []struct {
		name string
		size int64
	}{{"GiB", 1 << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}} {
		if n >= u.size && n%u.size == 0 {
			return strconv.FormatInt(n/u.size, 10) + u.name
		}
	}
	return strconv.FormatInt(n, 10) + " bytes"
}

// Duration writes a time without the zeroes that time.Duration ends with.
func Duration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}
