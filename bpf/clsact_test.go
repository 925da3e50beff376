package bpf

import (
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"tagout/internal/reason"
	"tagout/internal/testroot"
)

// bothWays runs fn the way this kernel goes, and then as if it had no tcx.
func bothWays(t *testing.T, fn func(t *testing.T)) {
	t.Helper()
	t.Run("native", fn)
	t.Run("clsact", func(t *testing.T) {
		forceClsact(t)
		fn(t)
	})
}

func forceClsact(t *testing.T) {
	t.Helper()
	noTCX = true
	t.Cleanup(func() { noTCX = false })
}

// linkIDs returns every program on the link, ours or not, by the name of the hook.
func linkIDs(t *testing.T, ifindex int) map[string][]ebpf.ProgramID {
	t.Helper()
	tcx, err := haveTCX()
	must(t, err)
	if tcx {
		return attachedIDs(t, ifindex, linkHooks)
	}
	out := map[string][]ebpf.ProgramID{}
	for i, h := range linkHooks {
		for _, f := range filters(t, ifindex, parents[i]) {
			b, ok := f.(*netlink.BpfFilter)
			if !ok || !b.DirectAction {
				t.Errorf("filter %+v on link %d", f, ifindex)
				continue
			}
			out[h.program] = append(out[h.program], ebpf.ProgramID(b.Id))
		}
	}
	return out
}

func filters(t *testing.T, ifindex int, parent uint32) []netlink.Filter {
	t.Helper()
	all, err := netlink.FilterList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}}, parent)
	must(t, err)
	return all
}

// frames sends raw frames over a world's link, past every cgroup hook.
type frames struct {
	maps *Maps
	fd   int
	to   unix.SockaddrLinklayer
}

// sendFrom opens a raw socket on the interface, in the given namespace; the thread ends up in w.box.
func sendFrom(t *testing.T, m *Maps, w *world, ns netns.NsHandle, name string) *frames {
	t.Helper()
	must(t, netns.Set(ns))
	defer func() { must(t, netns.Set(w.box)) }()
	l, err := netlink.LinkByName(name)
	must(t, err)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	return &frames{m, fd, unix.SockaddrLinklayer{Ifindex: l.Attrs().Index}}
}

// quietLink keeps both kernels from sending anything by themselves.
func (w *world) quietLink(t *testing.T) {
	t.Helper()
	for _, ns := range []netns.NsHandle{w.kid, w.box} {
		must(t, netns.Set(ns))
		must(t, os.WriteFile("/proc/sys/net/ipv6/conf/all/disable_ipv6", []byte("1"), 0o600))
	}
	h, err := netlink.NewHandleAt(w.kid)
	must(t, err)
	defer h.Close()
	for _, l := range []struct {
		name string
		h    *netlink.Handle
	}{{"kidf-1", &netlink.Handle{}}, {"eth0", h}} {
		link, err := l.h.LinkByName(l.name)
		must(t, err)
		must(t, l.h.LinkSetARPOff(link))
	}
}

// linkTotals adds up what the link's programs say of the session's and of nobody's packets.
func (f *frames) linkTotals(t *testing.T) (passed, dropped uint64, denied map[reason.Code]uint64) {
	t.Helper()
	denied = map[reason.Code]uint64{}
	for _, mark := range []uint32{0, tMark} {
		c, err := f.maps.Counters(mark)
		must(t, err)
		passed += c.Link.PassedUp.Packets + c.Link.PassedDown.Packets
		dropped += c.Link.DroppedUp.Packets + c.Link.DroppedDown.Packets
		for code, n := range c.Denied {
			denied[code] += n
		}
	}
	return passed, dropped, denied
}

