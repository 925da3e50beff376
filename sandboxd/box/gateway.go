package box

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/netdump"
)

// makeGateway makes the link that carries the gateway address. A veth pair rather than a dummy link: kids
// need veth anyway, and kernels without dummy links exist. Its other end stays down and unused; the address
// is the box's own as long as the link itself is up.
func makeGateway(_ context.Context, j *job) error {
	name := j.inst.GatewayLink()
	link, err := findLink(name)
	if err != nil {
		return err
	}
	if link != nil && link.Attrs().Alias != instance.GatewayAlias(j.inst.Name()) {
		return fmt.Errorf("a link called %s is there and is not ours: remove it with `ip link del %s`", name, name)
	}
	if link == nil {
		// Put down first: a half-made link must be found by the teardown too.
		j.undo = append(j.undo, func(context.Context) error { return deleteLink(name) })
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "p"}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("adding link %s: %w", name, err)
		}
		if link, err = netlink.LinkByName(name); err != nil {
			return fmt.Errorf("finding link %s: %w", name, err)
		}
		if err := netlink.LinkSetAlias(link, instance.GatewayAlias(j.inst.Name())); err != nil {
			return fmt.Errorf("naming the owner of link %s: %w", name, err)
		}
	}
	return configureGateway(link, j.inst)
}

func configureGateway(link netlink.Link, i instance.Instance) error {
	name := link.Attrs().Name
	for _, l := range []string{name, name + "p"} {
		if err := noIPv6(l); err != nil {
			return err
		}
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: i.Gateway().AsSlice(), Mask: net.CIDRMask(32, 32)}}
	if err := netlink.AddrReplace(link, addr); err != nil {
		return fmt.Errorf("giving %s the address %s: %w", name, i.Gateway(), err)
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("setting %s up: %w", name, err)
	}
	return nil
}

// noIPv6 keeps the kernel from giving a link an IPv6 address of its own. Nothing to do without IPv6.
func noIPv6(link string) error {
	file := filepath.Join("/proc/sys/net/ipv6/conf", link, "disable_ipv6")
	if err := os.WriteFile(file, []byte("1"), 0); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("turning IPv6 off on %s: %w", link, err)
	}
	return nil
}

// findLink returns the link called name, nil where there is none.
func findLink(name string) (netlink.Link, error) {
	link, err := netlink.LinkByName(name)
	var none netlink.LinkNotFoundError
	if errors.As(err, &none) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("looking for link %s: %w", name, err)
	}
	return link, nil
}

// deleteLink deletes a link, and with it the other end of a pair. None there is not an error.
func deleteLink(name string) error {
	link, err := findLink(name)
	if err != nil || link == nil {
		return err
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("deleting link %s: %w", name, err)
	}
	return nil
}

// links lists the instance's links: its kids' by their prefix, and its gateway by name and alias.
func links(i instance.Instance) ([]string, error) {
	all, err := netdump.Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing links: %w", err)
	}
	var out []string
	for _, l := range all {
		a := l.Attrs()
		ours := a.Name == i.GatewayLink() && (a.Alias == "" || a.Alias == instance.GatewayAlias(i.Name()))
		if ours || strings.HasPrefix(a.Name, i.LinkPrefix()) {
			out = append(out, a.Name)
		}
	}
	return out, nil
}

// slotByLink finds the slot of an instance whose slot file was lost, by its gateway link; ok is false where
// there is no such link.
func slotByLink(name string) (slot int, ok bool) {
	for slot := range instance.Slots {
		i, err := instance.New(name, slot)
		if err != nil {
			return 0, false
		}
		if l, err := findLink(i.GatewayLink()); err == nil && l != nil && l.Attrs().Alias == instance.GatewayAlias(name) {
			return slot, true
		}
	}
	return 0, false
}
