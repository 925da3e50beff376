package kids

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"tagout/internal/wire"
)

// logged is what a caller of Logs was sent, by command.
type logged struct {
	mu             sync.Mutex
	stdout, stderr map[string]string
	lost           map[string]int64
	exits          map[string]wire.ExecExit
	begun          []string
	wrong          []string
}

func newLogged() *logged {
	return &logged{stdout: map[string]string{}, stderr: map[string]string{}, lost: map[string]int64{}, exits: map[string]wire.ExecExit{}}
}

func (l *logged) take(f wire.LogFrame) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	begins := f.Exec != nil
	for _, id := range l.begun {
		begins = begins || id == f.ID
	}
	if _, ended := l.exits[f.ID]; !begins || ended {
		l.wrong = append(l.wrong, fmt.Sprintf("%+v", f))
	}
	if f.Exec != nil {
		l.begun = append(l.begun, f.ID)
	}
	l.stdout[f.ID] += string(f.Stdout)
	l.stderr[f.ID] += string(f.Stderr)
	l.lost[f.ID] += f.Lost
	if f.Exit != nil {
		l.exits[f.ID] = *f.Exit
	}
	return nil
}

func (l *logged) has(id, stdout string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stdout[id] == stdout
}

func (b *box) detach(kid, line string) (id string) {
	b.t.Helper()
	err := b.Exec(b.t.Context(), kid, "test", wire.ExecRequest{Shell: line, Detach: true}, func(f wire.ExecFrame) error {
		if f.ID != "" {
			id = f.ID
		}
		return nil
	})
	if err != nil || id == "" {
		b.t.Fatalf("%q: %v", line, err)
	}
	return id
}

func (b *box) waitEnded(kid, id string) {
	b.t.Helper()
	eventually(b.t, "command "+id+" to end", func() bool {
		e, err := b.ExecStatus(b.t.Context(), kid, id)
		return err == nil && e.Exit != nil
	})
}

// TestLogs: what detached commands wrote, byte for byte, the last of much; what somebody waited for is not there.
func TestLogs(t *testing.T) {
	b := newBox(t, "tsblogs")
	b.spawn("k1", plan())
	b.sh("k1", "echo waited for")
	first := b.detach("k1", `printf 'a\377\0'; printf e >&2; exit 3`)
	b.waitEnded("k1", first)
	much := b.detach("k1", "head -c 3000000 /dev/zero | tr '\\0' x; printf end")
	b.waitEnded("k1", much)
	runs := b.detach("k1", "printf up; exec sleep 3600")
	eventually(t, "the output of a command that runs", func() bool {
		l := newLogged()
		if err := b.Logs(t.Context(), "k1", false, l.take); err != nil {
			t.Fatal(err)
		}
		return l.has(runs, "up")
	})
	l := newLogged()
	if err := b.Logs(t.Context(), "k1", false, l.take); err != nil || len(l.wrong) != 0 {
		t.Fatal(err, l.wrong)
	}
	if got, want := fmt.Sprint(l.begun), fmt.Sprint([]string{first, much, runs}); got != want {
		t.Errorf("commands %s, want %s", got, want)
	}
	if l.stdout[first] != "a\xff\x00" || l.stderr[first] != "e" || l.exits[first].Code != 3 || l.lost[first] != 0 {
		t.Errorf("the first: %q %q %+v", l.stdout[first], l.stderr[first], l.exits[first])
	}
	if n := int64(len(l.stdout[much])) + l.lost[much]; n != 3000003 || len(l.stdout[much]) > keptOutput || !strings.HasSuffix(l.stdout[much], "xend") {
		t.Errorf("much: %d bytes of %d", len(l.stdout[much]), n)
	}
	if _, ended := l.exits[runs]; ended {
		t.Error("a command that runs has ended")
	}
	if err := b.Logs(t.Context(), "nobody", true, l.take); KindOf(err) != NotFound {
		t.Errorf("of nobody: %v", err)
	}
}

// TestLogsAreFollowed: commands that are started later are shown too, and the kid's end is the end.
func TestLogsAreFollowed(t *testing.T) {
	b := newBox(t, "tsbfollow")
	b.spawn("k1", plan())
	l := newLogged()
	done := make(chan error, 1)
	go func() { done <- b.Logs(context.WithoutCancel(t.Context()), "k1", true, l.take) }()
	one := b.detach("k1", "printf one; until [ -e /workspace/go ]; do sleep .05; done; printf ' more'")
	eventually(t, "the first command's output", func() bool { return l.has(one, "one") })
	two := b.detach("k1", "printf two; exec sleep 3600")
	eventually(t, "the second command's output", func() bool { return l.has(two, "two") })
	b.sh("k1", "touch /workspace/go")
	b.waitEnded("k1", one)
	if err := b.Destroy(t.Context(), "k1", "test", "end"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil || len(l.wrong) != 0 {
		t.Fatal(err, l.wrong)
	}
	if !l.has(one, "one more") || l.exits[one].Code != 0 || l.exits[two].Result == "" {
		t.Errorf("%+v %+v", l.stdout, l.exits)
	}
	// A caller who takes nothing any more, or goes away, ends it while the kid lives.
	b.spawn("k2", plan())
	b.detach("k2", "while :; do echo x; done")
	gone := errors.New("gone")
	if err := b.Logs(t.Context(), "k2", true, func(wire.LogFrame) error { return gone }); err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	frames := 0
	err := b.Logs(ctx, "k2", true, func(wire.LogFrame) error {
		if frames++; frames == 5 {
			cancel()
		}
		return nil
	})
	if err != nil || frames < 5 {
		t.Errorf("%d frames, %v", frames, err)
	}
	// One that writes without end does not keep those who only look.
	if err := b.Logs(t.Context(), "k2", false, newLogged().take); err != nil {
		t.Error(err)
	}
}
