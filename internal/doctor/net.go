package doctor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"runtime"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/netfw"
)

func netProbes() []probe {
	return []probe{
		{Check{
			Name: "links", Needed: true, Option: "CONFIG_NET_NS, CONFIG_VETH", Since: "3.0",
			Cost: "kids would have no network of their own", Fix: "boot a kernel with these options, or load the module veth",
		}, probeLinks},
		{Check{
			Name: "iptables", Needed: true, Option: "CONFIG_NF_TABLES, CONFIG_NFT_COMPAT or CONFIG_IP_NF_IPTABLES, CONFIG_IP_NF_NAT, CONFIG_IP6_NF_FILTER", Since: "3.13",
			Cost: "there is no second wall behind the BPF programs, and nothing leads to the proxy", Fix: "`apt-get install iptables`",
		}, probeIptables},
		{Check{
			Name: "so-mark", Needed: true, Since: "5.17", Cost: "the proxy cannot mark its upstream connections without being far mightier",
			Fix: "boot a kernel from Linux 5.17 on",
		}, probeMark},
		{Check{
			Name: "sock-destroy", Option: "CONFIG_INET_DIAG_DESTROY", Since: "4.5",
			Cost: "after a network stop, sockets stay open and silent until their owner closes them; no byte passes either way",
			Fix:  "boot a kernel with this option",
		}, probeDestroy},
	}
}

// aside runs fn on a thread of its own that is thrown away afterwards, with whatever fn did to it.
func aside(fn func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		done <- fn()
	}()
	return <-done
}

// apart runs fn in a fresh network namespace.
func apart(fn func() error) error {
	return aside(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace: %w", err)
		}
		return fn()
	})
}

func probeLinks(context.Context) (string, error) {
	err := apart(func() error {
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "probe1"}, PeerName: "probe2"}); err != nil {
			return fmt.Errorf("adding a veth pair: %w", err)
		}
		return nil
	})
	return "made a network namespace and a veth pair", err
}

// probeIptables installs a whole instance's rules in a network namespace of its own.
func probeIptables(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "iptables", "--version").Output()
	if err != nil {
		return "", fmt.Errorf("asking iptables for its version: %w", err)
	}
	err = apart(func() error {
		inst, err := instance.New("doctor", 0)
		if err != nil {
			return err
		}
		if err := netfw.Ensure(inst); err != nil {
			return err
		}
		ok, err := netfw.Check(inst)
		if err == nil && !ok {
			err = errors.New("the rules do not read back as they were written")
		}
		return err
	})
	return strings.TrimSpace(string(out)) + ", v4 and v6 rules installed on trial", err
}

// probeMark sets SO_MARK with CAP_NET_RAW and no other capability.
func probeMark(context.Context) (string, error) {
	err := aside(func() error {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd) // nothing was written
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		data[0].Effective, data[0].Permitted = 1<<unix.CAP_NET_RAW, 1<<unix.CAP_NET_RAW
		if err := unix.Capset(&hdr, &data[0]); err != nil {
			return fmt.Errorf("keeping CAP_NET_RAW alone: %w", err)
		}
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, 1); err != nil {
			return fmt.Errorf("setting SO_MARK with CAP_NET_RAW: %w", err)
		}
		return nil
	})
	return "CAP_NET_RAW is enough for SO_MARK", err
}

// probeDestroy destroys a connection to itself over loopback (sock_diag(7), SOCK_DESTROY) and looks whether
// it is gone.
func probeDestroy(context.Context) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("listening on loopback: %w", err)
	}
	defer l.Close() // a probe
	c, err := net.DialTimeout("tcp", l.Addr().String(), time.Second)
	if err != nil {
		return "", fmt.Errorf("connecting over loopback: %w", err)
	}
	defer c.Close() // a probe
	if err := netlink.SocketDestroy(c.LocalAddr(), c.RemoteAddr()); err != nil {
		return "", fmt.Errorf("destroying a socket: %w", err)
	}
	c.SetReadDeadline(time.Now().Add(time.Second)) // the read below tells
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, unix.ECONNABORTED) {
		return "", fmt.Errorf("a destroyed socket goes on: %w", err)
	}
	return "destroyed a connection over loopback", nil
}
