package outlog

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// TestTheLastBytesAreKept writes far more than fits, in pieces of every size: what is read is the end of what was
// written, byte for byte and by stream, and what is not is counted.
func TestTheLastBytesAreKept(t *testing.T) {
	const size = 100_000
	path := filepath.Join(t.TempDir(), "out")
	l, err := Create(path, size)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	rnd := rand.New(rand.NewPCG(1, 2))
	var all []byte
	streams := []int{}
	for len(all) < 7*size {
		p := make([]byte, rnd.IntN(1+rnd.IntN(3*size/2)))
		for i := range p {
			p[i] = byte(rnd.Uint32())
		}
		stream := Stdout + rnd.IntN(2)
		if err := l.Write(stream, p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p...)
		for range p {
			streams = append(streams, stream)
		}
	}
	l.End()
	var got []byte
	lost, pos := int64(0), int64(0)
	for {
		p, next, err := l.Next(t.Context(), pos)
		if errors.Is(err, ErrEnded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		lost += p.Lost
		for i := range p.Data {
			if at := int(pos+p.Lost) + i; streams[at] != p.Stream {
				t.Fatalf("byte %d is of stream %d", at, p.Stream)
			}
		}
		got = append(got, p.Data...)
		pos = next
	}
	if l.Written() != int64(len(all)) {
		t.Errorf("%d bytes were written, not %d", l.Written(), len(all))
	}
	if lost+int64(len(got)) != int64(len(all)) || !bytes.Equal(got, all[lost:]) || len(got) < size/2 {
		t.Errorf("%d bytes lost and %d read of %d, equal %v", lost, len(got), len(all), bytes.Equal(got, all[lost:]))
	}
	if info, err := os.Stat(path); err != nil || info.Size() > size {
		t.Errorf("the file has %d bytes, %v", info.Size(), err)
	}
}

// TestManySmallPiecesStaySmall: single bytes of both streams in turns must not fill the memory.
func TestManySmallPiecesStaySmall(t *testing.T) {
	l, err := Create(filepath.Join(t.TempDir(), "out"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for i := range 10 * maxChunks {
		if err := l.Write(Stdout+i%2, []byte{byte(i)}); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.chunks) > maxChunks {
		t.Errorf("%d chunks are kept track of", len(l.chunks))
	}
}

func TestNextWaits(t *testing.T) {
	l, err := Create(filepath.Join(t.TempDir(), "out"), 64)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan string, 1)
	go func() {
		p, _, err := l.Next(context.Background(), 0)
		if err != nil {
			got <- err.Error()
			return
		}
		got <- string(p.Data)
	}()
	if err := l.Write(Stderr, []byte("late")); err != nil {
		t.Fatal(err)
	}
	if s := <-got; s != "late" {
		t.Errorf("%q", s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := l.Next(ctx, 4); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}
