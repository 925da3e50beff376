package practice

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

const innerLink = "eth0" // the veth's end inside the namespace

func (n *Internet) makeNetNS() error {
	ns, err := newNamespace(netnsPath(n.inst))
	if err != nil {
		return err
	}
	n.ns = ns
	n.undo = append(n.undo, ns.close)
	return nil
}

// join makes the veth pair and gives both ends their addresses.
func (n *Internet) join() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = linkName(n.inst)
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: innerLink, PeerNamespace: netlink.NsFd(n.ns.handle)}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("making link %s: %w", attrs.Name, err)
	}
	n.undo = append(n.undo, func() error { return removeLink(n.inst) })
	if err := n.configureInner(); err != nil {
		return err
	}
	host, err := netlink.LinkByName(attrs.Name)
	if err != nil {
		return fmt.Errorf("finding link %s: %w", attrs.Name, err)
	}
	if err := setAddrs(nil, host, n.HostAddr(), addr6(n.inst, 1)); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(host); err != nil {
		return fmt.Errorf("setting link %s up: %w", attrs.Name, err)
	}
	return nil
}

// configureInner sets up the namespace's own links, and routes back to the host end, so that a packet which
// wrongly gets out of the box would be answered and be noticed.
func (n *Internet) configureInner() error {
	h, err := netlink.NewHandleAt(n.ns.handle)
	if err != nil {
		return fmt.Errorf("opening netlink in the namespace: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("finding lo in the namespace: %w", err)
	}
	eth, err := h.LinkByName(innerLink)
	if err != nil {
		return fmt.Errorf("finding %s in the namespace: %w", innerLink, err)
	}
	addrs := []netip.Addr{n.EvilAddr6()}
	for host := byte(2); host <= 12; host++ {
		addrs = append(addrs, addr(n.inst, host))
	}
	if err := errors.Join(h.LinkSetUp(lo), setAddrs(h, eth, addrs...), h.LinkSetUp(eth)); err != nil {
		return fmt.Errorf("setting the namespace's links up: %w", err)
	}
	back := &netlink.Route{LinkIndex: eth.Attrs().Index, Gw: net.IP(n.HostAddr().AsSlice())}
	if err := h.RouteAdd(back); err != nil {
		return fmt.Errorf("adding the namespace's default route: %w", err)
	}
	return nil
}

// setAddrs adds the addresses to link; a nil handle means the host's namespace. IPv6 addresses are left out on
// a machine without IPv6 and are usable at once otherwise (no duplicate address detection).
func setAddrs(h *netlink.Handle, link netlink.Link, addrs ...netip.Addr) error {
	for _, a := range addrs {
		mask, flags := net.CIDRMask(28, 32), 0
		if a.Is6() {
			if !haveIPv6() {
				continue
			}
			mask, flags = net.CIDRMask(64, 128), unix.IFA_F_NODAD
		}
		add := netlink.AddrAdd
		if h != nil {
			add = h.AddrAdd
		}
		err := add(link, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: mask}, Flags: flags})
		if err != nil {
			return fmt.Errorf("adding %s to %s: %w", a, link.Attrs().Name, err)
		}
	}
	return nil
}

// haveIPv6 says whether the kernel has IPv6 and it is not switched off for new links.
func haveIPv6() bool {
	raw, err := os.ReadFile("/proc/sys/net/ipv6/conf/default/disable_ipv6")
	return err == nil && len(raw) > 0 && raw[0] == '0'
}

func removeLink(inst instance.Instance) error {
	link, err := netlink.LinkByName(linkName(inst))
	var missing netlink.LinkNotFoundError
	if errors.As(err, &missing) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	// The link also goes by itself when its namespace does: losing that race is fine.
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing link %s: %w", linkName(inst), err)
	}
	return nil
}

// Cleanup removes whatever a practice internet of the instance left, also after kill -9: it goes by names
// alone. With nothing there it does nothing. It must not run while an Internet of the instance is in use.
func Cleanup(inst instance.Instance) error {
	err := errors.Join(removeLink(inst), removePin(netnsPath(inst)))
	if err == nil {
		err = os.RemoveAll(dir(inst))
	}
	if err != nil {
		return fmt.Errorf("cleaning up the practice internet: %w", err)
	}
	return nil
}

// Leftovers names what Cleanup would remove; empty means nothing is there.
func Leftovers(inst instance.Instance) []string {
	var out []string
	if _, err := netlink.LinkByName(linkName(inst)); err == nil {
		out = append(out, "link "+linkName(inst))
	}
	if _, err := os.Lstat(dir(inst)); err == nil {
		out = append(out, "directory "+dir(inst))
	}
	return out
}
