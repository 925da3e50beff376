package audit

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/reason"
)

// OutOfRoom says whether err is about the process or the machine having no descriptor or memory left for one more.
func OutOfRoom(err error) bool {
	for _, e := range []unix.Errno{unix.EMFILE, unix.ENFILE, unix.ENOBUFS, unix.ENOMEM} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// starvedEvery is how often a listener that takes nothing says so again.
const starvedEvery = 10 * time.Second

// Starved records when a listener takes no connections for want of descriptors or memory, and when it does again: what
// nobody accepts waits in the kernel and leaves no other record. It belongs to one accept loop.
type Starved struct {
	Where string       // what is listened on
	Log   func(Record) // must not block

	tries uint64    // that failed since connections were last taken
	told  time.Time // the last record; zero while connections are taken
}

// Failed notes that accepting ended with err.
func (s *Starved) Failed(err error) {
	if !OutOfRoom(err) {
		return
	}
	s.tries++
	if !s.told.IsZero() && time.Since(s.told) < starvedEvery {
		return
	}
	s.told = time.Now()
	s.Log(Record{Event: EventStarved, Outcome: OutcomeFail, Reason: reason.Capacity, Count: s.tries,
		Detail: "new connections to " + s.Where + " wait: " + err.Error()})
}

// Accepted notes that a connection was taken.
func (s *Starved) Accepted() {
	if s.tries == 0 {
		return
	}
	s.Log(Record{Event: EventStarved, Outcome: OutcomeOK, Count: s.tries, Detail: "new connections to " + s.Where + " are taken again"})
	s.tries, s.told = 0, time.Time{}
}
