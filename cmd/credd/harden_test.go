package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

// helperEnv makes this test's program do one thing as another process, and says what: look PID, or wait.
const helperEnv = "TAGOUT_TEST_CREDD_HELPER"

func TestMain(m *testing.M) {
	switch what, pid, _ := strings.Cut(os.Getenv(helperEnv), " "); what {
	case "look":
		look(pid)
	case "wait":
		beWatched()
	default:
		os.Exit(m.Run())
	}
}

// look says what of another process's memory it can get at.
func look(pid string) {
	n, err := strconv.Atoi(pid)
	if err != nil {
		panic(err)
	}
	runtime.LockOSThread()
	fmt.Println("ptrace", says(unix.PtraceAttach(n)))
	unix.PtraceDetach(n) // where it worked
	mem, err := os.Open(filepath.Join("/proc", pid, "mem"))
	fmt.Println("mem", says(err))
	if err == nil {
		mem.Close()
	}
	_, err = os.ReadFile(filepath.Join("/proc", pid, "environ"))
	fmt.Println("environ", says(err))
	var b [8]byte
	_, err = unix.ProcessVMReadv(n, []unix.Iovec{{Base: &b[0], Len: 8}}, []unix.RemoteIovec{{Base: 0x400000, Len: 8}}, 0)
	fmt.Println("process_vm_readv", says(err))
}

func says(err error) string {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return "refused"
	}
	return fmt.Sprint("not refused: ", err)
}

// beWatched is a process that lets everybody look, where the machine does.
func beWatched() {
	unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0)
	unix.Prctl(unix.PR_SET_PTRACER, ^uintptr(0), 0, 0, 0) // as above: machines without Yama refuse it
	unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY})
	fmt.Println("waiting")
	io.Copy(io.Discard, os.Stdin) // ends with the test
}

// helper runs this test's program as credd's user, without a capability.
func (w *world) helper(what string) *exec.Cmd {
	w.t.Helper()
	copied := filepath.Join(filepath.Dir(w.binary), "helper")
	if _, err := os.Stat(copied); err != nil {
		raw, err := os.ReadFile(os.Args[0])
		if err == nil {
			err = os.WriteFile(copied, raw, 0o755) // a public binary
		}
		if err != nil {
			w.t.Fatal(err)
		}
	}
	cmd := exec.Command(copied)
	if cmd.Dir = w.dir; w.dir == "" {
		cmd.Dir = "/"
	}
	cmd.Env = append(os.Environ(), helperEnv+"="+what, "GOTRACEBACK=crash")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential: &syscall.Credential{Uid: uint32(w.inst.UID(instance.Credd)), Gid: uint32(w.inst.GroupID())}, // not negative
		Pdeathsig:  syscall.SIGKILL,
	}
	return cmd
}

// watched starts a process of credd's user that is not hardened.
func (w *world) watched() *exec.Cmd {
	w.t.Helper()
	cmd := w.helper("wait")
	in, err := cmd.StdinPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { in.Close(); cmd.Process.Kill(); cmd.Wait() })
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "waiting\n" {
		w.t.Fatalf("the helper says %q, %v", line, err)
	}
	return cmd
}

