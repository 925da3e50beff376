package netfw

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/instance"
	"tagout/internal/testroot"
)

// save returns iptables-save and ip6tables-save without what changes by itself, or belongs to nobody.
func save(s *space) string {
	s.t.Helper()
	var out strings.Builder
	s.do(func() error {
		for _, cmd := range []string{"iptables-save", "ip6tables-save"} {
			raw, err := exec.Command(cmd).Output()
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(raw)) {
				if strings.HasPrefix(line, "-A ") || strings.HasPrefix(line, ":TGO") {
					out.WriteString(line)
				}
			}
		}
		return nil
	})
	return out.String()
}

func command(line string) func() error {
	return func() error {
		f := strings.Fields(line)
		if out, err := exec.Command(f[0], f[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
		return nil
	}
}

// Each line of Text must stand in the kernel as it is spelled, and nothing else of ours.
func TestEnsureMatchesText(t *testing.T) {
	testroot.Require(t)
	s, i := newSpace(t), inst(t, "tfw1", 3)
	s.do(func() error { return Ensure(i) })
	got := save(s)
	lines := 0
	for line := range strings.Lines(Text(i)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		lines++
		_, rule, _ := strings.Cut(strings.TrimSpace(line), " ")
		if !strings.Contains(got, "-A "+rule+"\n") {
			t.Errorf("not in the kernel: %s", rule)
		}
	}
	if have := strings.Count(got, "-A "); have != lines {
		t.Errorf("%d rules in the kernel, want %d:\n%s", have, lines, got)
	}
	if strings.Contains(got, endHold) {
		t.Errorf("the hold chain is left over:\n%s", got)
	}
}

func TestEnsureReplacesDrift(t *testing.T) {
	testroot.Require(t)
	s, i := newSpace(t), inst(t, "tfw2", 3)
	s.do(func() error { return Ensure(i) })
	want := save(s)
	drifts := []string{
		"iptables -A TGO-tfw2-in -j ACCEPT",
		"iptables -I TGO-tfw2-in 1 -j ACCEPT",
		"iptables -F TGO-tfw2-out",
		"iptables -D INPUT 1",
		"iptables -t nat -F TGO-tfw2-nat",
		"iptables -N TGO-tfw2-old",
		"ip6tables -I FORWARD 1 -j ACCEPT",
		"ip6tables -R TGO-tfw2-fwd 1 -j ACCEPT",
	}
	for _, d := range drifts {
		s.do(command(d))
		s.do(func() error {
			ok, err := Check(i)
			if err == nil && ok {
				return errors.New("Check does not see: " + d)
			}
			return err
		})
		s.do(func() error { return Ensure(i) })
		if strings.Contains(d, "-I FORWARD") { // somebody else's rule: it stays, below ours
			s.do(command("ip6tables -D FORWARD 3"))
		}
		if got := save(s); got != want {
			t.Errorf("after %s:\n%s\nwant\n%s", d, got, want)
		}
	}
}

func TestRemoveLeavesOthersAlone(t *testing.T) {
	testroot.Require(t)
	s, a, b := newSpace(t), inst(t, "tfw", 3), inst(t, "tfw3", 4)
	s.do(command("iptables -A INPUT -p tcp -m tcp --dport 22 -j ACCEPT"))
	s.do(func() error { return Ensure(b) })
	want := save(s)
	s.do(func() error { return Ensure(a) })
	s.do(func() error { // b stays content although a now stands before it
		if ok, err := Check(b); err != nil || !ok {
			return fmt.Errorf("Check(%s) = %v, %v", b.Name(), ok, err)
		}
		return nil
	})
	// What a crash or an older version may have left.
	s.do(command("iptables -N TGO-tfw-hold"))
	s.do(command("iptables -I INPUT 1 -i kid3-+ -j TGO-tfw-hold"))
	s.do(func() error {
		return exec.Command("iptables", "-A", "FORWARD", "-m", "comment", "--comment", `say "hi" there`, "-j", "TGO-tfw-hold").Run()
	})
	s.do(func() error { return Remove(a) })
	if got := save(s); got != want {
		t.Errorf("after Remove:\n%s\nwant\n%s", got, want)
	}
	s.do(func() error {
		left, err := Leftovers(a)
		if err == nil && len(left) > 0 {
			return fmt.Errorf("leftovers: %v", left)
		}
		return errors.Join(err, Remove(a)) // twice is not an error
	})
}

// world is a box with one kid and one neighbour outside, which the box would forward to.
type world struct {
	box, kid, out *space
	inst          instance.Instance
}

func newWorld(t *testing.T, i instance.Instance) world {
	t.Helper()
	w := world{newSpace(t), newSpace(t), newSpace(t), i}
	host, kid := i.KidAddrs(1)
	gw := i.Gateway().String()
	w.box.do(func() error { return addrs("lo", []string{gw + "/32"}) })
	link(t, w.box, i.KidLink(1), []string{host.String() + "/31", "fd00::1/64"}, w.kid, "eth0", []string{kid.String() + "/31", "fd00::2/64"})
	link(t, w.box, "wan", []string{"203.0.113.1/24"}, w.out, "eth0", []string{"203.0.113.9/24"})
	w.kid.do(func() error { return route("0.0.0.0/0", host.String()) })
	w.out.do(func() error { return route("198.19.0.0/16", "203.0.113.1") })
	w.box.do(func() error { return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0) })
	for _, p := range []string{"53", "3128", "3129", "8080"} {
		w.box.serve("tcp", gw+":"+p, "box:"+p)
	}
	w.box.serve("udp", gw+":53", "box:53")
	w.box.serve("udp", gw+":5353", "box:5353")
	w.box.serve("udp", host.String()+":9999", "host:9999")
	w.box.serve("tcp", "[fd00::1]:443", "v6:443")
	w.out.serve("tcp", "203.0.113.9:443", "out:443")
	w.out.serve("udp", "203.0.113.9:9999", "out:9999")
	w.kid.serve("tcp", ":7777", "kid:7777")
	return w
}

// reach says who answered at addr, or "refused" (at once) or "silent".
func reach(s *space, network, addr string) (who string) {
	s.do(func() error {
		who = func() string {
			c, err := net.DialTimeout(network, addr, 700*time.Millisecond)
			if err != nil {
				return verdict(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(700 * time.Millisecond))
			if network == "udp" {
				if _, err := c.Write([]byte("?")); err != nil {
					return verdict(err)
				}
			}
			buf := make([]byte, 64)
			n, err := c.Read(buf)
			if err != nil {
				return verdict(err)
			}
			return string(buf[:n])
		}()
		return nil
	})
	return who
}

func verdict(err error) string {
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.EHOSTUNREACH) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENETUNREACH) {
		return "refused"
	}
	return "silent"
}

