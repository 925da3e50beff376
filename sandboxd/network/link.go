package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/netdump"
)

// kidLink is what the interface is called inside every kid.
const kidLink = "eth0"

// LinkConfig describes a kid's veth pair.
type LinkConfig struct {
	NetNS    string     // path of the kid's pinned network namespace
	Name     string     // of the host's end
	HostAddr netip.Addr // the two ends of a /31 (RFC 3021)
	KidAddr  netip.Addr
}

// Connect makes the pair, gives both ends their address and each other's hardware address, sets the kid's
// default route and brings everything up. It returns the index of the host's end. The caller removes a
// half-made pair with Disconnect.
func Connect(cfg LinkConfig) (ifindex int, err error) {
	ns, err := os.Open(cfg.NetNS)
	if err != nil {
		return 0, fmt.Errorf("connecting %s: %w", cfg.Name, err)
	}
	defer ns.Close() // only read
	attrs := netlink.NewLinkAttrs()
	attrs.Name = cfg.Name
	pair := &netlink.Veth{LinkAttrs: attrs, PeerName: kidLink, PeerNamespace: netlink.NsFd(int(ns.Fd()))}
	if err := netlink.LinkAdd(pair); err != nil {
		return 0, fmt.Errorf("connecting %s: making the veth pair: %w", cfg.Name, err)
	}
	host, err := netlink.LinkByName(cfg.Name)
	if err != nil {
		return 0, fmt.Errorf("connecting %s: %w", cfg.Name, err)
	}
	if err := hardenHostEnd(cfg.Name); err != nil {
		return 0, fmt.Errorf("connecting %s: %w", cfg.Name, err)
	}
	var kidMAC net.HardwareAddr
	err = inNamespace(cfg.NetNS, func() (err error) {
		kidMAC, err = setUpKidEnd(cfg, host.Attrs().HardwareAddr)
		return err
	})
	if err == nil {
		err = setUpHostEnd(cfg, host, kidMAC)
	}
	if err != nil {
		return 0, fmt.Errorf("connecting %s: %w", cfg.Name, err)
	}
	return host.Attrs().Index, nil
}

// hardenHostEnd: a packet that claims a source address which does not belong on this link is dropped, no
// IPv6, no redirects, nothing is forwarded. It happens before the link is up.
func hardenHostEnd(link string) error {
	v4, v6 := "ipv4/conf/"+link+"/", "ipv6/conf/"+link+"/"
	for _, s := range [][2]string{
		{v6 + "disable_ipv6", "1"},
		{v4 + "rp_filter", "1"},
		{v4 + "forwarding", "0"},
		{v4 + "accept_redirects", "0"},
		{v4 + "send_redirects", "0"},
		{v4 + "accept_source_route", "0"},
	} {
		if err := sysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	return nil
}

func setUpHostEnd(cfg LinkConfig, host netlink.Link, kidMAC net.HardwareAddr) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	return setUp(h, host, cfg.HostAddr, cfg.KidAddr, kidMAC)
}

// setUpKidEnd runs in the kid's network namespace.
func setUpKidEnd(cfg LinkConfig, hostMAC net.HardwareAddr) (net.HardwareAddr, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("finding lo: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return nil, fmt.Errorf("bringing lo up: %w", err)
	}
	kid, err := h.LinkByName(kidLink)
	if err != nil {
		return nil, fmt.Errorf("finding %s: %w", kidLink, err)
	}
	if err := setUp(h, kid, cfg.KidAddr, cfg.HostAddr, hostMAC); err != nil {
		return nil, err
	}
	route := &netlink.Route{LinkIndex: kid.Attrs().Index, Gw: cfg.HostAddr.AsSlice()}
	if err := h.RouteAdd(route); err != nil {
		return nil, fmt.Errorf("setting the default route: %w", err)
	}
	return kid.Attrs().HardwareAddr, nil
}

// setUp gives link its address and its only neighbour, and brings it up. The neighbour is permanent, so no
// ARP is needed and no answer to it can be forged.
func setUp(h *netlink.Handle, link netlink.Link, own, peer netip.Addr, peerMAC net.HardwareAddr) error {
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(31, 32)}}
	if err := h.AddrAdd(link, addr); err != nil {
		return fmt.Errorf("setting address %s: %w", own, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("bringing %s up: %w", link.Attrs().Name, err)
	}
	neigh := &netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: netlink.FAMILY_V4, State: netlink.NUD_PERMANENT,
		IP: peer.AsSlice(), HardwareAddr: peerMAC,
	}
	if err := h.NeighSet(neigh); err != nil {
		return fmt.Errorf("setting neighbour %s: %w", peer, err)
	}
	return nil
}

// Index returns the index of the host's end; ok is false where there is no such link.
func Index(link string) (ifindex int, ok bool, err error) {
	if link == "" {
		return 0, false, nil
	}
	l, err := netlink.LinkByName(link)
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("looking for %s: %w", link, err)
	}
	return l.Attrs().Index, true, nil
}

// Disconnect removes the pair; a pair that is not there is not an error.
func Disconnect(link string) error {
	index, ok, err := Index(link)
	if err != nil || !ok {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Index = index
	if err := netlink.LinkDel(&netlink.Veth{LinkAttrs: attrs}); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", link, err)
	}
	return nil
}

// Links returns the names of this machine's interfaces that begin with prefix.
func Links(prefix string) ([]string, error) {
	links, err := netdump.Whole(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("listing interfaces: %w", err)
	}
	var out []string
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, prefix) {
			out = append(out, l.Attrs().Name)
		}
	}
	return out, nil
}
