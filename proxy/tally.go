package proxy

import "sync"

// tally counts what goes on and lets one goroutine wait for its end. Unlike with a sync.WaitGroup something
// new may begin while that goroutine waits. The zero value is ready.
type tally struct {
	mu   sync.Mutex
	n    int           // guarded by mu
	none chan struct{} // guarded by mu: closed when n falls to 0; nil while nobody waits
}

func (t *tally) enter() {
	t.mu.Lock()
	t.n++
	t.mu.Unlock()
}

func (t *tally) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n--
	if t.n == 0 && t.none != nil {
		close(t.none)
		t.none = nil
	}
}

// wait returns once nothing goes on.
func (t *tally) wait() {
	t.mu.Lock()
	if t.n == 0 {
		t.mu.Unlock()
		return
	}
	if t.none == nil {
		t.none = make(chan struct{})
	}
	none := t.none
	t.mu.Unlock()
	<-none
}
