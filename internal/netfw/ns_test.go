package netfw

import (
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// space is a throw-away network namespace: a thread that lives in it and runs the functions handed to it.
// The namespace goes when the thread does.
type space struct {
	t    *testing.T
	jobs chan func()
	tid  int
}

func newSpace(t *testing.T) *space {
	t.Helper()
	s := startSpace(t, func() error { return unix.Unshare(unix.CLONE_NEWNET) })
	s.do(func() error { return up("lo") })
	return s
}

// join returns another thread in the same namespace.
func (s *space) join() *space {
	s.t.Helper()
	return startSpace(s.t, func() error {
		fd, err := unix.Open(fmt.Sprintf("/proc/self/task/%d/ns/net", s.tid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		return unix.Setns(fd, unix.CLONE_NEWNET)
	})
}

func startSpace(t *testing.T, enter func() error) *space {
	t.Helper()
	s := &space{t: t, jobs: make(chan func())}
	ready := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		err := enter()
		s.tid = unix.Gettid()
		ready <- err
		for job := range s.jobs {
			job()
		}
	}()
	if err := <-ready; err != nil {
		t.Fatalf("making a network namespace: %v", err)
	}
	t.Cleanup(func() { close(s.jobs) })
	return s
}

// do runs fn on the namespace's thread and fails the test where it fails.
func (s *space) do(fn func() error) {
	s.t.Helper()
	if err := s.run(fn); err != nil {
		s.t.Fatal(err)
	}
}

// run runs fn on the namespace's thread.
func (s *space) run(fn func() error) error {
	done := make(chan error)
	s.jobs <- func() { done <- fn() }
	return <-done
}

// link makes a veth pair between two namespaces and gives its ends their addresses.
func link(t *testing.T, a *space, aName string, aAddrs []string, b *space, bName string, bAddrs []string) {
	t.Helper()
	a.do(func() error {
		v := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: aName}, PeerName: bName, PeerNamespace: netlink.NsPid(b.tid)}
		if err := netlink.LinkAdd(v); err != nil {
			return fmt.Errorf("adding %s: %w", aName, err)
		}
		return addrs(aName, aAddrs)
	})
	b.do(func() error { return addrs(bName, bAddrs) })
}

func addrs(name string, list []string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, a := range list {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(l, addr); err != nil {
			return fmt.Errorf("adding %s to %s: %w", a, name, err)
		}
	}
	return up(name)
}

func up(name string) error {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(l)
}

func route(dst, via string) error {
	_, n, err := net.ParseCIDR(dst)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{Dst: n, Gw: netip.MustParseAddr(via).AsSlice()})
}

// serve answers on addr, "tcp host:port" or "udp host:port", with label to whoever comes.
func (s *space) serve(network, addr, label string) {
	s.t.Helper()
	s.do(func() error {
		if network == "udp" {
			c, err := net.ListenPacket("udp", addr)
			if err != nil {
				return err
			}
			s.t.Cleanup(func() { c.Close() })
			go func() {
				buf := make([]byte, 64)
				for {
					_, from, err := c.ReadFrom(buf)
					if err != nil {
						return
					}
					c.WriteTo([]byte(label), from)
				}
			}()
			return nil
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return err
		}
		s.t.Cleanup(func() { l.Close() })
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				c.Write([]byte(label))
				c.Close()
			}
		}()
		return nil
	})
}
