package network

import (
	"context"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/internal/testroot"
)

func buildHolder(t *testing.T) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "kid-init")
	cmd := exec.Command("go", "build", "-o", bin, "tagout/cmd/kid-init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("building kid-init: %v\n%s", err, out)
	}
	return bin
}

func TestNetworkIsMadeAndRemoved(t *testing.T) {
	testroot.Require(t)
	pins := Paths(t.TempDir(), "k1")
	cfg := NamespaceConfig{Pins: pins, UIDFirst: 0x70000000, UIDCount: 65536, Holder: buildHolder(t)}
	link := LinkConfig{
		NetNS: pins.Net, Name: "tsbnet-1",
		HostAddr: netip.MustParseAddr("203.0.113.240"), KidAddr: netip.MustParseAddr("203.0.113.241"),
	}
	t.Cleanup(func() {
		Disconnect(link.Name)  // clean-up
		RemoveNamespaces(pins) // clean-up
	})
	if err := CreateNamespaces(context.Background(), cfg); err != nil {
		t.Fatal(err)
	}
	index, err := Connect(link)
	if err != nil {
		t.Fatal(err)
	}
	if got, ok, err := Index(link.Name); err != nil || !ok || got != index {
		t.Fatalf("Index = %d, %v, %v, want %d", got, ok, err, index)
	}
	checkKidEnd(t, link)
	if v, err := os.ReadFile("/proc/sys/net/ipv4/conf/" + link.Name + "/rp_filter"); err != nil || strings.TrimSpace(string(v)) != "1" {
		t.Errorf("rp_filter of the host's end is %q, %v, want 1", v, err)
	}
	if err := CreateNamespaces(context.Background(), cfg); err == nil {
		t.Error("making the namespaces twice: no error")
	}
	checkKidEnd(t, link) // the refusal touched nothing
	for range 2 {
		if err := Disconnect(link.Name); err != nil {
			t.Fatal(err)
		}
		if err := RemoveNamespaces(pins); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok, _ := Index(link.Name); ok {
		t.Error("the link is still there")
	}
	if left, _ := os.ReadDir(filepath.Dir(pins.Net)); len(left) != 0 {
		t.Errorf("pins left: %v", left)
	}
}

func checkKidEnd(t *testing.T, cfg LinkConfig) {
	t.Helper()
	err := inNamespace(cfg.NetNS, func() error {
		if v, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/disable_ipv6"); err == nil && strings.TrimSpace(string(v)) != "1" {
			t.Errorf("IPv6 is on inside the kid")
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		links, err := h.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			if name := l.Attrs().Name; name != "lo" && name != kidLink {
				t.Errorf("the kid has an interface %s", name)
			}
		}
		routes, err := h.RouteGet(netip.MustParseAddr("192.0.2.1").AsSlice())
		if err != nil || len(routes) != 1 || routes[0].Gw.String() != cfg.HostAddr.String() {
			t.Errorf("route to elsewhere = %v, %v, want one over %s", routes, err, cfg.HostAddr)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
