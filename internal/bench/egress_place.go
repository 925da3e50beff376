package bench

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"tagout/internal/instance"
)

// place is where the clients of the peers run: a network namespace joined to the host by one veth pair, as a
// kid's is, but with no program, rule or limit on it. The host's end is the address that peers listen on.
//
// Nothing of it is pinned: the namespace, and with it the link, ends with the last process in it.
type place struct {
	inside  *thread
	host    netip.Addr // peers listen here
	link    string
	restore []func() error
}

// thread is one locked OS thread that runs what it is handed until it is closed. Processes that it starts with
// a parent-death signal live no longer than it does.
type thread struct{ work chan func() }

func newThread() *thread {
	t := &thread{work: make(chan func())}
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		for fn := range t.work {
			fn()
		}
	}()
	return t
}

func (t *thread) do(fn func() error) error {
	done := make(chan error, 1)
	t.work <- func() { done <- fn() }
	return <-done
}

func (t *thread) close() { close(t.work) }

// newPlace makes the namespace and its link, and lets packets pass between it and the practice internet's
// link, and between no others. The caller owns the result and must close it.
func newPlace(inst instance.Instance, practice string) (p *place, err error) {
	third := inst.KidNet().Addr().As4()[2] + 15 // the kids' addresses end far below
	p = &place{
		inside: newThread(), link: fmt.Sprintf("tgb%x", inst.Slot()),
		host: netip.AddrFrom4([4]byte{198, 19, third, 0}),
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("making a place for the peers' clients: %w", err), p.close())
		}
	}()
	var ns netns.NsHandle
	err = p.inside.do(func() error {
		var err error
		ns, err = netns.New()
		return err
	})
	if err != nil {
		return p, err
	}
	defer ns.Close()
	if err := p.join(ns, p.host.Next()); err != nil {
		return p, err
	}
	return p, errors.Join(p.forward(p.link), p.forward(practice))
}

func (p *place) join(ns netns.NsHandle, client netip.Addr) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.link
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns)}); err != nil {
		return err
	}
	inside, err := netlink.NewHandleAt(ns)
	if err != nil {
		return err
	}
	defer inside.Close()
	host, err := netlink.NewHandle()
	if err != nil {
		return err
	}
	defer host.Close()
	if err := up(inside, "lo", netip.Addr{}); err != nil {
		return err
	}
	if err := errors.Join(up(host, p.link, p.host), up(inside, "eth0", client)); err != nil {
		return err
	}
	return inside.RouteAdd(&netlink.Route{Gw: p.host.AsSlice()})
}

// up sets a link up, with an address of a /31 where one is given.
func up(h *netlink.Handle, name string, a netip.Addr) error {
	link, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	if a.IsValid() {
		if err := h.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(31, 32)}}); err != nil {
			return err
		}
	}
	return h.LinkSetUp(link)
}

// forward lets packets that come in on the link be forwarded; the machine's own setting stays as it is.
func (p *place) forward(link string) error {
	file := "/proc/sys/net/ipv4/conf/" + link + "/forwarding"
	was, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	p.restore = append(p.restore, func() error {
		if err := os.WriteFile(file, was, 0o644); !errors.Is(err, os.ErrNotExist) {
			return err
		}
		return nil
	})
	return os.WriteFile(file, []byte("1"), 0o644)
}

func (p *place) close() error {
	var errs []error
	link, err := netlink.LinkByName(p.link)
	if err == nil {
		errs = append(errs, netlink.LinkDel(link))
	} else if !errors.As(err, new(netlink.LinkNotFoundError)) {
		errs = append(errs, err)
	}
	for _, undo := range p.restore {
		errs = append(errs, undo())
	}
	p.inside.close()
	if err := errors.Join(errs...); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing the place of the peers' clients: %w", err)
	}
	return nil
}
