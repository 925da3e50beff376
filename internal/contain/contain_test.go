package contain

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

const (
	roleVar = "TAGOUT_TEST_CONTAIN"
	outside = "TAGOUT_OUTSIDE=1"
)

func TestMain(m *testing.M) {
	if raw := os.Getenv(roleVar); raw != "" {
		os.Exit(play(raw))
	}
	os.Exit(m.Run())
}

// play makes the attempts in namespaces where all that there is to reach can be reached.
func play(raw string) int {
	var t Target
	err := json.Unmarshal([]byte(raw), &t)
	if err == nil {
		err = open(t)
	}
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(Run(t))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// open puts what machines usually have where the attempts look for it: in mounts and a network of this process's own.
func open(t Target) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	for _, dir := range []string{"/run", "/root"} {
		if err := unix.Mount("none", dir, "tmpfs", 0, "mode=0755"); err != nil {
			return fmt.Errorf("mounting over %s: %w", dir, err)
		}
	}
	daemon := "/run/tagout/other/sock/sandboxd/http.sock"
	err := errors.Join(os.WriteFile("/root/.bash_history", []byte("ls\n"), 0o600), os.MkdirAll(filepath.Dir(daemon), 0o755), lend())
	for _, path := range []string{"/run/docker.sock", daemon, t.Socket, "@" + t.Abstract} {
		err = errors.Join(err, listen("unix", path))
	}
	for _, addr := range MetadataAddrs() {
		err = errors.Join(err, listen("tcp", net.JoinHostPort(addr, "80")))
	}
	return err
}

// lend gives the loopback interface the metadata addresses.
func lend() error {
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	for _, addr := range MetadataAddrs() {
		if err == nil {
			ip := netip.MustParseAddr(addr)
			err = netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())}, Flags: unix.IFA_F_NODAD})
		}
	}
	return err
}

// listen never ends; nobody needs to accept.
func listen(network, addr string) error {
	_, err := net.Listen(network, addr)
	return err
}

// TestAttemptsReachWhatIsOpen is the control of every test that sees the attempts fail: as root, without a sandbox,
// each reaches what it is after. What this machine's kernel does not have at all cannot be reached by anybody.
func TestAttemptsReachWhatIsOpen(t *testing.T) {
	testroot.Require(t)
	dir := t.TempDir()
	marker := filepath.Join(dir, "marker")
	if err := os.WriteFile(marker, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	sleep := exec.Command("/bin/sleep", "600")
	sleep.Env = []string{outside}
	if err := sleep.Start(); err != nil {
		t.Fatal(err)
	}
	defer sleep.Wait() // killed on purpose
	defer sleep.Process.Kill()
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	target := Target{Dir: dir, Marker: marker, PID: sleep.Process.Pid, Neighbour: sleep.Process.Pid, File: marker, Env: outside,
		Socket: filepath.Join(dir, "socket"), Abstract: fmt.Sprintf("tagout-contain-%d", os.Getpid()), Host: host, Disk: disk(t), Device: ProgramDevice()}
	absent := kernelLacks()
	for _, r := range asRoot(t, target, dir) {
		why, missing := absent[r.Attempt]
		switch {
		case missing && !r.Reached:
			t.Logf("%s: %s: %s", r.Class, r.Attempt, why)
		case !r.Reached:
			t.Errorf("%s: %s: %s: seeing it refused in a kid would show nothing", r.Class, r.Attempt, r.Said)
		}
	}
}

// asRoot makes the attempts as root outside every sandbox, with a directory left open.
func asRoot(t *testing.T, target Target, dir string) []Result {
	t.Helper()
	raw, err := json.Marshal(target)
	if err != nil {
		t.Fatal(err)
	}
	left, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer left.Close() // only a handle
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{roleVar + "=" + string(raw), target.Env}
	cmd.Dir, cmd.ExtraFiles, cmd.Stderr = dir, []*os.File{left}, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC}
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var results []Result
	if err := json.Unmarshal(out, &results); err != nil || len(results) == 0 {
		t.Fatalf("%v: %s", err, out)
	}
	return results
}

// kernelLacks says what this kernel was built without, by the files that come with it.
func kernelLacks() map[string]string {
	out := map[string]string{}
	for attempt, file := range map[string]string{
		"load a module": "/proc/modules", "remove a module": "/proc/modules", "open sysrq-trigger for writing": "/proc/sysrq-trigger",
	} {
		if _, err := os.Stat(file); err != nil {
			out[attempt] = "this kernel has none: " + err.Error()
		}
	}
	return out
}

// disk is a block device that root may open here.
func disk(t *testing.T) string {
	t.Helper()
	names, err := filepath.Glob("/sys/block/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if dev := "/dev/" + filepath.Base(name); opens(dev, unix.O_RDONLY) == nil {
			return dev
		}
	}
	t.Fatal("this machine has no block device that opens")
	return ""
}

// TestFifteenClasses: none is lost.
func TestFifteenClasses(t *testing.T) {
	t.Parallel()
	classes, names := map[string]bool{}, map[string]bool{}
	for _, a := range attempts() {
		if names[a.class+a.name] {
			t.Errorf("%s: %s is there twice", a.class, a.name)
		}
		classes[a.class], names[a.class+a.name] = true, true
	}
	if len(classes) < 15 {
		t.Errorf("%d classes: %v", len(classes), classes)
	}
}
