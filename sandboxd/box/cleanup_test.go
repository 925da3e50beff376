package box

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/instance"
	"tagout/internal/testroot"
	"tagout/internal/vaultseal"
)

func sh(t *testing.T, format string, args ...any) {
	t.Helper()
	line := fmt.Sprintf(format, args...)
	if out, err := exec.Command("sh", "-ec", line).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
}

// mess makes of everything that killed daemons may leave one. It returns a file of the host that a kid's bind
// mount shows, and the processes.
func mess(t *testing.T, b Boxes, i instance.Instance) (host string, procs []*exec.Cmd) {
	t.Helper()
	l := layout(t)
	kid := i.KidsCgroupRel() + "/kid1"
	if err := l.Create(kid); err != nil {
		t.Fatal(err)
	}
	start := func(argv0 string, args ...string) *exec.Cmd {
		cmd := exec.Command("/bin/sleep", "1000")
		cmd.Args = append([]string{argv0}, args...)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			b.Cleanup(context.Background(), i.Name(), true) // thaws it, or Wait would never end
			cmd.Process.Kill()
			cmd.Wait()
		})
		procs = append(procs, cmd)
		return cmd
	}
	frozen := start("sleep", "1001")
	if err := cgroup.Join(l.V2(kid), frozen.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if err := cgroup.Freeze(l.V2(kid), ""); err != nil {
		t.Fatal(err)
	}
	if l.Hybrid() {
		half := start("sleep", "1002") // a kid that was being made: in a v1 hierarchy only, and frozen there
		dir := l.Freezer(kid)
		sh(t, "mkdir -p %s && echo %d > %s/cgroup.procs && echo FROZEN > %s/freezer.state", dir, half.Process.Pid, dir, dir)
	}
	byHand := exec.Command("/bin/sh")
	byHand.Args = []string{"/opt/credd", "-c", "sleep 1000; exit", "--instance", i.Name()} // a daemon that somebody started by hand
	byHand.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := byHand.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Kill(-byHand.Process.Pid, unix.SIGKILL); byHand.Wait() })
	named(t, process{byHand.Process.Pid, strings.Join(byHand.Args, " ")})
	outside := t.TempDir()
	host = filepath.Join(outside, "precious")
	if err := os.WriteFile(host, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	root := i.KidDir("kid1") + "/root fs"
	sh(t, "mkdir -p '%s' && mount -t tmpfs none '%s' && mkdir '%s/usr' && mount --bind %s '%s/usr'", root, root, root, outside, root)
	sh(t, "mkdir -p %s/kid1 && echo '{' > %s/kid1/state.json; echo '{\"half' > %s/kid1.json", i.RuncRoot(), i.RuncRoot(), i.SessionDir())
	sh(t, "touch %s/kid1 && unshare --net=%s/kid1 true", i.NetNSDir(), i.NetNSDir())
	sh(t, "ip link add %s type veth peer name %sq", i.KidLink(7), i.KidLink(7))
	sh(t, "iptables -N TGO-%s-hold", i.Name())
	key := vaultseal.Of(i.Name()).Files()
	sh(t, "mkdir -p %s && touch %s %s", vaultseal.Dir, key[0], key[1])
	return host, procs
}

