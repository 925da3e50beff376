package kids

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// runProbe is the test binary inside a kid. It prints what it saw as JSON.
func runProbe(name string) int {
	switch name {
	case "attacks":
		json.NewEncoder(os.Stdout).Encode(attacks()) // the test sees that it is missing
	case "sockets":
		json.NewEncoder(os.Stdout).Encode(sockets()) // the test sees that it is missing
	case "socket": // one that is refused; then it sleeps for so many seconds
		fmt.Println(openSocket(unix.SYS_SOCKET, unix.AF_ALG, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0))
		seconds, _ := strconv.Atoi(os.Args[1]) // none where it is no number
		time.Sleep(time.Duration(seconds) * time.Second)
	case "many sockets":
		n, _ := strconv.Atoi(os.Args[1]) // as above
		for range n {
			if openSocket(unix.SYS_SOCKET, unix.AF_ALG, unix.SOCK_DGRAM, 0) != "EPERM" {
				return 1
			}
		}
	case "image":
		json.NewEncoder(os.Stdout).Encode(lookAtImage()) // the test sees that it is missing
	case "forks":
		n, err := forks()
		fmt.Printf("%d %v\n", n, err)
	case "memory":
		hoard()
	case "stop-all":
		for {
			unix.Kill(-1, unix.SIGSTOP) // all that it may signal but itself
		}
	case "serve":
		return serve()
	case "orphans":
		n, _ := strconv.Atoi(os.Args[1]) // none where it is no number
		return orphans(n)
	case "dial":
		fmt.Println(dial())
	case "fill":
		n, err := fill(os.Args[1])
		fmt.Printf("%d %v\n", n, err)
	default:
		return runIsolationProbe(name)
	}
	return 0
}

// attacks maps what a kid tries to the errno that it got, "" where it succeeded.
func attacks() map[string]string {
	out := map[string]string{}
	call := func(name string, nr uintptr, args ...uintptr) {
		var a [6]uintptr
		copy(a[:], args)
		_, _, errno := unix.RawSyscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5])
		out[name] = ""
		if errno != 0 {
			out[name] = unix.ErrnoName(errno)
		}
	}
	runtime.LockOSThread()
	call("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, 0)
	call("bpf", unix.SYS_BPF, 0, 0, 0)
	call("perf_event_open", unix.SYS_PERF_EVENT_OPEN, 0, 0, 0, 0, 0)
	call("keyctl", unix.SYS_KEYCTL, unix.KEYCTL_GET_KEYRING_ID, ^uintptr(2), 0)
	call("add_key", unix.SYS_ADD_KEY, 0, 0, 0, 0, 0)
	call("userfaultfd", unix.SYS_USERFAULTFD, 0)
	call("setns", unix.SYS_SETNS, ^uintptr(0), 0)
	call("fsopen", unix.SYS_FSOPEN, 0, 0)
	call("move_mount", unix.SYS_MOVE_MOUNT, 0, 0, 0, 0, 0)
	call("open_tree", unix.SYS_OPEN_TREE, 0, 0, 0)
	call("pivot_root", unix.SYS_PIVOT_ROOT, 0, 0)
	call("clone3", unix.SYS_CLONE3, 0, 0)
	call("pidfd_getfd", unix.SYS_PIDFD_GETFD, ^uintptr(0), 0, 0)
	slash := []byte("/\x00")
	call("umount", unix.SYS_UMOUNT2, uintptr(unsafe.Pointer(&slash[0])), 0)
	call("chroot", unix.SYS_CHROOT, uintptr(unsafe.Pointer(&slash[0])))
	call("mount", unix.SYS_MOUNT, 0, uintptr(unsafe.Pointer(&slash[0])), 0, unix.MS_REMOUNT|unix.MS_BIND, 0)
	for name, family := range map[string]uintptr{"vsock": unix.AF_VSOCK, "alg": unix.AF_ALG, "packet": unix.AF_PACKET, "bluetooth": unix.AF_BLUETOOTH,
		"inet": unix.AF_INET, "unix": unix.AF_UNIX, "netlink": unix.AF_NETLINK} {
		call("socket "+name, unix.SYS_SOCKET, family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	}
	var pair [2]int32
	for name, family := range map[string]uintptr{"inet": unix.AF_INET, "alg": unix.AF_ALG, "tipc": unix.AF_TIPC, "unix": unix.AF_UNIX} {
		call("socketpair "+name, unix.SYS_SOCKETPAIR, family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0, uintptr(unsafe.Pointer(&pair)))
	}
	call("raw socket", unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_ICMP)
	for _, path := range []string{"/x", "/usr/x", "/etc/passwd", "/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/dev/x"} {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, 0o600)
		out["write "+path] = name(err)
		f.Close() // nil is harmless
	}
	out["signal init"] = name(unix.Kill(1, unix.SIGTERM))
	out["trace init"] = name(unix.PtraceAttach(1))
	call("unshare user", unix.SYS_UNSHARE, unix.CLONE_NEWUSER) // last: where it works, it changes the thread
	return out
}

