package practice

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// namespace is a network namespace pinned at path by a bind mount, so that it can be found after a crash.
type namespace struct {
	path   string
	handle netns.NsHandle
}

// onThread runs fn on a thread of its own whose network namespace fn may change. The thread is put back
// afterwards; where that fails, it ends with the goroutine, so that no other code ever runs on it.
func onThread(fn func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := netns.Get()
		if err != nil {
			runtime.UnlockOSThread()
			done <- fmt.Errorf("opening the current network namespace: %w", err)
			return
		}
		defer home.Close() // only a handle
		err = fn()
		if back := netns.Set(home); back == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// newNamespace makes a network namespace and pins it at path.
func newNamespace(path string) (*namespace, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o444)
	if err != nil {
		return nil, fmt.Errorf("pinning the network namespace: %w", err)
	}
	f.Close() // an empty file, only mounted over
	ns := &namespace{path: path}
	err = onThread(func() error {
		h, err := netns.New()
		if err != nil {
			return fmt.Errorf("unsharing: are you root? %w", err)
		}
		ns.handle = h
		source := fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid())
		if err := unix.Mount(source, path, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("pinning it at %s: %w", path, err)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, removePin(path))
	}
	return ns, nil
}

// do runs fn on a thread that is inside the namespace. Sockets that fn makes stay there.
func (ns *namespace) do(fn func() error) error {
	return onThread(func() error {
		if err := netns.Set(ns.handle); err != nil {
			return fmt.Errorf("entering the network namespace: %w", err)
		}
		return fn()
	})
}

// close unpins the namespace; it goes away with the last socket in it.
func (ns *namespace) close() error {
	return errors.Join(ns.handle.Close(), removePin(ns.path))
}

// removePin unmounts and removes the file at path, however often it was mounted over; no file is no error.
func removePin(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return fmt.Errorf("unmounting %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("removing %s: %w", path, err)
	}
	return nil
}

// Do runs fn on a thread inside the practice namespace, for an accomplice who sits out there. Sockets that fn
// makes directly stay in the namespace; goroutines that fn starts do not run in it.
func (n *Internet) Do(fn func() error) error { return n.ns.do(fn) }

// Dial connects from inside the practice internet. address must be numeric: a name would be resolved on
// another thread.
func (n *Internet) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("dialling inside the practice internet: %w", err)
	}
	var conn net.Conn
	err := n.ns.do(func() error {
		var d net.Dialer
		var err error
		conn, err = d.DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

func (n *Internet) listen(a netip.Addr, port uint16) (net.Listener, error) {
	var l net.Listener
	err := n.ns.do(func() error {
		var err error
		l, err = net.Listen("tcp", netip.AddrPortFrom(a, port).String())
		return err
	})
	return l, err
}

func (n *Internet) listenPacket(a netip.Addr, port uint16) (net.PacketConn, error) {
	var p net.PacketConn
	err := n.ns.do(func() error {
		var err error
		p, err = net.ListenPacket("udp", netip.AddrPortFrom(a, port).String())
		return err
	})
	return p, err
}