// Everything that a mess consists of is seen by Leftovers, which is the control, and then is gone.
func TestCleanupFindsEverything(t *testing.T) {
	const name = "tbox6"
	b := boxes(t, name)
	i := setup(t, b, name)
	host, procs := mess(t, b, i)
	left, err := b.Leftovers(name, true)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"process " + fmt.Sprint(procs[0].Process.Pid) + " in its cgroup", "/opt/credd -c sleep 1000; exit --instance " + name,
		"network namespace " + i.NetNSDir() + "/kid1", "mount " + i.KidDir("kid1") + "/root fs/usr",
		"network link " + i.KidLink(7), "network link " + i.GatewayLink(),
		"ipv4 firewall chain TGO-tbox6-hold in table filter", "ipv4 firewall chain TGO-tbox6-nat in table nat", "ipv6 firewall chain TGO-tbox6-in in table filter",
		"cgroup " + layout(t).V2(i.CgroupRel()), "directory " + i.RunDir(), "directory " + i.StateDir(),
		"file " + vaultseal.Of(name).File, "file " + vaultseal.Of(name).File + ".new",
	} {
		if !slices.ContainsFunc(left, func(l string) bool { return strings.Contains(l, want) }) {
			t.Errorf("not seen: %s in\n%s", want, strings.Join(left, "\n"))
		}
	}
	if layout(t).Hybrid() && !slices.Contains(left, "cgroup "+layout(t).Freezer(i.CgroupRel())) {
		t.Error("the v1 freezer's cgroup is not seen")
	}
	begun := time.Now()
	if err := b.Cleanup(context.Background(), name, true); err != nil {
		t.Error(err)
	}
	t.Logf("cleaned up in %s", time.Since(begun))
	mustNone(t, b, name)
	for _, p := range procs {
		if status, err := reap(p.Process.Pid); err != nil || status.Signal() != unix.SIGKILL {
			t.Errorf("process %v lives: %v, %v", p.Args, status, err)
		}
	}
	if _, err := os.Stat(host); err != nil {
		t.Errorf("a file of the host was removed through a bind mount: %v", err)
	}
	if err := b.Cleanup(context.Background(), name, true); err != nil {
		t.Errorf("the second cleanup: %v", err)
	}
}

// named waits until a process that was just started has its command line: Start returns once the kernel closed the
// descriptors of the old program, a moment before it put down the arguments of the new one.
func named(t *testing.T, p process) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	limit := time.After(killWait)
	for commandLine(p.pid) != p.text {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("process %d is called %q, want %q", p.pid, commandLine(p.pid), p.text)
		}
	}
}

// reap returns how a child ended. A killed process leaves its cgroup a moment before it can be waited for.
func reap(pid int) (status unix.WaitStatus, err error) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) // nothing was written
	ctx, cancel := context.WithTimeout(context.Background(), killWait)
	defer cancel()
	if err := cgroup.WaitExit(ctx, fd); err != nil {
		return 0, err
	}
	_, err = unix.Wait4(pid, &status, 0, nil)
	return status, err
}

// TestCleanupWaitsForStrays: what is killed outside of the instance's cgroup has ended when the cleanup looks for
// leftovers, and one that does not end keeps the walls.
func TestCleanupWaitsForStrays(t *testing.T) {
	testroot.Require(t)
	cmd := exec.Command("/bin/sleep", "1004")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // dead by then
	stray := process{cmd.Process.Pid, "/bin/sleep 1004"}
	named(t, stray)
	other := process{cmd.Process.Pid, "another program"} // the pid was given to another process since
	if err := end(t.Context(), []process{other}); err != nil || commandLine(cmd.Process.Pid) != stray.text {
		t.Fatalf("another process was killed, %v", err)
	}
	if err := end(t.Context(), []process{stray}); err != nil {
		t.Fatal(err)
	}
	var status unix.WaitStatus
	if pid, err := unix.Wait4(cmd.Process.Pid, &status, unix.WNOHANG, nil); err != nil || pid != cmd.Process.Pid || status.Signal() != unix.SIGKILL {
		t.Errorf("it has not ended: %d, %v, %v", pid, status, err)
	}

	dir := "/tboxstray" + fmt.Sprint(os.Getpid())
	if err := layout(t).Create(dir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := layout(t).Remove(context.Background(), dir); err != nil {
			t.Error(err)
		}
	})
	pid, letGo := unkillable(t, layout(t).V2(dir))
	defer letGo()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := end(ctx, []process{{pid, commandLine(pid)}}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("one that its tracer holds: %v", err)
	}
}

