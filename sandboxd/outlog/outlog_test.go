package outlog

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
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
	if took := room(t, path); took > size+punchStep+2*maxChunk {
		t.Errorf("the file takes %d bytes", took)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(path, size)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	again.End()
	if p, _ := readAll(t, again); !bytes.Equal(p, all[len(all)-len(p):]) || len(p) < size/2 {
		t.Errorf("opened again: %d bytes, or others", len(p))
	}
}

// room is how much the file takes on its disk.
func room(t *testing.T, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// readAll reads what is kept from the beginning to the end.
func readAll(t *testing.T, l *Log) (all []byte, lost int64) {
	t.Helper()
	for pos := int64(0); ; {
		p, next, err := l.Next(t.Context(), pos)
		if errors.Is(err, ErrEnded) {
			return all, lost
		}
		if err != nil {
			t.Fatal(err)
		}
		all, lost, pos = append(all, p.Data...), lost+p.Lost, next
	}
}

// TestAnotherGoesOn: the writer stops at any place, mostly with a chunk begun that nothing came of, and another opens
// its files: nothing is missing and each byte is of its stream.
func TestAnotherGoesOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out")
	l, err := Create(path, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_NONBLOCK|unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	rnd := rand.New(rand.NewPCG(3, 4))
	var want []byte // the stream's number for each byte: what it says is what it is
	for range 500 {
		stream := Stdout + rnd.IntN(2)
		p := bytes.Repeat([]byte{byte(stream)}, rnd.IntN(4*page))
		if _, err := unix.Write(pipe[1], p); len(p) > 0 && err != nil {
			t.Fatal(err)
		}
		for left := len(p); left > 0; {
			n, err := l.Splice(stream, pipe[0])
			if err != nil {
				t.Fatal(err)
			}
			left -= n
		}
		if _, err := l.Splice(Stdout+Stderr-stream, pipe[0]); !errors.Is(err, unix.EAGAIN) {
			t.Fatalf("an empty pipe: %v", err)
		}
		want = append(want, p...)
		if rnd.IntN(4) == 0 {
			l.Close() // as if its process had been killed
			if l, err = Open(path, 1<<20); err != nil {
				t.Fatal(err)
			}
		}
	}
	unix.Close(pipe[1])
	if n, err := l.Splice(Stdout, pipe[0]); n != 0 || err != nil {
		t.Errorf("a pipe that nobody can write to: %d, %v", n, err)
	}
	l.End()
	defer l.Close()
	got, lost := readAll(t, l)
	if lost+int64(len(got)) != int64(len(want)) || !bytes.Equal(got, want[lost:]) {
		t.Errorf("%d bytes lost and %d read of %d, equal %v", lost, len(got), len(want), bytes.Equal(got, want[lost:]))
	}
	for pos := lost; ; {
		p, next, err := l.Next(t.Context(), pos)
		if errors.Is(err, ErrEnded) {
			break
		}
		if err != nil || bytes.IndexFunc(p.Data, func(r rune) bool { return int(r) != p.Stream }) >= 0 {
			t.Fatalf("at %d: bytes of another stream than %d, %v", pos, p.Stream, err)
		}
		pos = next
	}
}

// TestALostIndexIsCounted: without the index nobody knows what stream a byte is of. That they were there is said.
func TestALostIndexIsCounted(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"empty":   func(path string) error { return os.Truncate(path, 0) },
		"garbage": func(path string) error { return os.WriteFile(path, bytes.Repeat([]byte{0xa5}, 4*placeSize), 0o600) },
	} {
		path := filepath.Join(t.TempDir(), "out")
		l, err := Create(path, 1<<20)
		if err == nil {
			err = errors.Join(l.Write(Stdout, []byte("gone")), l.Close(), damage(path+indexSuffix))
		}
		if err != nil {
			t.Fatal(err)
		}
		l, err = Open(path, 1<<20)
		if name == "garbage" {
			if err == nil {
				t.Error("a damaged index: no error")
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		l.End()
		if got, lost := readAll(t, l); len(got) != 0 || lost != 4 {
			t.Errorf("%s: %q, %d lost", name, got, lost)
		}
		if err := errors.Join(l.Close(), Remove(path), Remove(path)); err != nil {
			t.Error(err)
		}
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