// judge sends one frame and returns whether the link passes it, and the reason where it says one.
func (f *frames) judge(t *testing.T, frame []byte) (bool, reason.Code) {
	t.Helper()
	passed, dropped, before := f.linkTotals(t)
	if err := unix.Sendto(f.fd, frame, 0, &f.to); err != nil && !errors.Is(err, unix.ENOBUFS) { // dropped on its way out
		t.Fatal(err)
	}
	var passed2, dropped2 uint64
	var after map[reason.Code]uint64
	eventually(t, "the link to count the frame", func() bool {
		passed2, dropped2, after = f.linkTotals(t)
		return passed2+dropped2 > passed+dropped
	})
	if passed2+dropped2 != passed+dropped+1 {
		t.Fatalf("%d packets passed and %d were dropped, want one of either", passed2-passed, dropped2-dropped)
	}
	for code, n := range after {
		if n != before[code] {
			return passed2 != passed, code
		}
	}
	return passed2 != passed, reason.OK
}

// The whole packet table once more, with real frames over a real link: it is the attachment that is tested.
func TestVerdictsOnARealLink(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		_, m := installed(t, "tbpfp")
		w := newWorld(t)
		w.quietLink(t)
		must(t, m.AttachLink(w.link))
		kid, host := sendFrom(t, m, w, w.kid, "eth0"), sendFrom(t, m, w, w.box, "kidf-1")
		good := packet{dst: tGateway, proto: udp, dport: 53}.fromKid()
		expect := func(what string, frame []byte, want reason.Code) {
			t.Helper()
			if passed, got := kid.judge(t, frame); got != want || passed != (want == reason.OK) {
				t.Errorf("%s: passed %v with reason %v, want %v", what, passed, got, want)
			}
		}
		expect("a link that stands for nobody", good.bytes(), reason.UnknownSession)
		must(t, m.PutKid(0, w.link, tMark))
		for _, c := range upCases {
			expect(c.name, c.p.fromKid().bytes(), c.want)
		}
		forged := good
		forged.src = addr("198.19.240.5")
		expect("forged source", forged.bytes(), reason.SpoofedSource)
		for _, c := range downCases {
			if passed, _ := host.judge(t, c.p.toKid().bytes()); passed != c.want {
				t.Errorf("down, %s: passed %v, want %v", c.name, passed, c.want)
			}
		}
		must(t, m.StopSession(tMark))
		expect("stopped", good.bytes(), reason.Stopped)
	})
}

// What TCX_DROP drops does not arrive, and TCX_NEXT leaves a packet to the filters behind ours.
func TestFiltersBehindOursStillDrop(t *testing.T) {
	forceClsact(t)
	_, m := installed(t, "tbpfq")
	w := newWorld(t)
	from := echoUDP(t, at(tGateway, 53))
	must(t, m.AttachLink(w.link))
	must(t, m.PutKid(0, w.link, tMark))
	sentry := w.start(t, makeCgroup(t, "tagout.tbpfq/outside"))
	fd := sentry.socket(v4, dgram)
	sentry.expect(request{Op: "connect", FD: fd, Addr: at(tGateway, 53)})
	if !sentry.exchange(fd) {
		t.Fatal("an allowed packet does not come through")
	}
	<-from
	drop := otherFilter(t, w.link, 2) // TC_ACT_SHOT
	must(t, netlink.FilterAdd(drop))
	if !sentry.cut(fd) || len(from) != 0 {
		t.Error("another's filter behind ours cannot drop")
	}
	must(t, detachLink(w.link))
	if left := filters(t, w.link, netlink.HANDLE_MIN_INGRESS); len(left) != 1 || left[0].Attrs().Priority != 2 {
		t.Errorf("left on the link: %+v, want only another's filter", left)
	}
	must(t, netlink.FilterDel(drop))
	must(t, m.AttachLink(w.link))
	must(t, netlink.FilterAdd(otherFilter(t, w.link, 0))) // TC_ACT_OK
	must(t, m.StopSession(tMark))
	if !sentry.cut(fd) || len(from) != 0 {
		t.Error("another's filter passes what ours drops")
	}
}