// openSocket opens a socket, or a pair, and returns the errno, "" where that succeeded.
func openSocket(nr uintptr, family, kind, proto int) string {
	var pair [2]int32
	fd, _, errno := unix.Syscall6(nr, uintptr(family), uintptr(kind), uintptr(proto), uintptr(unsafe.Pointer(&pair)), 0, 0)
	switch {
	case errno != 0:
		return unix.ErrnoName(errno)
	case nr == unix.SYS_SOCKETPAIR:
		unix.Close(int(pair[0]))
		unix.Close(int(pair[1]))
	default:
		unix.Close(int(fd))
	}
	return ""
}

// sockets maps "CALL FAMILY TYPE PROTOCOL" to what opening it gave: every family with one type, the internet's with
// every type and many protocols.
func sockets() map[string]string {
	out := map[string]string{}
	try := func(call string, nr uintptr, family, kind, proto int) {
		out[fmt.Sprint(call, " ", family, " ", kind&0xf, " ", proto)] = openSocket(nr, family, kind, proto)
	}
	for family := -1; family < 64; family++ {
		try("socketpair", unix.SYS_SOCKETPAIR, family, unix.SOCK_STREAM, 0)
		if family != unix.AF_INET && family != unix.AF_INET6 {
			try("socket", unix.SYS_SOCKET, family, unix.SOCK_RAW|unix.SOCK_NONBLOCK, 0)
			continue
		}
		for kind := range 16 {
			for _, proto := range []int{-1, 0, 1, 2, 5, 6, 7, 16, 17, 18, unix.IPPROTO_ICMPV6, unix.IPPROTO_SCTP, unix.IPPROTO_UDPLITE, unix.IPPROTO_RAW, unix.IPPROTO_MPTCP, 1 << 20} {
				try("socket", unix.SYS_SOCKET, family, kind|unix.SOCK_CLOEXEC, proto)
			}
		}
	}
	return out
}

func name(err error) string {
	if err == nil {
		return ""
	}
	for e := error(err); e != nil; {
		if errno, ok := e.(unix.Errno); ok {
			return unix.ErrnoName(errno)
		}
		u, ok := e.(interface{ Unwrap() error })
		if !ok {
			break
		}
		e = u.Unwrap()
	}
	return err.Error()
}

// forks starts sleepers until that fails.
func forks() (int, error) {
	for n := range 100_000 {
		if err := exec.Command("/bin/sleep", "60").Start(); err != nil {
			return n, err
		}
	}
	return 100_000, nil
}

// hoard touches memory until it is killed.
func hoard() {
	var all [][]byte
	for {
		chunk := make([]byte, 1<<20)
		for i := 0; i < len(chunk); i += 4096 {
			chunk[i] = 1
		}
		all = append(all, chunk)
		if len(all) == 4096 {
			time.Sleep(time.Minute) // 4 GiB: the limit does not work
		}
	}
}

// fill writes to path until that fails.
func fill(path string) (int, error) {
	f, err := os.Create(path) // the test's own
	if err != nil {
		return 0, err
	}
	defer f.Close() // full anyway
	chunk := []byte(strings.Repeat("x", 1<<16))
	for n := range 1 << 20 {
		if _, err := f.Write(chunk); err != nil {
			return n, err
		}
	}
	return 1 << 20, nil
}

// serve listens, with workers that have the listener too.
func serve() int {
	l, err := net.Listen("tcp", "127.0.0.1:8080")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	f, err := l.(*net.TCPListener).File()
	for range 4 {
		worker := exec.Command("/bin/sleep", "300")
		worker.ExtraFiles = []*os.File{f}
		worker.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err == nil {
			err = worker.Start()
		}
	}
	if err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("serving")
	for {
		c, err := l.Accept()
		if err != nil {
			return 1
		}
		c.Close() // nothing to say
	}
}

// dial says what a connection to serve's port gives.
func dial() string {
	c, err := net.Dial("tcp", "127.0.0.1:8080")
	if err == nil {
		c.Close() // a probe
		return ""
	}
	return name(err)
}

// orphans starts shells that leave a process behind each.
func orphans(n int) int {
	for range n {
		if err := exec.Command("/bin/sh", "-c", "sleep .1 &").Run(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
	return 0
}