// Without the look at the mounts, removing a kid's directory would remove the host's files.
func TestRemoveTreeRefusesMounts(t *testing.T) {
	b := boxes(t, "tbox7")
	i := setup(t, b, "tbox7")
	host, _ := mess(t, b, i)
	if err := removeTree(i.RunDir()); err == nil || !strings.Contains(err.Error(), "is still mounted") {
		t.Errorf("removeTree = %v", err)
	}
	if _, err := os.Stat(host); err != nil {
		t.Error(err)
	}
}

func TestCleanupKeepsStateUnlessPurged(t *testing.T) {
	b := boxes(t, "tbox8")
	i := setup(t, b, "tbox8")
	log := i.AuditFile(instance.Proxy)
	if err := os.WriteFile(log, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := b.Cleanup(context.Background(), "tbox8", false); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(log); err != nil {
		t.Errorf("the audit log is gone: %v", err)
	}
	if left, err := b.Leftovers("tbox8", false); err != nil || len(left) > 0 {
		t.Errorf("left over: %v, %v", left, err)
	}
	if left, err := b.Leftovers("tbox8", true); err != nil || len(left) != 1 {
		t.Errorf("with the state: %v, %v", left, err)
	}
}

func TestCleanupWithoutSlotFile(t *testing.T) {
	b := boxes(t, "tbox9")
	i := setup(t, b, "tbox9")
	sh(t, "ip link add %s type veth peer name %sq", i.KidLink(3), i.KidLink(3))
	if err := i.Release(); err != nil { // the registry is lost; the gateway link still says whose slot it is
		t.Fatal(err)
	}
	if err := b.Cleanup(context.Background(), "tbox9", true); err != nil {
		t.Fatal(err)
	}
	if all, err := links(i); err != nil || len(all) > 0 {
		t.Errorf("links are left: %v, %v", all, err)
	}
	mustNone(t, b, "tbox9")
}

// Where a kid may live, the walls around it stay.
func TestCleanupKeepsTheWallsWhileProcessesLive(t *testing.T) {
	b := boxes(t, "tboxa")
	i := setup(t, b, "tboxa")
	_, letGo := unkillable(t, layout(t).V2(i.KidsCgroupRel()))
	defer letGo()
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := b.Cleanup(ctx, "tboxa", true); err == nil {
		t.Fatal("cleanup claims to have removed a process that its tracer holds")
	}
	if !strings.Contains(save(t), "TGO-tboxa-in") {
		t.Error("the firewall was removed while a process of a kid may have lived")
	}
	if _, err := instance.Open("tboxa"); err != nil {
		t.Errorf("the slot was given back: %v", err)
	}
}

// unkillable starts a process in the cgroup that a tracer outside holds on its way out (ptrace(2),
// PTRACE_O_TRACEEXIT), so that it outlives every SIGKILL until letGo is called, which ends it.
func unkillable(t *testing.T, dir string) (pid int, letGo func()) {
	t.Helper()
	started, release, done := make(chan error), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // ptrace belongs to a thread; the thread ends with this goroutine
		cmd := exec.Command("/bin/sleep", "1003")
		cmd.SysProcAttr = &syscall.SysProcAttr{Ptrace: true}
		if err := cmd.Start(); err != nil {
			started <- err
			return
		}
		pid = cmd.Process.Pid
		var ws syscall.WaitStatus
		_, err := syscall.Wait4(pid, &ws, 0, nil) // stopped at its exec
		err = errors.Join(err, syscall.PtraceSetOptions(pid, unix.PTRACE_O_TRACEEXIT), cgroup.Join(dir, pid), syscall.PtraceCont(pid, 0))
		started <- err
		<-release
		cmd.Process.Kill() // where nobody did yet; then it comes to its exit, where it has to be let go
		for {
			if _, err := syscall.Wait4(pid, &ws, 0, nil); err != nil || !ws.Stopped() {
				return
			}
			syscall.PtraceDetach(pid) // stopped, so that it cannot fail
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	return pid, func() { close(release); <-done }
}