// otherFilter is somebody else's filter, behind ours, that always gives the same answer.
func otherFilter(t *testing.T, ifindex int, answer int32) netlink.Filter {
	t.Helper()
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, answer), asm.Return()},
	})
	must(t, err)
	t.Cleanup(func() { prog.Close() })
	f := filter(ifindex, netlink.HANDLE_MIN_INGRESS, "other", prog.FD())
	f.Priority, f.Handle = 2, 1
	return f
}

// While the link's programs are exchanged over and over, no denied packet may slip through.
func TestLinkHasNoOpenMoment(t *testing.T) {
	bothWays(t, func(t *testing.T) {
		s, m := installed(t, "tbpfr")
		w := newWorld(t)
		from := echoUDP(t, at(tWorld, 7))
		sentry := w.start(t, makeCgroup(t, "tagout.tbpfr/outside"))
		fd := sentry.socket(v4, dgram)
		sentry.expect(request{Op: "connect", FD: fd, Addr: at(tWorld, 7)})
		if !sentry.exchange(fd) {
			t.Fatal("the control: nothing comes through an open link")
		}
		<-from
		must(t, m.AttachLink(w.link))
		must(t, m.PutKid(0, w.link, tMark))
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
			err := netns.Set(w.box)
			for range 6 {
				err = errors.Join(err, Install(s.cfg))
				for range 20 {
					err = errors.Join(err, m.AttachLink(w.link))
				}
			}
			done <- err
		}()
		for tries := 0; ; tries++ {
			select {
			case err := <-done:
				must(t, err)
				c, err := m.Counters(tMark)
				must(t, err)
				if tries == 0 || c.Link.DroppedUp.Packets < uint64(tries) {
					t.Errorf("%d packets were sent, %d dropped on the link", tries, c.Link.DroppedUp.Packets)
				}
				if len(from) != 0 {
					t.Error("a denied packet came through")
				}
				return
			default:
				sentry.expect(request{Op: "send", FD: fd, Len: 8})
			}
		}
	})
}

// A link that is gone, or never had a program, is nothing to take programs off.
func TestDetachFromNothing(t *testing.T) {
	testroot.Require(t)
	bothWays(t, func(t *testing.T) {
		w := newWorld(t)
		must(t, detachLink(w.link))
		must(t, netlink.LinkDel(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: w.link}}))
		must(t, detachLink(w.link))
	})
}

func TestProbeSaysWhatALinkGets(t *testing.T) {
	testroot.Require(t)
	for _, f := range []struct {
		noTCX bool
		want  string
	}{{false, "checks packets on a kid's link, by "}, {true, "by clsact: this kernel has no tcx"}} {
		noTCX = f.noTCX
		t.Cleanup(func() { noTCX = false })
		if got := linkFeature(); got.Err != nil || got.Optional || !strings.Contains(got.Use, f.want) {
			t.Errorf("%+v, want %q", got, f.want)
		}
	}
}

// Links of kids hold their filters without pins, and lose the qdisc with the last filter.
func TestClsactLivesOnTheLink(t *testing.T) {
	forceClsact(t)
	s, m := installed(t, "tbpfs")
	w := newWorld(t)
	must(t, m.AttachLink(w.link))
	must(t, m.Close())
	must(t, os.RemoveAll(s.cfg.PinDir))
	if got := linkIDs(t, w.link); len(got) != len(linkHooks) {
		t.Errorf("without pins the link has %v", got)
	}
	if !hasClsact(t, w.link) {
		t.Error("the control: no clsact qdisc is seen")
	}
	must(t, detachLink(w.link))
	if got := linkIDs(t, w.link); len(got) != 0 || hasClsact(t, w.link) {
		t.Errorf("left on the link: %v, clsact %v", got, hasClsact(t, w.link))
	}
}

func hasClsact(t *testing.T, ifindex int) bool {
	t.Helper()
	all, err := netlink.QdiscList(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: ifindex}})
	must(t, err)
	for _, q := range all {
		if q.Type() == "clsact" {
			return true
		}
	}
	return false
}
