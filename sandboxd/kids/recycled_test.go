package kids

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// holdProcess traces the process from outside, with an option that makes the kernel hold it when it dies, until letGo.
func holdProcess(t *testing.T, pid int) (letGo func()) {
	t.Helper()
	const seize, traceExit = 0x4206, 0x40 // PTRACE_SEIZE, PTRACE_O_TRACEEXIT
	held, over := make(chan error), make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		runtime.LockOSThread() // never unlocked: the thread ends, and with it the tracing
		_, _, errno := unix.Syscall6(unix.SYS_PTRACE, seize, uintptr(pid), 0, traceExit, 0, 0)
		if errno != 0 {
			held <- errno
			return
		}
		held <- nil
		<-over
	}()
	if err := <-held; err != nil {
		t.Fatalf("tracing process %d: %v", pid, err)
	}
	done := false
	letGo = func() {
		if !done {
			done = true
			close(over)
			<-ended
		}
	}
	t.Cleanup(letGo)
	return letGo
}

// answers returns what the kid is told by a server of the machine's at the kid's gateway: its own address, where all is well.
func (b *box) answers(kid string) string {
	b.t.Helper()
	k := b.Manager.kids[kid]
	l, err := net.Listen("tcp", net.JoinHostPort(k.rec.Session.HostAddr.String(), "0"))
	if err != nil {
		b.t.Fatal(err)
	}
	defer l.Close() // asked once
	go func() {
		c, err := l.Accept()
		if err != nil {
			return // the kid is not heard
		}
		host, _, _ := net.SplitHostPort(c.RemoteAddr().String()) // it is one
		io.WriteString(c, host)
		c.Close() // said
	}()
	port := l.Addr().(*net.TCPAddr).Port
	r := b.exec(kid, wire.ExecRequest{Argv: []string{"timeout", "3", "bash", "-c", fmt.Sprintf("cat </dev/tcp/%s/%d", k.rec.Session.HostAddr, port)}})
	return r.stdout.String() + r.stderr.String()
}

// nextIs makes the index of a kid the next that is looked at.
func (b *box) nextIs(index int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = index - 1
}

// TestAnAddressWaitsForItsProcesses (K10): as long as anything of a kid lives, nobody gets its name, its address, its uids or
// its network namespace; then somebody does, and is heard at the address.
func TestAnAddressWaitsForItsProcesses(t *testing.T) {
	b := newBox(t, "tsbrecyc")
	old := b.spawn("k1", plan())
	if got := b.answers("k1"); got != old.Addr.String() {
		t.Fatalf("the kid is heard as %q, want %v: the test shows nothing", got, old.Addr)
	}
	index := b.Manager.kids["k1"].rec.Session.Index
	b.sh("k1", "sleep 4321 >/dev/null 2>&1 &")
	var sleeper int
	eventually(t, "the process", func() bool {
		pids, err := cgroup.Procs(old.Cgroup)
		i := slices.IndexFunc(pids, func(pid int) bool { return cmdline(pid) == "sleep 4321" })
		if err == nil && i >= 0 {
			sleeper = pids[i]
		}
		return sleeper != 0
	})
	letGo := holdProcess(t, sleeper)
	gone := make(chan error, 1)
	go func() { gone <- b.Destroy(t.Context(), "k1", "test", "somebody holds it") }()
	eventually(t, "the destroy", func() bool { return b.states()["k1"] == wire.KidDestroying })
	b.nextIs(index)
	if k := b.spawn("k2", plan()); k.Addr == old.Addr {
		t.Errorf("k2 got the address %v while a process of k1 lives", k.Addr)
	} else if got := b.answers("k2"); got != k.Addr.String() {
		t.Errorf("k2 is heard as %q, want %v", got, k.Addr)
	}
	if _, err := b.Spawn(t.Context(), Request{Name: "k1", Purpose: "test", Plan: plan()}); KindOf(err) != Conflict {
		t.Errorf("its name: %v", err)
	}
	select {
	case err := <-gone:
		t.Fatalf("the destroy was done before the process had ended: %v", err)
	default:
	}
	for what, there := range map[string]bool{
		"link":      slices.Contains(b.leftovers(), "link "+b.inst.KidLink(index)),
		"namespace": slices.Contains(b.leftovers(), filepath.Join(b.inst.NetNSDir(), "k1")),
	} {
		if !there {
			t.Errorf("its %s is gone while a process of it lives: %v", what, b.leftovers())
		}
	}
	letGo()
	if err := <-gone; err != nil {
		t.Fatal(err)
	}
	b.nextIs(index)
	if k := b.spawn("k1", plan()); k.Addr != old.Addr || b.answers("k1") != old.Addr.String() {
		t.Errorf("the next kid with its name has the address %v", k.Addr)
	}
}

// TestACrashedKidIsInNobodysWay (K10): one whose processes died leaves its link and its address to nobody, until it is
// destroyed; and a link that a crash has left under the next kid's name is not the next kid's.
func TestACrashedKidIsInNobodysWay(t *testing.T) {
	b := newBox(t, "tsbcrash")
	dead := b.spawn("k1", plan())
	index := b.Manager.kids["k1"].rec.Session.Index
	if err := cgroup.Kill(dead.Cgroup); err != nil {
		t.Fatal(err)
	}
	eventually(t, "its end", func() bool { return b.states()["k1"] == wire.KidExited })
	b.nextIs(index)
	if k := b.spawn("k2", plan()); k.Addr == dead.Addr || b.answers("k2") != k.Addr.String() {
		t.Errorf("the next kid has the address %v", k.Addr)
	}
	if err := b.Destroy(t.Context(), "k2", "test", "done"); err != nil {
		t.Fatal(err)
	}
	// All that says whose the link is gets lost, and so does sandboxd.
	delete(b.Manager.kids, "k1")
	if err := b.store.Delete("k1"); err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(b.leftovers(), func(l string) bool { return strings.HasPrefix(l, "link ") }) {
		t.Fatal("no link is left: the test shows nothing")
	}
	b.succeed()
	b.nextIs(index)
	if k := b.spawn("k3", plan()); k.Addr != dead.Addr || b.answers("k3") != k.Addr.String() {
		t.Errorf("the next kid with the link's name has the address %v", k.Addr)
	}
	if err := b.Destroy(t.Context(), "k3", "test", "done"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
}

// cmdline is a process's command line, "" where it has ended.
func cmdline(pid int) string {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // as above
	return strings.TrimSpace(strings.ReplaceAll(string(raw), "\x00", " "))
}
