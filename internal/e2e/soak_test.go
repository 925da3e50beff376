package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

const (
	fewLives   = 40 // `make soak-kids` asks for more
	liveAtOnce = 3
)

// soak is a box in which kids live at random while sandboxd is killed.
type soak struct {
	box  *testenv.Box
	kill sync.Mutex // one kill at a time, with the start of the successor

	spawned, refused, execs, kills atomic.Int64
}

// TestRandomLives (K09, K13): lives of kids of every kind, side by side, each a spawn, some of what a kid can be asked, and
// a destroy, at random and while sandboxd is killed with -9 at random moments. Afterwards this machine is as before, down to
// the last map entry. TAGOUT_SOAK says how many lives, TAGOUT_SOAK_SEED which.
func TestRandomLives(t *testing.T) {
	t.Parallel()
	lives, seed := number(t, "TAGOUT_SOAK", fewLives), number(t, "TAGOUT_SOAK_SEED", int(time.Now().UnixNano()&0xffffff))
	t.Logf("TAGOUT_SOAK=%d TAGOUT_SOAK_SEED=%d", lives, seed)
	box := start(t)
	s := &soak{box: box}
	for _, card := range soakCards() { // what is made with the first kid, and its first detached command, and stays
		kid := box.Spawn(card, nil).Name
		waitStored(t, box, kid, outliving{box, t}.detach(kid, "--", "sleep", "1000"))
		box.Destroy(kid)
	}
	before := traces(t, box.Inst)
	began := time.Now()
	var next atomic.Int64
	var wg sync.WaitGroup
	for range liveAtOnce {
		wg.Go(func() {
			for i := next.Add(1); i <= int64(lives); i = next.Add(1) {
				t.Run(fmt.Sprintf("life%d", i), func(t *testing.T) {
					s.live(box.For(t), rand.New(rand.NewPCG(uint64(seed), uint64(i))), (i+int64(seed))%8 == 0)
				})
			}
		})
	}
	wg.Wait()
	t.Logf("%d lives in %v: %d spawned, %d refused or cut, %d commands, %d kills of sandboxd", lives, time.Since(began).Round(time.Millisecond),
		s.spawned.Load(), s.refused.Load(), s.execs.Load(), s.kills.Load())
	if s.spawned.Load() < int64(lives)/2 || s.kills.Load() < int64(lives)/20 {
		t.Errorf("too little happened for this to show anything")
	}
	for name := range kidsOf(t, box) {
		t.Errorf("kid %s is left", name)
	}
	wantNoTraces(box, before)
	k := box.Spawn(bareCard, nil) // and it works
	if out := box.Sh(k.Name, "echo well"); out.Stdout != "well\n" {
		t.Errorf("afterwards: %+v", out)
	}
	box.Destroy(k.Name)
}

// waitStored waits until the kid's detached command would outlive sandboxd: from then on there is a store.
func waitStored(t *testing.T, box *testenv.Box, kid, id string) {
	t.Helper()
	box.Until(soon, "the command of "+kid+" is kept", func() error {
		e, err := outliving{box, t}.exec(kid, id)
		if err == nil && !e.Outlives {
			err = fmt.Errorf("%+v", e)
		}
		return err
	})
}

func number(t *testing.T, env string, otherwise int) int {
	t.Helper()
	text := os.Getenv(env)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s: %v", env, err)
	}
	return n
}

// soakCards are the kinds of kids that there are.
func soakCards() []string {
	plain := strings.Replace(card, "  inputs:\n    - {from: hostile, to: /workspace/hostile, mode: \"0755\"}\n", "", 1)
	return []string{plain, bareCard, strings.Replace(bareCard, "image: host", "image: host\nnetwork: none", 1),
		strings.Replace(bareCard, "image: host", "image: host+writable\nfilesystem: {root: 16MiB, workspace: 4MiB, tmp: 4MiB}", 1)}
}

// live is one life. Whatever it is told on the way, sandboxd may have been killed, surely so with kill; at its end the kid is gone.
func (s *soak) live(box *testenv.Box, rng *rand.Rand, kill bool) {
	name := filepath.Base(box.T.Name())
	cards := soakCards()
	card := cards[rng.IntN(len(cards))]
	var killing sync.WaitGroup
	defer killing.Wait()
	if kill { // the moment is what is random: in the spawn, in a command, in the destroy or in between
		moment := time.Duration(rng.IntN(400)) * time.Millisecond
		killing.Go(func() { s.killAfter(moment) })
	}
	_, err := box.TrySpawn(name, card, nil)
	if err != nil {
		s.refused.Add(1)
	} else {
		s.spawned.Add(1)
	}
	for range rng.IntN(4) {
		s.something(box, name, rng)
	}
	destroySurely(box, name)
}

// killAfter kills sandboxd and waits for its successor.
func (s *soak) killAfter(moment time.Duration) {
	<-time.After(moment)
	s.kill.Lock()
	defer s.kill.Unlock()
	s.box.Kill9(instance.Sandboxd)
	s.kills.Add(1)
	s.box.WaitHealthy(instance.Sandboxd)
}

// something does one of what a kid can be asked, or what can happen to it.
func (s *soak) something(box *testenv.Box, kid string, rng *rand.Rand) {
	ctx, cancel := context.WithTimeout(box.T.Context(), soon)
	defer cancel()
	exec := func(r wire.ExecRequest) {
		if _, err := box.TryExec(ctx, kid, r); err == nil {
			s.execs.Add(1)
		}
	}
	call := func(method, what string, in any) { // what it says is nobody's business here
		box.Client(instance.Sandboxd).Call(ctx, method, "/v1/kids/"+kid+"/"+what, in, nil)
	}
	switch rng.IntN(8) {
	case 0, 1:
		exec(wire.ExecRequest{Shell: "echo x >/workspace/x; (echo y) & wait"})
	case 2:
		exec(wire.ExecRequest{Shell: "sleep 1000 >/dev/null 2>&1 & setsid sleep 1000 >/dev/null 2>&1 & exit 1"})
	case 3:
		exec(wire.ExecRequest{Argv: []string{"sleep", "1000"}, Timeout: time.Duration(1+rng.IntN(200)) * time.Millisecond})
	case 4:
		exec(wire.ExecRequest{Argv: []string{"sleep", "1000"}, Detach: true})
	case 5:
		exec(wire.ExecRequest{Argv: []string{"/no/such/program"}})
	case 6:
		call(http.MethodPost, "pause", wire.ChangeRequest{Reason: "soak"})
		if rng.IntN(2) == 0 {
			call(http.MethodPost, "resume", wire.ChangeRequest{Reason: "soak"})
		}
	case 7:
		if layout, err := cgroup.Detect(); err == nil { // all of it dies at once
			cgroup.Kill(layout.V2(box.Inst.KidsCgroupRel() + "/" + kid)) // it may not be there
		}
	}
}

// destroySurely asks until it is done: sandboxd may be killed at that.
func destroySurely(box *testenv.Box, kid string) {
	box.Until(2*time.Minute, kid+" is destroyed", func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return box.Client(instance.Sandboxd).Call(ctx, http.MethodDelete, "/v1/kids/"+kid+"?reason=soak", nil, nil)
	})
}
