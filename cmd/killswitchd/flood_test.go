package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/bootclock"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

// TestMain lets the test binary play a kid that floods the one address it may reach.
func TestMain(m *testing.M) {
	if to := os.Getenv("KILLSWITCHD_TEST_FLOOD"); to != "" {
		flood(to)
	}
	os.Exit(m.Run())
}

func flood(to string) {
	conn, err := net.Dial("udp4", to)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for {
		conn.Write([]byte("tick")) // denied packets are what is tested
	}
}

// TestSilenceIsProvedOnRealTraffic fires the network layer alone on a kid that sends as fast as it can, with
// the real programs and the real daemon. The receiver decides whether the report was true; before the cut it
// shows that the traffic was there.
func TestSilenceIsProvedOnRealTraffic(t *testing.T) {
	b := newBox(t, "tkilld")
	must(t, unix.Unshare(unix.CLONE_NEWNET))
	must(t, gatewayOnLoopback(b.inst))
	b.installBPF()
	kid := b.kid("k1", 1)
	maps, err := bpf.Open(b.inst.PinDir())
	must(t, err)
	defer maps.Close() // a test
	must(t, maps.PutSession(kid.Mark, bpf.SessionEntry{State: bpf.StateActive, Addr: kid.Addr}))
	must(t, maps.GrantLease(kid.Mark, bootclock.Now()+time.Hour))
	must(t, maps.PutKid(kid.CgroupID, 0, kid.Mark))

	dns, err := net.ListenUDP("udp4", &net.UDPAddr{IP: b.inst.Gateway().AsSlice(), Port: instance.PortDNS})
	must(t, err)
	var got, last atomic.Int64
	received := make(chan struct{})
	go func() {
		defer close(received)
		for buf := make([]byte, 64); ; {
			if _, _, err := dns.ReadFromUDP(buf); errors.Is(err, net.ErrClosed) {
				return
			}
			got.Add(1)
			last.Store(time.Now().UnixNano())
		}
	}()
	defer func() { dns.Close(); <-received }() // a test

	dir, err := os.Open(kid.Cgroup)
	must(t, err)
	defer dir.Close() // only a handle
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "KILLSWITCHD_TEST_FLOOD="+dns.LocalAddr().String())
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	must(t, cmd.Start())
	defer func() { cmd.Process.Kill(); cmd.Wait() }() // a test
	b.start()
	b.until("traffic", func() bool { return got.Load() > 1000 })
	_, err = b.stop(wire.StopRequest{Scope: wire.Scope{Kid: "k1"}, Layers: []wire.Layer{wire.LayerCredential}, By: "ada"}, nil)
	must(t, err)
	uncut := got.Load()
	b.until("traffic that another layer does not cut", func() bool { return got.Load() > uncut+1000 })

	rep, err := b.stop(wire.StopRequest{Scope: wire.Scope{Kid: "k1"}, Layers: []wire.Layer{wire.LayerNetwork}, By: "ada"}, nil)
	reported := time.Now().UnixNano()
	must(t, err)
	if lr := rep.Layers[wire.LayerNetwork]; lr.State != wire.StateObserved {
		t.Errorf("network layer %+v", lr)
	} else {
		t.Logf("fired %v observed %v %s; last packet %v before the report", lr.Fired, lr.Observed, lr.Detail, time.Duration(reported-last.Load()))
	}
	if b.empty(kid.Cgroup) {
		t.Fatal("the sender is dead: its silence shows nothing")
	}
	dropped := func() uint64 {
		c, err := maps.Counters(kid.Mark)
		must(t, err)
		return c.Kid.DroppedUp.Packets + c.Refused
	}
	from := dropped()
	b.until("the sender refused a thousand times more", func() bool { return dropped() > from+1000 })
	// What was in the receiver's queue at the report may be read a little later.
	if late := time.Duration(last.Load() - reported); late > 5*time.Millisecond {
		t.Errorf("a packet arrived %v after silence was reported", late)
	}
}

// gatewayOnLoopback gives the calling thread's new network namespace the instance's gateway address.
func gatewayOnLoopback(inst instance.Instance) error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: inst.Gateway().AsSlice(), Mask: net.CIDRMask(32, 32)}}
	return errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, addr))
}
