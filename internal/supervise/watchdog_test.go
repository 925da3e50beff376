package supervise

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

// TestAStoppedDaemonIsKilledAndStartedAgain: one that is stopped (SIGSTOP) says nothing any more, and is replaced; its
// neighbour, which nobody watches, stays as it is. Words of others do not count for it.
func TestAStoppedDaemonIsKilledAndStartedAgain(t *testing.T) {
	const term = time.Second
	b := newBox(t, "tsupw1", 9, map[string]string{"a": "fed", "b": "fed"})
	b.cfg.Specs[0].Watchdog = term
	b.up()
	watched, free := b.pid("a"), b.pid("b")
	defer unix.Kill(free, unix.SIGCONT)
	for _, pid := range []int{watched, free} {
		if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
	}
	begun := time.Now()
	conn, err := net.Dial("unixgram", filepath.Join(b.cfg.Inst.RunDir(), "notify", "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close() // a test
	eventually(t, "the stopped daemon is replaced, whatever others say", func() bool {
		conn.Write([]byte("WATCHDOG=1")) // from this process
		return b.pid("a") != watched
	})
	if took := time.Since(begun); took < term/2 {
		t.Errorf("it was replaced after %v, with a watchdog of %v", took, term)
	} else {
		t.Logf("replaced after %v", took)
	}
	if b.pid("b") != free {
		t.Error("a daemon without a watchdog was replaced")
	}
	again := b.pid("a")
	ctx, cancel := context.WithTimeout(t.Context(), 2*term)
	defer cancel()
	<-ctx.Done() // for longer than the watchdog's term
	if b.pid("a") != again {
		t.Error("a daemon that feeds its watchdog was replaced")
	}
}

// TestADaemonThatNeverSpeaks is given the time that a start may take, and no more.
func TestADaemonThatNeverSpeaks(t *testing.T) {
	b := newBox(t, "tsupw2", 9, nil)
	b.cfg.Start = 3 * time.Second
	b.cfg.Specs[0].Watchdog = 500 * time.Millisecond
	b.up()
	first, begun := b.pid("a"), time.Now()
	eventually(t, "it is replaced", func() bool { return b.pid("a") != first })
	if took := time.Since(begun); took < b.cfg.Start/2 {
		t.Errorf("it was replaced after %v, a start may take %v", took, b.cfg.Start)
	}
}

func TestTheNotifySocketIsItsDaemonsOwn(t *testing.T) {
	b := newBox(t, "tsupw3", 9, map[string]string{"a": "fed"})
	b.cfg.Specs[0].Watchdog = time.Second
	stop := b.up()
	path := filepath.Join(b.cfg.Inst.RunDir(), "notify", "a")
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || int(st.Uid) != b.cfg.Specs[0].UID || st.Mode&0o777 != 0o600 {
		t.Errorf("uid %d, mode %o, %v", st.Uid, st.Mode&0o777, err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("it is left behind: %v", err)
	}
}

func TestRestartsWaitLongerOnlyAfterTheQuickOnes(t *testing.T) {
	const ms = time.Millisecond
	for quick, want := range map[int][]time.Duration{
		0: {0, 100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, maxBackoff, maxBackoff},
		4: {0, 100 * ms, 100 * ms, 100 * ms, 100 * ms, 200 * ms, 400 * ms},
	} {
		b := backoff{quick: quick}
		var got []time.Duration
		for range want {
			got = append(got, b.next)
			b.grow()
		}
		if !slices.Equal(got, want) {
			t.Errorf("quick %d: %v, want %v", quick, got, want)
		}
	}
}

func TestKillswitchdAloneIsWatched(t *testing.T) {
	inst, err := instance.New("tsupw4", 9)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range withDefaults(Config{Inst: inst, BinDir: "/bin", Cgroups: groups{}}).Specs {
		if watched := s.Name == instance.Killswitchd; watched != (s.Watchdog > 0) || watched != (s.Quick > 0) {
			t.Errorf("%s has a watchdog of %v and %d quick restarts", s.Name, s.Watchdog, s.Quick)
		}
	}
}
