package kids

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// runDoomed is a sandboxd that spawns a kid, leaves another half-made, and waits to be killed.
func runDoomed() int {
	inst, err := instance.Open(os.Getenv("TAGOUT_TEST_SANDBOXD"))
	if err != nil {
		fmt.Println(err)
		return 1
	}
	layout, err := cgroup.Detect()
	if err != nil {
		fmt.Println(err)
		return 1
	}
	m, err := tryManager(inst, layout, os.Getenv("TAGOUT_TEST_INIT"), newGuards(), &records{})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	ctx, doomed := context.Background(), plan()
	if img := os.Getenv("TAGOUT_TEST_IMAGE"); img != "" {
		doomed.Image = img
		if img == "host+writable" {
			doomed.Root = 32 << 20
		}
	}
	if _, err := m.Spawn(ctx, Request{Name: "whole", Origin: "asked", Plan: doomed}); err != nil {
		fmt.Println(err)
		return 1
	}
	up := make(chan struct{})
	go m.Exec(ctx, "whole", "test", wire.ExecRequest{Argv: []string{"sh", "-c", "echo up; exec sleep 4321"}}, func(f wire.ExecFrame) error {
		if len(f.Stdout) > 0 || f.Exit != nil { // an image may have no shell
			close(up)
		}
		return nil
	}) // it never ends
	<-up
	at := cmp.Or(os.Getenv("TAGOUT_TEST_AT"), "create")
	m.fault = func(step string, done bool) error {
		if step == at && done {
			fmt.Println("ready")
			for { // not select{}, which the runtime may call a deadlock
				time.Sleep(time.Hour)
			}
		}
		return nil
	}
	m.Spawn(ctx, Request{Name: "half", Plan: doomed}) // it never ends, or leads to the destroy that never ends
	m.Destroy(ctx, "half", "test", "doomed")
	return 1
}

// doom runs runDoomed until it is ready and kills it.
func doom(t *testing.T, b *box) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "TAGOUT_TEST_SANDBOXD="+b.inst.Name(), "TAGOUT_TEST_INIT="+initPath)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()         // it was killed
	defer cmd.Process.Kill() // as is meant
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		t.Fatalf("the doomed sandboxd said %q, %v", line, err)
	}
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit) // its successor
}

func TestKilledSandboxdIsSucceeded(t *testing.T) {
	b := newBox(t, "tsbkill")
	doom(t, b)
	doc, err := b.store.Get("whole")
	if err != nil {
		t.Fatal(err)
	}
	if populated, err := cgroup.Populated(doc.Cgroup); err != nil || !populated {
		t.Fatalf("the kid died with its sandboxd: %v, %v", populated, err)
	}
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	kids := b.List(t.Context())
	if len(kids) != 1 || kids[0].Name != "whole" || kids[0].State != wire.KidRunning || kids[0].Mark != doc.Mark {
		t.Fatalf("kids after the restart: %+v, want whole alone, running, as it was", kids)
	}
	for _, l := range b.leftovers() {
		if strings.Contains(l, "half") {
			t.Errorf("left of the half-made kid: %s", l)
		}
	}
	if r := b.sh("whole", "echo $API_KEY $GREETING"); r.stdout.String() != "tgo_"+strings.Repeat("a", 32)+" hello\n" {
		t.Errorf("exec in the adopted kid: %q %q", r.stdout.String(), r.stderr.String())
	}
	// K12: whoever lost the answer to a killed sandboxd asks its successor, and gets the same kid.
	if again, err := b.Spawn(t.Context(), Request{Origin: "asked", Plan: plan()}); err != nil || again.Session != doc.ID {
		t.Errorf("the same request again: %+v %v", again, err)
	}
	b.seq.next, b.seq.reserved = 1, 1+sequenceBlock // as if the counter's file had been lost
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	k := b.spawn("next", plan())
	if k.Mark == doc.Mark || k.Addr == doc.Addr {
		t.Errorf("the next kid shares mark or address with the adopted one: %+v", k)
	}
	for _, name := range []string{"whole", "next"} {
		if err := b.Destroy(t.Context(), name, "test", "end of the test"); err != nil {
			t.Fatal(err)
		}
	}
	b.wantNothingLeft()
}

// TestWhatIsNotUnderstoodIsReclaimed damages the adopted kid's files in every way.
func TestWhatIsNotUnderstoodIsReclaimed(t *testing.T) {
	for name, damage := range map[string]func(b *box) error{
		"half-written record": func(b *box) error { return os.Truncate(filepath.Join(b.inst.KidDir("whole"), recordName), 20) },
		"no record":           func(b *box) error { return os.Remove(filepath.Join(b.inst.KidDir("whole"), recordName)) },
		"nothing known": func(b *box) error {
			return errors.Join(os.Remove(filepath.Join(b.inst.KidDir("whole"), recordName)), b.store.Delete("whole"))
		},
		"half-written document": func(b *box) error { return os.Truncate(filepath.Join(b.inst.SessionDir(), "whole.json"), 20) },
		"no document":           func(b *box) error { return b.store.Delete("whole") },
		"no processes":          func(b *box) error { return cgroup.Kill(b.layout.V2(b.cgroupRel("whole"))) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, "tsbrecl")
			doom(t, b)
			doc, err := b.store.Get("whole")
			if err != nil {
				t.Fatal(err)
			}
			b.guards.entries[doc.Mark] = Entry{Mark: doc.Mark} // what the dead sandboxd told the kernel
			if err := damage(b); err != nil {
				t.Fatal(err)
			}
			if name == "no processes" {
				if err := cgroup.WaitEmpty(t.Context(), b.layout.V2(b.cgroupRel("whole"))); err != nil {
					t.Fatal(err)
				}
			}
			if err := b.Recover(t.Context()); err != nil {
				t.Fatal(err)
			}
			if kids := b.List(t.Context()); len(kids) != 0 {
				t.Errorf("kids after the restart: %+v, want none", kids)
			}
			b.wantNothingLeft()
		})
	}
}

func TestRecoverKeepsWhatItCannotReclaim(t *testing.T) {
	b := newBox(t, "tsbkeep")
	doom(t, b)
	b.guards.set("forget", errors.New("hung"))
	if err := b.Recover(t.Context()); err == nil {
		t.Error("a reclaim that failed: no error")
	}
	kids := b.List(t.Context())
	if len(kids) != 2 || kids[0].Name != "half" || kids[0].State != wire.KidDestroying {
		t.Errorf("kids: %+v, want half kept as destroying beside whole", kids)
	}
}