// TestNobodyLooksIntoCredd (invariant 3): its memory is locked, and not even a process of its own user gets at it. The
// control is another process of that user, which the same looks get at.
func TestNobodyLooksIntoCredd(t *testing.T) {
	w := newWorld(t)
	w.start()
	locked, resident := w.status("VmLck"), w.status("VmRSS")
	if locked == 0 || locked < resident {
		t.Errorf("%d KiB are locked of %d resident", locked, resident)
	}
	if w.status("VmSwap") != 0 {
		t.Error("something is swapped out")
	}
	limits, err := os.ReadFile(filepath.Join("/proc", itoa(w.cmd.Process.Pid), "limits"))
	if err != nil || !regexp.MustCompile(`(?m)^Max core file size +0 +0 `).Match(limits) {
		t.Errorf("%v:\n%s", err, limits)
	}
	said := func(pid int) string {
		out, err := w.helper("look " + itoa(pid)).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	if out := said(w.cmd.Process.Pid); strings.Count(out, ": ") > 0 || strings.Count(out, "refused") != 4 {
		t.Errorf("credd:\n%s", out)
	}
	if out := said(w.watched().Process.Pid); strings.Count(out, "not refused") != 4 {
		t.Errorf("control:\n%s", out)
	}
}

// status reads a figure of credd's /proc/PID/status, in KiB.
func (w *world) status(key string) int {
	w.t.Helper()
	raw, err := os.ReadFile(filepath.Join("/proc", itoa(w.cmd.Process.Pid), "status"))
	if err != nil {
		w.t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if v, ok := strings.CutPrefix(line, key+":"); ok {
			n, err := strconv.Atoi(strings.Fields(v)[0])
			if err != nil {
				w.t.Fatal(err)
			}
			return n
		}
	}
	w.t.Fatalf("there is no %s", key)
	return 0
}

// TestCreddLeavesNoCore: whatever kills it, the kernel writes no core, and what it prints holds no secret. The control is a
// process of the same user whose core the kernel does write.
func TestCreddLeavesNoCore(t *testing.T) {
	if raw, err := os.ReadFile("/proc/sys/kernel/core_pattern"); err != nil || len(bytes.TrimSpace(raw)) == 0 {
		t.Fatalf("this machine writes no cores at all: %q, %v", raw, err)
	}
	w := newWorld(t)
	w.dir = filepath.Join(filepath.Dir(w.binary), "cores") // where a core could be written
	if err := errors.Join(os.Mkdir(w.dir, 0o700), os.Chown(w.dir, w.inst.UID(instance.Credd), w.inst.GroupID())); err != nil {
		t.Fatal(err)
	}
	t.Setenv("GOTRACEBACK", "crash") // or Go's runtime would end the process itself
	for _, sig := range []syscall.Signal{syscall.SIGABRT, syscall.SIGSEGV, syscall.SIGQUIT} {
		w.start()
		if err := w.call("PUT", "/v1/vault/vendor_api", wire.VaultEntry{Value: testValue, Hosts: []string{"api.vendor.test:443"}}, nil); err != nil {
			t.Fatal(err)
		}
		token := w.mint(w.inst.SessionMark(uint32(sig)))
		if err := w.cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
		w.cmd.Wait() // by the signal
		st := w.cmd.ProcessState.Sys().(syscall.WaitStatus)
		if !st.Signaled() || st.CoreDump() {
			t.Errorf("%v: %v, core dumped: %v", sig, w.cmd.ProcessState, st.CoreDump())
		}
		if w.stderr.Len() == 0 {
			t.Errorf("%v: nothing was printed: the look for secrets shows nothing", sig)
		}
		w.noSecretLeft(testValue, token)
	}
	if left, err := os.ReadDir(w.dir); err != nil || len(left) > 0 {
		t.Errorf("it left %v, %v", left, err)
	}
	control := w.watched()
	if err := control.Process.Signal(syscall.SIGABRT); err != nil {
		t.Fatal(err)
	}
	control.Wait() // by the signal
	if st := control.ProcessState.Sys().(syscall.WaitStatus); !st.CoreDump() {
		t.Errorf("control: %v, and no core: the test shows nothing", control.ProcessState)
	}
}

// TestEveryRouteAsksWhoCalls: each route of credd that the protocol lists refuses a member of the instance's group whose
// uid it is not for, and nobody else even connects.
func TestEveryRouteAsksWhoCalls(t *testing.T) {
	w := newWorld(t)
	w.start()
	routes := creddRoutes(t)
	const stranger = 65534
	for _, r := range routes {
		status, err := w.as(stranger, w.inst.GroupID(), r.method, r.path)
		if err != nil {
			t.Errorf("%s %s: %v", r.method, r.path, err)
			continue
		}
		if open := strings.Contains(r.text, "the group"); open == (status == http.StatusForbidden) {
			t.Errorf("%s %s answers a stranger of the group with %d", r.method, r.path, status)
		}
		if strings.Contains(r.text, "only uid 0") {
			if status, err := w.as(w.inst.UID(instance.Proxy), w.inst.GroupID(), r.method, r.path); err != nil || status != http.StatusForbidden {
				t.Errorf("%s %s answers the proxy with %d, %v", r.method, r.path, status, err)
			}
		}
		if strings.Contains(r.text, "only the proxy") {
			if status, err := w.as(0, 0, r.method, r.path); err != nil || status != http.StatusForbidden {
				t.Errorf("%s %s answers root with %d, %v", r.method, r.path, status, err)
			}
		}
		if _, err := w.as(stranger, stranger, r.method, r.path); !errors.Is(err, unix.EACCES) {
			t.Errorf("%s %s: a stranger connects: %v", r.method, r.path, err)
		}
	}
	if len(routes) < 11 {
		t.Errorf("only %d routes are listed", len(routes))
	}
}

type route struct{ method, path, text string }

// creddRoutes reads the routes of credd that package wire lists.
func creddRoutes(t *testing.T) []route {
	t.Helper()
	raw, err := os.ReadFile("../../internal/wire/wire.go")
	if err != nil {
		t.Fatal(err)
	}
	var out []route
	line := regexp.MustCompile(`^//\t(\S*) +(GET|POST|PUT|DELETE) +(/\S+) +(.*)`)
	of := ""
	for text := range strings.Lines(string(raw)) {
		m := line.FindStringSubmatch(text)
		if m == nil {
			continue
		}
		if m[1] != "" {
			of = m[1]
		}
		if of == instance.Credd {
			out = append(out, route{m[2], regexp.MustCompile(`\{\w+\}`).ReplaceAllString(m[3], "x"), m[4]})
		}
	}
	return out
}

// as sends one request with a thread's own credentials.
func (w *world) as(uid, gid int, method, path string) (status int, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never given back: the thread ends with the goroutine
		if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, 0, 0, 0); e != 0 {
			err = e
			return
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESGID, uintptr(gid), uintptr(gid), uintptr(gid)); e != 0 {
			err = e
			return
		}
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); e != 0 {
			err = e
			return
		}
		status, err = statusHere(w.inst.Socket(instance.Credd), method, path)
	}()
	<-done
	return status, err
}

// statusHere sends one request without leaving the calling thread, and returns the status of the answer.
func statusHere(socket, method, path string) (int, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd) // nothing is buffered
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		return 0, err
	}
	req, err := http.NewRequest(method, "http://credd"+path, strings.NewReader("{}")) // blocking on purpose
	if err != nil {
		return 0, err
	}
	req.Close = true
	if err := req.Write(fdStream(fd)); err != nil {
		return 0, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(fdStream(fd)), req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}
