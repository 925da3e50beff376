package credential

import (
	"net/http"

	"tagout/internal/control"
	"tagout/internal/wire"
)

// mostUnread is how many revocations a listener may be behind before it is let go. It then takes everything for
// revoked, which is never wrong.
const mostUnread = 4096

// subscribers hear of revocations. The table's lock guards it.
type subscribers map[chan wire.Revoked]struct{}

// tell never waits.
func (s subscribers) tell(r wire.Revoked) {
	for to := range s {
		select {
		case to <- r:
		default:
			close(to)
			delete(s, to)
		}
	}
}

// listen returns what is revoked from now on, in order. The channel is closed for whoever is too slow.
func (t *table) listen() (from <-chan wire.Revoked, end func()) {
	to := make(chan wire.Revoked, mostUnread)
	t.mu.Lock()
	t.told[to] = struct{}{}
	t.mu.Unlock()
	return to, func() {
		t.mu.Lock()
		delete(t.told, to)
		t.mu.Unlock()
	}
}

// revocations streams what is revoked to the proxy, which cuts requests under way. A stream that ends means that
// nothing is known any more.
func (s *Service) revocations(w http.ResponseWriter, r *http.Request) {
	from, end := s.tokens.listen()
	defer end()
	out := control.NewStream(w)
	next := wire.Revoked{}
	for {
		if out.Send(next) != nil {
			return // it is gone, and takes everything for revoked
		}
		var ok bool
		select {
		case next, ok = <-from:
			if !ok {
				return
			}
		case <-r.Context().Done():
			return
		case <-s.closing:
			return
		}
	}
}

// EndStreams ends the streams of revocations: the daemon is about to end.
func (s *Service) EndStreams() { s.closeOnce.Do(func() { close(s.closing) }) }
