// Package testenv is the bed on which end-to-end tests lie: a box of its own with real daemons, real kids and a
// practice internet, set up in a line and gone when the test ends. It drives the built binaries as an
// operator would, so that what the tests prove is what ships.
//
//	box := testenv.Start(t)
//	kid := box.Spawn(card, nil)
//	out := box.Exec(kid, "sh", "-c", "id -u")
//
// Several boxes run side by side; each test that calls Start may call t.Parallel.
package testenv

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testroot"
)

// startLimit bounds how long a box may take to come up, on a busy machine with two cores.
const startLimit = 90 * time.Second

// Box is one running instance. Its methods fail the test rather than return errors, unless they say so.
type Box struct {
	T    testing.TB
	Inst instance.Instance
	Net  *practice.Internet
	Bin  string // directory of the built binaries

	up     *exec.Cmd
	upLog  *os.File
	exited chan error
}

// Start sets up a box with a practice internet and waits until every daemon is healthy. The box is removed
// when the test ends, and the test fails if anything of it is left.
func Start(t testing.TB) *Box {
	t.Helper()
	return StartWith(t, nil)
}

// StartWith is Start with a change of the box's configuration; nil: none.
func StartWith(t testing.TB, change func(*config.Box)) *Box {
	t.Helper()
	testroot.Require(t)
	b := &Box{T: t, Bin: binaries(t)}
	var err error
	b.Inst, err = instance.Claim(uniqueName())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.remove)
	ctx, cancel := context.WithTimeout(t.Context(), startLimit)
	defer cancel()
	b.Net, err = practice.Start(ctx, practice.Options{Instance: b.Inst, CreddSocket: b.Inst.Socket(instance.Credd)})
	if err != nil {
		t.Fatal(err)
	}
	cfg := b.Net.BoxConfig()
	if change != nil {
		change(&cfg)
	}
	raw, err := cfg.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "box.yaml")
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if r := b.Tagout("setup", "--config", file); r.Code != 0 {
		t.Fatalf("tagout setup ended with %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	b.Up()
	return b
}

// For returns the same box for a subtest, which its failures then are about.
func (b *Box) For(t testing.TB) *Box {
	c := *b
	c.T = t
	return &c
}

// Up starts the daemons under `tagout up` and waits until all are healthy.
func (b *Box) Up() {
	b.T.Helper()
	var err error
	b.upLog, err = os.CreateTemp("", "tagout-up-*.log")
	if err != nil {
		b.T.Fatal(err)
	}
	b.up = exec.Command(filepath.Join(b.Bin, "tagout"), "--instance", b.Inst.Name(), "up", "--bin-dir", b.Bin) // our own binary
	b.up.Stdout, b.up.Stderr = b.upLog, b.upLog
	b.up.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGTERM}
	if err := b.up.Start(); err != nil {
		b.T.Fatal(err)
	}
	b.exited = make(chan error, 1)
	go func(c *exec.Cmd, ch chan error) { ch <- c.Wait() }(b.up, b.exited)
	b.WaitHealthy(instance.Daemons()...)
	b.waitProven()
}

// WaitHealthy waits until the daemons answer /healthz with 200.
func (b *Box) WaitHealthy(daemons ...string) {
	b.T.Helper()
	for _, d := range daemons {
		c := control.NewClient(b.Inst.Socket(d))
		b.Until(startLimit, d+" is healthy", func() error {
			select {
			case err := <-b.exited:
				b.exited <- err
				raw, _ := os.ReadFile(b.upLog.Name())
				b.T.Fatalf("tagout up ended early: %v\n%s", err, raw)
			default:
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			defer cancel()
			return c.Call(ctx, "GET", "/healthz", nil, nil)
		})
		c.CloseIdle()
	}
}

// Until calls check until it returns nil, and fails the test when that takes longer than limit.
func (b *Box) Until(limit time.Duration, what string, check func() error) {
	b.T.Helper()
	deadline := time.Now().Add(limit)
	for {
		err := check()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			b.T.Fatalf("waited %v until %s: %v", limit, what, err)
		}
		time.Sleep(5 * time.Millisecond) // between looks at a condition, never instead of one
	}
}

// Result is how a command of the CLI ended.
type Result struct {
	Code           int
	Stdout, Stderr string
}

// Tagout runs the CLI on this box's instance.
func (b *Box) Tagout(args ...string) Result {
	b.T.Helper()
	return b.TagoutIn(nil, args...)
}

// TagoutIn is Tagout with a standard input.
func (b *Box) TagoutIn(stdin io.Reader, args ...string) Result {
	b.T.Helper()
	var out, errOut bytes.Buffer
	cmd := exec.Command(filepath.Join(b.Bin, "tagout"), append([]string{"--instance", b.Inst.Name()}, args...)...) // our own binary
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &out, &errOut
	err := cmd.Run()
	if cmd.ProcessState == nil {
		b.T.Fatalf("running tagout %v: %v", args, err)
	}
	return Result{Code: cmd.ProcessState.ExitCode(), Stdout: out.String(), Stderr: errOut.String()}
}

// Must runs the CLI and fails the test unless it ends with 0. It returns what was printed.
func (b *Box) Must(args ...string) string {
	b.T.Helper()
	r := b.Tagout(args...)
	if r.Code != 0 {
		b.T.Fatalf("tagout %s ended with %d: %s%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
	}
	return r.Stdout
}

// StopSupervisor kills `tagout up` with sig and waits until it is gone. SIGKILL leaves the daemons running.
func (b *Box) StopSupervisor(sig unix.Signal) {
	b.T.Helper()
	if b.up == nil {
		return
	}
	b.up.Process.Signal(sig) // it may have ended already
	select {
	case <-b.exited:
	case <-time.After(30 * time.Second):
		b.up.Process.Kill() // last resort
		b.T.Errorf("tagout up did not end within 30 s of %v", sig)
		<-b.exited
	}
	b.up = nil
	if b.T.Failed() {
		if raw, err := os.ReadFile(b.upLog.Name()); err == nil {
			b.T.Logf("tagout up printed:\n%s", raw)
		}
	}
	b.upLog.Close()
	os.Remove(b.upLog.Name())
}

// remove takes the box down and proves that nothing is left.
func (b *Box) remove() {
	if b.T.Failed() {
		b.dumpLogs()
	}
	b.StopSupervisor(unix.SIGTERM)
	if b.Net != nil {
		if err := b.Net.Close(); err != nil {
			b.T.Error(err)
		}
	}
	if r := b.Tagout("cleanup", "--purge"); r.Code != 0 {
		b.T.Errorf("tagout cleanup ended with %d: %s%s", r.Code, r.Stdout, r.Stderr)
	}
	if r := b.Tagout("cleanup", "--check"); r.Code != 0 {
		b.T.Errorf("after cleanup something is left: %s%s", r.Stdout, r.Stderr)
	}
}

// dumpLogs shows the ends of the daemons' own logs of a failed test.
func (b *Box) dumpLogs() {
	logs, _ := filepath.Glob(filepath.Join(b.Inst.RunDir(), "log", "*"))
	for _, log := range logs {
		raw, err := os.ReadFile(log)
		if err != nil {
			continue
		}
		if len(raw) > 4096 {
			raw = raw[len(raw)-4096:]
		}
		b.T.Logf("%s:\n%s", filepath.Base(log), raw)
	}
}

func uniqueName() string {
	const letters = "abcdefghijklmnopqrstuvwxyz234567"
	raw := make([]byte, 8)
	rand.Read(raw) // never fails
	for i := range raw {
		raw[i] = letters[raw[i]%32]
	}
	return fmt.Sprintf("t%s", raw)
}
