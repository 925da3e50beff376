package bpf

import (
	"bufio"
	"encoding/json"
	"errors"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// The test binary is also the process inside the cgroup: it makes single socket calls as told on stdin and
// answers with the bare errno.
const helperEnv = "TAGOUT_BPF_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" {
		helperMain(os.Stdin, os.Stdout)
		return
	}
	if dir := os.Getenv(pinsEnv); dir != "" {
		pinsMain(dir)
		return
	}
	os.Exit(m.Run())
}

type request struct {
	Op                  string // socket, bind, connect, reconnect, sendto, send, recv, wait, mark, marked, listen, accept, name, close
	FD                  int
	Domain, Type, Proto int
	Addr                netip.AddrPort
	Len                 int
}

type answer struct {
	N     int // descriptor or bytes
	Errno syscall.Errno
	Addr  netip.AddrPort
}

func helperMain(in io.Reader, out io.Writer) {
	runtime.LockOSThread()
	dec, enc := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var r request
		if dec.Decode(&r) != nil {
			return
		}
		a, err := r.do()
		if err != nil && !errors.As(err, &a.Errno) {
			a.Errno = unix.EINVAL
		}
		if enc.Encode(a) != nil {
			return
		}
	}
}

func (r request) do() (a answer, err error) {
	switch r.Op {
	case "socket":
		a.N, err = unix.Socket(r.Domain, r.Type, r.Proto)
		if err == nil {
			tv := unix.Timeval{Sec: 2}
			_ = unix.SetsockoptTimeval(a.N, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv)
			tv = unix.Timeval{Usec: 700_000} // connects within the machine take none of it
			_ = unix.SetsockoptTimeval(a.N, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &tv)
			_ = unix.SetsockoptInt(a.N, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}
	case "bind":
		err = unix.Bind(r.FD, sockaddr(r.Addr))
	case "connect":
		err = unix.Connect(r.FD, sockaddr(r.Addr))
	case "reconnect": // Len times
		for ; r.Len > 0 && err == nil; r.Len-- {
			err = unix.Connect(r.FD, sockaddr(r.Addr))
		}
	case "sendto":
		err = unix.Sendto(r.FD, make([]byte, r.Len), 0, sockaddr(r.Addr))
	case "send":
		a.N, err = unix.Write(r.FD, make([]byte, r.Len))
	case "recv":
		a.N, err = unix.Read(r.FD, make([]byte, 65536))
	case "wait": // for something to read, Len milliseconds
		a.N, err = unix.Poll([]unix.PollFd{{Fd: int32(r.FD), Events: unix.POLLIN}}, r.Len) // a descriptor
	case "mark":
		err = unix.SetsockoptInt(r.FD, unix.SOL_SOCKET, unix.SO_MARK, r.Len)
	case "marked":
		a.N, err = unix.GetsockoptInt(r.FD, unix.SOL_SOCKET, unix.SO_MARK)
	case "listen":
		err = unix.Listen(r.FD, 8)
	case "accept":
		a.N, _, err = unix.Accept(r.FD)
	case "name":
		var sa unix.Sockaddr
		sa, err = unix.Getsockname(r.FD)
		a.Addr = fromSockaddr(sa)
	case "close":
		err = unix.Close(r.FD)
	}
	return a, err
}

func sockaddr(ap netip.AddrPort) unix.Sockaddr {
	if ap.Addr().Is4() {
		return &unix.SockaddrInet4{Addr: ap.Addr().As4(), Port: int(ap.Port())}
	}
	return &unix.SockaddrInet6{Addr: ap.Addr().As16(), Port: int(ap.Port())}
}

func fromSockaddr(sa unix.Sockaddr) netip.AddrPort {
	switch s := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(s.Addr), uint16(s.Port)) // a port
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(s.Addr), uint16(s.Port)) // a port
	}
	return netip.AddrPort{}
}

// helper is the test's side of such a process.
type helper struct {
	t   testing.TB
	cmd *exec.Cmd
	in  *json.Encoder
	out *json.Decoder
}

// startHelper starts one in the cgroup and in the network namespace of the calling thread.
func startHelper(t testing.TB, cgroup string) *helper {
	t.Helper()
	dir, err := os.Open(cgroup)
	must(t, err)
	defer dir.Close()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"=1", "GODEBUG=asyncpreemptoff=1") // no signals: they end calls with EINTR
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd()), Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return &helper{t: t, cmd: cmd, in: json.NewEncoder(in), out: json.NewDecoder(bufio.NewReader(out))}
}

func (h *helper) call(r request) answer {
	h.t.Helper()
	var a answer
	if err := h.in.Encode(r); err != nil {
		h.t.Fatalf("asking the helper: %v", err)
	}
	if err := h.out.Decode(&a); err != nil {
		h.t.Fatalf("waiting for the helper's %s: %v", r.Op, err)
	}
	return a
}

// socket makes a socket that must succeed.
func (h *helper) socket(domain, typ int) int {
	h.t.Helper()
	a := h.call(request{Op: "socket", Domain: domain, Type: typ})
	if a.Errno != 0 {
		h.t.Fatalf("socket(%d, %d): %v", domain, typ, a.Errno)
	}
	return a.N
}

// dial makes a socket and connects it.
func (h *helper) dial(domain, typ int, to netip.AddrPort) (fd int, errno syscall.Errno) {
	h.t.Helper()
	fd = h.socket(domain, typ)
	return fd, h.call(request{Op: "connect", FD: fd, Addr: to}).Errno
}

// world is a network of its own: the box's namespace, in which the calling goroutine (locked to its thread)
// stays until the test ends, and a kid's namespace behind a veth pair.
type world struct {
	box, kid netns.NsHandle
	link     int // host-side ifindex
}

func newWorld(t testing.TB) *world {
	t.Helper()
	runtime.LockOSThread()
	before, err := netns.Get()
	must(t, err)
	w := &world{}
	w.kid, err = netns.New()
	must(t, err)
	w.box, err = netns.New() // the thread is in here from now on
	must(t, err)
	t.Cleanup(func() {
		must(t, netns.Set(before))
		w.box.Close()
		w.kid.Close()
		before.Close()
		runtime.UnlockOSThread()
	})
	w.build(t)
	return w
}

func (w *world) build(t testing.TB) {
	t.Helper()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "kidf-1"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(w.kid))}
	must(t, netlink.LinkAdd(veth))
	host := up(t, nil, "kidf-1", tHost.String()+"/31", "2001:db8::1/64")
	up(t, nil, "lo", tGateway.String()+"/32", tName.String()+"/32", tWorld.String()+"/32")
	w.link = host.Attrs().Index

	h, err := netlink.NewHandleAt(w.kid)
	must(t, err)
	defer h.Close()
	eth := up(t, h, "eth0", tKid.String()+"/31", "2001:db8::2/64")
	up(t, h, "lo")
	must(t, h.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: tHost.AsSlice()}))
	eventually(t, "both ends of the link to come up", func() bool {
		near, err := netlink.LinkByIndex(w.link)
		far, err2 := h.LinkByName("eth0")
		return err == nil && err2 == nil && near.Attrs().OperState == netlink.OperUp && far.Attrs().OperState == netlink.OperUp
	})
}

// start runs a helper inside the kid's namespace.
func (w *world) start(t testing.TB, cgroup string) *helper {
	t.Helper()
	must(t, netns.Set(w.kid))
	h := startHelper(t, cgroup)
	must(t, netns.Set(w.box))
	return h
}
