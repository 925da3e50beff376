package kids

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// TestKillWhileACommandIsPutAway: a kill -9 of sandboxd when a command is detached, but not in the store yet, ends it with
// all that it started, and that is recorded. One more step, and it goes on.
func TestKillWhileACommandIsPutAway(t *testing.T) {
	line := "sleep 300 & echo up; : >up; " + await("on") + "exit 5"
	for name, tc := range map[string]struct {
		when string
		r    wire.ExecRequest
		want wire.ExecExit
		out  string
	}{
		"before":          {"before", wire.ExecRequest{Shell: line}, wire.ExecExit{Result: resultFailed, Code: codeKilled}, ""},
		"after":           {"after", wire.ExecRequest{Shell: line}, wire.ExecExit{Result: resultExited, Code: 5, Cut: true}, "up\n"},
		"input not taken": {"", wire.ExecRequest{Shell: line, Stdin: make([]byte, 1<<20)}, wire.ExecExit{Result: resultFailed, Code: codeKilled}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "tsbputaway")
			s := b.servantDying(false, tc.when)
			id := s.start(tc.r)
			if tc.when == "" {
				b.wantFile("up")
				s.kill()
			}
			s.cmd.Wait() // it dies by itself
			b.takeOver()
			b.touch("on")
			doc, err := b.store.Get("whole")
			if err != nil {
				t.Fatal(err)
			}
			left := 0
			if tc.want.Result == resultExited {
				left = 1 // what it left running goes on
			}
			r, _ := b.attached("whole", id)
			got := r.exit
			if got.Result == resultFailed && got.Detail != restarted {
				t.Errorf("it ended with %q", got.Detail)
			}
			got.Detail, got.Usage = "", nil
			if got != tc.want || tc.out != "" && r.stdout.String() != tc.out {
				t.Errorf("%+v %q, want %+v %q", r.exit, r.stdout.String(), tc.want, tc.out)
			}
			eventually(t, "its processes to be gone", func() bool { return len(commands(t, doc.Cgroup)) == left })
			if n := b.audit.count(audit.EventExecEnded, audit.OutcomeOK) + b.audit.count(audit.EventExecEnded, audit.OutcomeFail); n != 1 {
				t.Errorf("%d records of its end, want 1", n)
			}
			b.wantStoreEmpty()
		})
	}
}

// refusing is a store that takes nothing for as long as it says.
type refusing struct {
	Store
	puts chan error // what the next answer; nil: the store is asked
}

func (r *refusing) Put(id string, files []int) error {
	if err := <-r.puts; err != nil {
		return err
	}
	return r.Store.Put(id, files)
}

// TestCommandsThatAreNotPutAwayAreSeen: as long as the store has not what a detached command needs, late or because it did
// not take it, the command says so; a failure is recorded once, and it is tried again.
func TestCommandsThatAreNotPutAwayAreSeen(t *testing.T) {
	b := newBox(t, "tsbunkept")
	b.spawn("whole", plan())
	store := &refusing{b.cfg.Kept, make(chan error)}
	b.cfg.Kept = store
	id := b.detached("whole", wire.ExecRequest{Argv: []string{"sleep", "300"}})
	store.puts <- unix.EMFILE
	eventually(t, "a record", func() bool { return b.audit.count(audit.EventExecUnkept, audit.OutcomeFail) == 1 })
	b.wantOutlives(id, false)
	again := func(err error) {
		t.Helper()
		done := make(chan struct{})
		go func() {
			defer close(done)
			b.reshelter()
		}()
		store.puts <- err
		<-done
	}
	again(errors.New("still none"))
	b.wantOutlives(id, false)
	again(nil)
	b.wantOutlives(id, true)
	if n := b.audit.count(audit.EventExecUnkept, audit.OutcomeFail); n != 1 {
		t.Errorf("%d records, want 1", n)
	}
	b.reshelter() // nothing is put, or it would hang
	if err := b.EndExec(t.Context(), "whole", id, "uid:0", "enough"); err != nil {
		t.Fatal(err)
	}
	b.wantStoreEmpty()
	b.wantOutlives(id, false)
}

func (b *box) wantOutlives(id string, want bool) {
	b.t.Helper()
	eventually(b.t, fmt.Sprintf("outlives to be %v", want), func() bool {
		status, err := b.ExecStatus(b.t.Context(), "whole", id)
		return err == nil && status.Outlives == want
	})
}

// TestDeadStoreIsReplaced: what a store kept that has died is put into another, and outlives this sandboxd all the same;
// what has ended meanwhile is not.
func TestDeadStoreIsReplaced(t *testing.T) {
	b := newBox(t, "tsbnewstore")
	b.spawn("whole", plan())
	id := b.detached("whole", wire.ExecRequest{Argv: []string{"sleep", "300"}})
	b.wantSheltered(id)
	if _, err := cgroup.KillAndWait(t.Context(), b.layout.V2(b.inst.StoreCgroupRel())); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		b.Run(ctx)
	}()
	began := time.Now()
	b.wantSheltered(id)
	if took := time.Since(began); took > 2*reshelterEvery {
		t.Errorf("it took %s", took)
	}
	b.wantOutlives(id, true)
	stop()
	<-ran
}
