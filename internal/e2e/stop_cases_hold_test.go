package e2e

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/cgroup"
	"tagout/internal/wire"
)

// hold makes a tracer outside the kid that holds a process in its exit for as long as the caller likes: until the
// returned func is called, which may be called again.
func (s *stopCases) hold(pid int) (letGo func()) {
	s.t.Helper()
	seized, end, gone := make(chan error, 1), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		runtime.LockOSThread() // a tracer is a thread. It must not end: the box dies with the thread that started it
		defer runtime.UnlockOSThread()
		_, _, errno := unix.Syscall6(unix.SYS_PTRACE, ptraceSeize, uintptr(pid), 0, unix.PTRACE_O_TRACEEXIT, 0, 0)
		if errno != 0 {
			seized <- errno
			return
		}
		seized <- nil
		<-end
		detach(pid)
	}()
	if err := <-seized; err != nil {
		s.t.Fatalf("seizing %d: %v", pid, err)
	}
	once := sync.OnceFunc(func() { close(end); <-gone })
	s.t.Cleanup(once)
	return once
}

// ptraceSeize is PTRACE_SEIZE, which package unix lacks (ptrace(2)).
const ptraceSeize = 0x4206

// detach lets a process go that the calling thread traces, whatever it is doing.
func detach(pid int) {
	var ws unix.WaitStatus
	got, err := unix.Wait4(pid, &ws, unix.WALL|unix.WNOHANG, nil)
	if err == nil && got == 0 { // it runs
		if unix.PtraceInterrupt(pid) != nil {
			return // it is gone
		}
		_, err = unix.Wait4(pid, &ws, unix.WALL, nil)
	}
	if err == nil && ws.Stopped() {
		unix.PtraceDetach(pid) // it may be gone
	}
}

// outsider puts a process that is no child of the kid's init, and lives in none of its namespaces, into its cgroup.
func (s *stopCases) outsider(kid wire.Kid) int {
	s.t.Helper()
	cmd := exec.Command("/bin/sleep", "1000")
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // Pdeathsig is about the thread
	defer runtime.UnlockOSThread()
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() }) // dead by then
	if err := cgroup.Join(kid.Cgroup, cmd.Process.Pid); err != nil {
		s.t.Fatal(err)
	}
	return cmd.Process.Pid
}

// disk is a filesystem in a file that can be frozen: whoever writes to it then sleeps in the kernel, and no signal
// wakes it.
type disk struct {
	s    *stopCases
	dir  string
	in   io.WriteCloser
	said *bufio.Scanner

	remove func() // thaws and unmounts; may be called again
}

// diskKeeper thaws and unmounts at the end of its input, so also when the test is killed.
const diskKeeper = `set -e
mount -o loop "$1" "$2"; chmod 0777 "$2"; echo up
set +e
while read -r what; do
	case "$what" in freeze) fsfreeze -f "$2" ;; thaw) fsfreeze -u "$2" ;; esac
	echo "$what $?"
done
fsfreeze -u "$2" 2>/dev/null
umount -l "$2"`

// newDisk makes one of the given size in MiB and mounts it at dir.
func (s *stopCases) newDisk(size int64, dir string) *disk {
	s.t.Helper()
	image := filepath.Join(s.t.TempDir(), "image")
	f, err := os.Create(image)
	if err == nil {
		err = errors.Join(f.Truncate(size<<20), f.Close())
	}
	if err != nil {
		s.t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-F", "-O", "^has_journal", image).CombinedOutput(); err != nil {
		s.t.Fatalf("making a filesystem: %v: %s", err, out)
	}
	cmd := exec.Command("/bin/sh", "-c", diskKeeper, "keeper", image, dir)
	in, err := cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	d := &disk{s: s, dir: dir, in: in, said: bufio.NewScanner(out)}
	d.remove = sync.OnceFunc(func() { in.Close(); cmd.Wait() }) // it unmounts before it ends
	s.t.Cleanup(d.remove)
	if !d.said.Scan() || d.said.Text() != "up" {
		s.t.Fatalf("mounting a filesystem: the keeper said %q", d.said.Text())
	}
	return d
}

// tell has the keeper freeze or thaw.
func (d *disk) tell(what string) {
	d.s.t.Helper()
	fmt.Fprintln(d.in, what)
	if !d.said.Scan() || d.said.Text() != what+" 0" {
		d.s.t.Fatalf("telling the disk to %s: %q", what, d.said.Text())
	}
}

// fill leaves no byte on it.
func (d *disk) fill() {
	d.s.t.Helper()
	f, err := os.Create(filepath.Join(d.dir, "fill"))
	if err != nil {
		d.s.t.Fatal(err)
	}
	defer f.Close() // only full
	for size := 1 << 16; size > 0; {
		if _, err := f.Write(make([]byte, size)); errors.Is(err, unix.ENOSPC) {
			size /= 2
		} else if err != nil {
			d.s.t.Fatal(err)
		}
	}
}

// into mounts the disk into the kid's own mount namespace, at /workspace/disk.
func (d *disk) into(kid wire.Kid, pid int) {
	d.s.t.Helper()
	at := filepath.Join(d.s.box.Inst.KidDir(kid.Name), "workspace", "disk")
	if err := os.Mkdir(at, 0o755); err != nil {
		d.s.t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe", d.dir, fmt.Sprintf("/proc/%d/ns/mnt", pid), "/workspace/disk")
	cmd.Env = append(os.Environ(), "STOP_CASE_ROLE=mount")
	if out, err := cmd.CombinedOutput(); err != nil {
		d.s.t.Fatalf("mounting a disk into the kid: %v: %s", err, out)
	}
}

// mountInto mounts what lies at from in this mount namespace at to in another. It leaves the calling thread there.
func mountInto(from, ns, to string) error {
	runtime.LockOSThread()
	tree, err := unix.OpenTree(unix.AT_FDCWD, from, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("opening the tree: %w", err)
	}
	defer unix.Close(tree) // moved
	fd, err := unix.Open(ns, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd) // only a handle
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("unsharing: %w", err)
	}
	if err := unix.Setns(fd, unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("entering %s: %w", ns, err)
	}
	return unix.MoveMount(tree, "", unix.AT_FDCWD, to, unix.MOVE_MOUNT_F_EMPTY_PATH)
}

// playStopRole is what the test binary does as a process of its own, mostly inside a kid. It says that it is up with the file /workspace/up.
func playStopRole(role string) {
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	switch role {
	case "mount": // on the host
		if err := mountInto(flag.Arg(0), flag.Arg(1), flag.Arg(2)); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	case "big":
		fillMemory()
	case "roads":
		walkRoads()
	}
	fmt.Fprintln(os.Stderr, "no such role:", role)
	os.Exit(2)
}

// fillMemory touches as many MiB as its argument says and keeps them.
func fillMemory() {
	n, err := strconv.Atoi(flag.Arg(0))
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	mem, err := unix.Mmap(-1, 0, n<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for i := 0; i < len(mem); i += os.Getpagesize() {
		mem[i] = 1
	}
	stayUp()
}

func stayUp() {
	os.WriteFile("/workspace/up", nil, 0o600) // the test waits for it
	for {
		time.Sleep(time.Hour)
	}
}

// stateOf is a process's state, as in proc_pid_stat(5).
func stateOf(pid int) (string, error) {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	for i := len(raw) - 1; i > 0; i-- {
		if raw[i] == ')' && i+2 < len(raw) {
			return string(raw[i+2]), nil
		}
	}
	return "", fmt.Errorf("no state in %q", raw)
}
