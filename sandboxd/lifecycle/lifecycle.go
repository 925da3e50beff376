// Package lifecycle says which states a kid goes through and which way. It is the only code that can change one:
// what a State holds is reachable from nowhere else. It does no I/O and knows nothing of how a state is brought about.
package lifecycle

import (
	"fmt"
	"slices"

	"tagout/internal/wire"
)

// next are the states that each state can turn into. A kid that is destroyed has none any more. Whatever is not here
// does not happen: a stopped kid never runs again, and nothing comes back from the dead.
var next = map[wire.KidState][]wire.KidState{
	wire.KidSpawning:   {wire.KidRunning, wire.KidExited, wire.KidOOM, wire.KidStopped, wire.KidDestroying},
	wire.KidRunning:    {wire.KidPaused, wire.KidExited, wire.KidOOM, wire.KidStopped, wire.KidDestroying},
	wire.KidPaused:     {wire.KidRunning, wire.KidExited, wire.KidOOM, wire.KidStopped, wire.KidDestroying},
	wire.KidExited:     {wire.KidStopped, wire.KidDestroying},
	wire.KidOOM:        {wire.KidDestroying},
	wire.KidStopped:    {wire.KidDestroying},
	wire.KidDestroying: {},
}

// States returns every state, in the order of a life.
func States() []wire.KidState {
	return []wire.KidState{
		wire.KidSpawning, wire.KidRunning, wire.KidPaused, wire.KidExited, wire.KidOOM, wire.KidStopped, wire.KidDestroying,
	}
}

// Next returns the states that s can turn into.
func Next(s wire.KidState) []wire.KidState { return slices.Clone(next[s]) }

// State is where one kid is in its life. The zero value is of no use. Not safe for concurrent use.
type State struct {
	now     wire.KidState
	cause   string
	stopped bool
}

// New is a kid that is being made.
func New() State { return State{now: wire.KidSpawning} }

// Adopted is a kid that a predecessor made and that lives.
func Adopted(paused bool) State {
	if paused {
		return State{now: wire.KidPaused}
	}
	return State{now: wire.KidRunning}
}

// OutOfMemory is a kid that a predecessor made and that ran out of memory.
func OutOfMemory(cause string) State { return State{now: wire.KidOOM, cause: cause} }

// Leftover is what remains of a kid that nobody can go on with.
func Leftover() State { return State{now: wire.KidDestroying} }

// Now returns the state.
func (s *State) Now() wire.KidState { return s.now }

// Is says whether the kid is in one of the states.
func (s *State) Is(any ...wire.KidState) bool { return slices.Contains(any, s.now) }

// Alive says whether the kid's processes are there and may go on: it is running or paused.
func (s *State) Alive() bool { return s.Is(wire.KidRunning, wire.KidPaused) }

// Cause says how the kid came into its state where nobody asked for it, "" otherwise.
func (s *State) Cause() string { return s.cause }

// Refused is a change of state that does not exist.
type Refused struct{ From, To wire.KidState }

func (r *Refused) Error() string {
	return fmt.Sprintf("a kid that is %s cannot become %s", r.From, r.To)
}

// Enter changes the state; the state that it is in already is fine. The error is a *Refused, and then nothing
// has changed.
func (s *State) Enter(to wire.KidState) error { return s.EnterFor(to, "") }

// EnterFor is Enter, with the cause that Cause returns from then on.
func (s *State) EnterFor(to wire.KidState, cause string) error {
	if s.now == to {
		return nil
	}
	if !slices.Contains(next[s.now], to) {
		return &Refused{From: s.now, To: to}
	}
	s.now, s.cause = to, cause
	return nil
}

// Stop notes that a stop hit the kid, which is never undone, and says whether that is news. A kid that is past
// being stopped keeps its state, and so does one that ran out of memory: a stop cannot do more to it, and why it ended is
// still worth knowing.
func (s *State) Stop() (news bool) {
	news = !s.stopped
	s.stopped = true
	if slices.Contains(next[s.now], wire.KidStopped) {
		s.now, s.cause = wire.KidStopped, ""
	}
	return news
}

// Stopped says whether a stop hit the kid, whatever its state is by now.
func (s *State) Stopped() bool { return s.stopped }
