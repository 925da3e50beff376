package kids

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// servant is a sandboxd of its own process, to be killed. It has one kid, whole.
type servant struct {
	b   *box
	cmd *exec.Cmd
	in  *json.Encoder
	out *bufio.Scanner
}

// servant starts one, which spawns the kid or, as a successor, takes it over.
func (b *box) servant(successor bool) *servant {
	b.t.Helper()
	return b.servantDying(successor, "")
}

// servantDying starts one that dies of kill -9 "before" or "after" the store is given a command, or never.
func (b *box) servantDying(successor bool, when string) *servant {
	b.t.Helper()
	self, err := os.Executable()
	if err != nil {
		b.t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), "TAGOUT_TEST_SANDBOXD="+b.inst.Name(), "TAGOUT_TEST_INIT="+initPath, "TAGOUT_TEST_DIES="+when, fmt.Sprintf("TAGOUT_TEST_SERVANT=%v", successor))
	cmd.Stderr = os.Stderr
	in, inErr := cmd.StdinPipe()
	out, err := cmd.StdoutPipe()
	if err != nil || inErr != nil {
		b.t.Fatal(err, inErr)
	}
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	s := &servant{b: b, cmd: cmd, in: json.NewEncoder(in), out: bufio.NewScanner(out)}
	b.t.Cleanup(s.kill)
	if s.line() != "ready" {
		b.t.Fatal("the servant is not ready")
	}
	return s
}

func (s *servant) line() string {
	if !s.out.Scan() {
		s.b.t.Fatalf("the servant has ended: %v", s.out.Err())
	}
	return s.out.Text()
}

// exec starts a detached command and returns its id when it would outlive the servant.
func (s *servant) exec(r wire.ExecRequest) (id string) {
	s.b.t.Helper()
	id = s.start(r)
	s.b.wantSheltered(id)
	return id
}

func (b *box) wantSheltered(id string) {
	b.t.Helper()
	eventually(b.t, "the store to keep "+id, func() bool {
		ids, err := b.cfg.Kept.List()
		if err != nil {
			b.t.Fatal(err)
		}
		return slices.Contains(ids, id)
	})
}

func (s *servant) start(r wire.ExecRequest) (id string) {
	s.b.t.Helper()
	r.Detach = true
	if err := s.in.Encode(r); err != nil {
		s.b.t.Fatal(err)
	}
	return s.line()
}

// kill kills it with -9.
func (s *servant) kill() {
	s.cmd.Process.Kill() // it may be dead
	s.cmd.Wait()         // as is meant
}

func runServant() int {
	err := serveOrders()
	fmt.Fprintln(os.Stderr, err)
	return 1
}

func serveOrders() error {
	inst, err := instance.Open(os.Getenv("TAGOUT_TEST_SANDBOXD"))
	if err != nil {
		return err
	}
	layout, err := cgroup.Detect()
	if err != nil {
		return err
	}
	m, err := tryManager(inst, layout, os.Getenv("TAGOUT_TEST_INIT"), newGuards(), &records{})
	if err != nil {
		return err
	}
	if when := os.Getenv("TAGOUT_TEST_DIES"); when != "" {
		m.cfg.Kept = &deadly{m.cfg.Kept, when}
	}
	ctx := context.Background()
	if os.Getenv("TAGOUT_TEST_SERVANT") == "true" {
		err = m.Recover(ctx)
	} else {
		_, err = m.Spawn(ctx, Request{Name: "whole", Plan: plan()})
	}
	if err != nil {
		return err
	}
	fmt.Println("ready")
	orders := json.NewDecoder(os.Stdin)
	for {
		var r wire.ExecRequest
		if err := orders.Decode(&r); err != nil {
			return err
		}
		err := m.Exec(ctx, "whole", "test", r, func(f wire.ExecFrame) error {
			fmt.Println(f.ID)
			return nil
		})
		if err != nil {
			return err
		}
	}
}

// deadly is a store that kills its client with -9 when it is given something: before it has it, or after.
type deadly struct {
	Store
	when string
}

func (d *deadly) Put(id string, files []int) error {
	if d.when == "after" {
		if err := d.Store.Put(id, files); err != nil {
			return err
		}
	}
	return unix.Kill(os.Getpid(), unix.SIGKILL)
}