func TestKidReachesOnlyTheGateway(t *testing.T) {
	testroot.Require(t)
	i := inst(t, "tfw4", 5)
	w := newWorld(t, i)
	gw, host := i.Gateway().String(), ""
	h, kid := i.KidAddrs(1)
	host = h.String()
	tests := []struct {
		from          *space
		network, addr string
		off, on       string
	}{
		{w.kid, "udp", gw + ":53", "box:53", "box:53"},
		{w.kid, "tcp", gw + ":53", "box:53", "box:53"},
		{w.kid, "tcp", gw + ":3128", "box:3128", "box:3128"},
		{w.kid, "tcp", "198.18.80.7:443", "refused", "box:3129"},
		{w.kid, "tcp", gw + ":8080", "box:8080", "box:3129"},
		{w.kid, "udp", gw + ":5353", "box:5353", "refused"},
		{w.kid, "udp", host + ":9999", "host:9999", "refused"},
		{w.kid, "udp", "203.0.113.9:53", "refused", "box:53"},
		{w.kid, "tcp", "203.0.113.9:443", "out:443", "box:3129"},
		{w.kid, "udp", "203.0.113.9:9999", "out:9999", "refused"},
		{w.kid, "tcp", "[fd00::1]:443", "v6:443", "refused"},
		{w.out, "tcp", gw + ":3128", "box:3128", "refused"},
		{w.out, "tcp", kid.String() + ":7777", "kid:7777", "silent"},
		{w.box, "tcp", gw + ":3128", "box:3128", "refused"},
		{w.box, "tcp", kid.String() + ":7777", "kid:7777", "silent"},
	}
	check := func(name string, on bool) {
		for _, tt := range tests {
			want := tt.off
			if on {
				want = tt.on
			}
			if got := reach(tt.from, tt.network, tt.addr); got != want {
				t.Errorf("%s: %s %s reached %q, want %q", name, tt.network, tt.addr, got, want)
			}
		}
	}
	check("rules off", false) // the control: without the rules, a kid reaches more
	w.box.do(func() error { return Ensure(i) })
	check("rules on", true)
}

// Several instances come and go at once on one machine; none disturbs another or somebody else's rules.
func TestInstancesAtOnce(t *testing.T) {
	testroot.Require(t)
	s := newSpace(t)
	const foreign = "-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT"
	s.do(command("iptables " + foreign))
	keep := inst(t, "tfwkeep", 0)
	s.do(func() error { return Ensure(keep) })
	var spaces []*space
	for range 3 {
		spaces = append(spaces, s.join())
	}
	done := make(chan error)
	for n, sp := range spaces {
		go func() {
			i, err := instance.New(fmt.Sprintf("tfwc%d", n), n+1)
			for range 2 {
				if err == nil {
					err = sp.run(func() error { return errors.Join(Ensure(i), Remove(i)) })
				}
			}
			done <- err
		}()
	}
	for range spaces {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	s.do(func() error {
		if ok, err := Check(keep); err != nil || !ok {
			return fmt.Errorf("Check(%s) = %v, %v", keep.Name(), ok, err)
		}
		return Remove(keep)
	})
	if got := save(s); got != foreign+"\n" {
		t.Errorf("left:\n%s\nwant\n%s", got, foreign)
	}
}
