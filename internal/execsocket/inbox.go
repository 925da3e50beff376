package execsocket

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"tagout/internal/wire"
)

// handed is how much input a command is given at once.
const handed = 32 << 10

var errAfterEnd = errors.New("input after its end")

// inbox holds input that the command has not taken yet: never more than the window.
type inbox struct {
	mu    sync.Mutex
	data  []byte        // guarded by mu
	held  int           // guarded by mu; bytes of data, and of the piece that is being handed over
	ended bool          // guarded by mu; nothing follows data
	more  chan struct{} // of one: there is something to hand over
}

func newInbox() *inbox { return &inbox{more: make(chan struct{}, 1)} }

// put adds input. An error says that the caller keeps to no bound.
func (b *inbox) put(in wire.ExecInput) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.ended:
		return errAfterEnd
	case b.held+len(in.Stdin) > wire.ExecWindow:
		return fmt.Errorf("more than %d bytes of input wait already: send more when `taken` says so", wire.ExecWindow)
	}
	b.data = append(b.data, in.Stdin...)
	b.held += len(in.Stdin)
	b.ended = in.EOF
	select {
	case b.more <- struct{}{}:
	default: // it is known
	}
	return nil
}

// next returns what follows: a piece, or that there is none and the input has ended.
func (b *inbox) next() (piece []byte, ended bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	piece = append(piece, b.data[:min(len(b.data), handed)]...)
	b.data = b.data[len(piece):]
	if len(b.data) == 0 {
		b.data = nil // what was read lies behind it
	}
	return piece, b.ended
}

func (b *inbox) took(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held -= n
}

// handOver gives the input to the command until it or ctx ends, and tells how much was taken.
func (b *inbox) handOver(ctx context.Context, to chan<- wire.ExecInput, tell func(n int)) {
	give := func(in wire.ExecInput) bool {
		select {
		case to <- in:
			return true
		case <-ctx.Done():
			return false
		}
	}
	for {
		piece, ended := b.next()
		switch {
		case len(piece) > 0:
			if !give(wire.ExecInput{Stdin: piece}) {
				return
			}
			b.took(len(piece))
			tell(len(piece))
		case ended:
			give(wire.ExecInput{EOF: true})
			return
		default:
			select {
			case <-b.more:
			case <-ctx.Done():
				return
			}
		}
	}
}
