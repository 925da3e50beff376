package e2e

import (
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
)

// E19. Each name is reached where the deny rule is not.
func (c *cases) denyWins() {
	net := c.box.Net
	for name, addr := range map[string]netip.Addr{"good.wide.test": net.FilesAddr(), "bad.wide.test": net.FilesAddr(), "port.wide.test": net.TicksAddr(), "there.wide.test": net.TicksAddr()} {
		net.DNS.SetHost(name, addr)
	}
	allow := "  allow:\n    - {host: \"*.wide.test\", ports: [7000, 7100], protocol: tcp}\n"
	deny := fmt.Sprintf("  deny:\n    - {host: bad.wide.test}\n    - {host: port.wide.test, ports: [7000]}\n    - {address: %v}\n", net.TicksAddr())
	echo := func(name string) step {
		return step{Kind: "tcp", Host: name, Port: portEcho, Send: [][]byte{[]byte("hello")}, Shut: true}
	}
	for _, egress := range []string{allow + deny, deny + allow} {
		kid := c.box.Spawn(strings.Replace(bareCard, "image: host\n", "image: host\negress:\n"+egress, 1), nil)
		out := c.attack(kid.Name, echo("good.wide.test"), echo("bad.wide.test"),
			step{Kind: "tcp", Host: "port.wide.test", Port: practice.PortTicks, Send: [][]byte{[]byte("ticks denied\n1\n")}, Shut: true}, echo("there.wide.test"))
		if string(out[0].Data) != "hello" {
			c.t.Errorf("what is allowed: %+v", out[0])
		}
		for i, o := range out[1:] {
			if o.Error == "" && o.End == "eof" && len(o.Data) > 0 {
				c.t.Errorf("denied thing %d was reached: %+v", i, o)
			}
		}
		for _, match := range []func(*audit.Record) bool{
			named("bad.wide.test"), named("port.wide.test"), named("there.wide.test"),
		} {
			if r := c.box.WaitRecord("a deny rule", func(r *audit.Record) bool {
				return r.Session == kid.Session && r.Outcome == audit.OutcomeDeny && match(r)
			}); r.Reason != reason.DenyRule {
				c.t.Errorf("denied as %v: %+v", r.Reason, r)
			}
		}
		c.box.Destroy(kid.Name)
	}
	if len(net.Sink.Streams("denied")) != 0 {
		c.t.Error("a denied port was reached")
	}
}

// E20. What is refused, in full: internal/card's TestCases. Here: the same by way of a spawn, with line and
// column, and no kid of it. The card with nothing wrong is the one of all other cases.
func (c *cases) badCards() {
	const line = `    - {host: svc.own.test, ports: [443], protocol: tls}`
	for with, want := range map[string]string{
		`    - {host: 169.254.0.0/16, ports: [80], protocol: http}`:     "can never be allowed",
		`    - {host: "*", ports: [443], protocol: tls}`:                "every host",
		`    - {host: "*.com", ports: [443], protocol: tls}`:            "everybody's names under com",
		`    - {host: "**.amazonaws.com", ports: [443], protocol: tls}`: "anybody can have one under s3.amazonaws.com",
		`    - {host: svc.own.test, ports: [0], protocol: tls}`:         "0 is not a port",
		`    - {host: svc.own.test, ports: [70000], protocol: tls}`:     "70000 is not a port",
		`    - {host: "", ports: [443], protocol: tls}`:                 "host is empty",
		line + "\n" + line: "has a rule already, in line 9",
		`    - {host: svc.own.test, ports: [443], protocol: tls, methds: [GET]}`:          "write `methods:` instead",
		`    - {host: a.test, ports: [80], protocol: http, addresses: [169.254.169.254]}`: "cannot be granted",
	} {
		text := strings.Replace(c.card(), line, with, 1)
		_, err := c.box.TrySpawn("bad", text, nil)
		if control.Status(err) != http.StatusUnprocessableEntity || !strings.Contains(err.Error(), want) || !regexp.MustCompile(`\b(9|10):[0-9]+`).MatchString(err.Error()) {
			c.t.Errorf("%s: %v", with, err)
		}
	}
}

// E22. With the programs off such calls get out: bpf's TestCallsSucceedWithoutPrograms. The sockets are refused by
// sandboxd, which the kid's seccomp filter asks; without it there is no record: sandboxd/kids'
// TestEveryRefusedSocketIsRecorded. Behind it, bpf's TestSocketTypes.
func (c *cases) otherProtocols() {
	evil, evil6 := c.box.Net.EvilAddr().String(), c.box.Net.EvilAddr6().String()
	x := [][]byte{[]byte("x")}
	calls := []struct {
		step
		want reason.Code // of its one event
	}{
		{step{Kind: "udp", Host: evil, Port: 443, Send: x}, reason.QUIC},
		{step{Kind: "udp", Host: evil, Port: 4433, Send: x}, reason.UDPNotAllowed},
		{step{Kind: "udp", Host: "224.0.0.251", Port: 5353, Send: x}, reason.Multicast},
		{step{Kind: "udp", Host: "255.255.255.255", Port: 67, Send: x}, reason.Multicast},
		{step{Kind: "udp", Host: evil6, Port: 443, Send: x}, reason.IPv6},
		{step{Kind: "udp", Host: "ff02::fb", Port: 5353, Send: x}, reason.IPv6},
		{step{Kind: "tcp", Host: evil6, Port: 443}, reason.IPv6},
		{step{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Proto: unix.IPPROTO_ICMP}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_DGRAM, Proto: unix.IPPROTO_ICMP}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_RAW, Proto: unix.IPPROTO_RAW}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_INET6, Type: unix.SOCK_RAW, Proto: unix.IPPROTO_ICMPV6}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_INET, Type: unix.SOCK_STREAM, Proto: unix.IPPROTO_SCTP}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_PACKET, Type: unix.SOCK_RAW, Proto: 0x0300}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_VSOCK, Type: unix.SOCK_STREAM}, reason.RawSocket},
		{step{Kind: "socket", Family: unix.AF_ALG, Type: unix.SOCK_SEQPACKET}, reason.RawSocket},
	}
	kid := c.box.Spawn(bareCard, nil)
	defer c.box.Destroy(kid.Name)
	var steps []step
	events := map[reason.Code]uint64{}
	for _, call := range calls {
		steps = append(steps, call.step)
		events[call.want]++
	}
	for i, o := range c.attack(kid.Name, steps...) {
		if o.Error != "EPERM" && o.Error != "EACCES" {
			c.t.Errorf("%+v: %+v", steps[i], o)
		}
	}
	var sockets []audit.Record
	for want, n := range events {
		found := c.waitDenied(want.String(), kid, n, func(r *audit.Record) bool { return r.Event == audit.EventConnectDenied && r.Reason == want })
		if want == reason.RawSocket {
			sockets = found
		}
	}
	c.eachSocketOnce(steps, sockets)
}

// eachSocketOnce: every socket that was asked for has one record, which says what it was and which process asked.
func (c *cases) eachSocketOnce(steps []step, records []audit.Record) {
	families := map[int]string{unix.AF_INET: "ipv4", unix.AF_INET6: "ipv6", unix.AF_PACKET: "packet", unix.AF_VSOCK: "vsock", unix.AF_ALG: "alg"}
	kinds := map[int]string{unix.SOCK_STREAM: "stream", unix.SOCK_DGRAM: "dgram", unix.SOCK_RAW: "raw", unix.SOCK_SEQPACKET: "seqpacket"}
	for _, s := range steps {
		if s.Kind != "socket" {
			continue
		}
		n := 0
		for _, r := range records {
			f := r.Fields
			if f["family"] != families[s.Family] || f["type"] != kinds[s.Type] || f["protocol"] != fmt.Sprint(s.Proto) {
				continue
			}
			n++
			if r.Process == nil || r.Process.PID <= 1 || !strings.Contains(r.Process.Exe, "python") || r.Process.Comm == "" {
				c.t.Errorf("%+v: nobody asked for it: %+v", s, r.Process)
			}
		}
		if n != 1 {
			c.t.Errorf("%+v has %d records", s, n)
		}
	}
}

// E23. The gateway's own ports serve, as E04 and E15 show; the sockets of the daemons are in no kid.
func (c *cases) theBoxItself() {
	kid, other := c.box.Spawn(bareCard, nil), c.kid.Addr.String()
	defer c.box.Destroy(kid.Name)
	for _, to := range []struct {
		host string
		port int
	}{
		{c.gateway(), 22}, {c.gateway(), 8081}, {c.gateway(), instance.PortTransparent},
		{other, 22}, {other, 8080}, {c.box.Net.HostAddr().String(), 22}, {c.box.Net.HostAddr().String(), 8080},
	} {
		o := c.attack(kid.Name, step{Kind: "tcp", Host: to.host, Port: to.port})[0]
		if o.Error != "EPERM" && (to.port != instance.PortTransparent || o.Error == "" && len(o.Data) > 0) {
			c.t.Errorf("%s port %d: %+v", to.host, to.port, o)
		}
		c.box.WaitRecord(fmt.Sprint(to), func(r *audit.Record) bool {
			return r.Session == kid.Session && r.Outcome == audit.OutcomeDeny && r.Dst != nil && r.Dst.Addr.String() == to.host && r.Dst.Port == uint16(to.port)
		})
	}
	for _, daemon := range instance.Daemons() {
		if _, err := os.Stat(c.box.Inst.Socket(daemon)); err != nil {
			c.t.Errorf("there is no socket to keep out of kids: %v", err)
		}
		if o := c.attack(kid.Name, step{Kind: "unix", Host: c.box.Inst.Socket(daemon)})[0]; o.Error != "ENOENT" && o.Error != "EACCES" {
			c.t.Errorf("%s: %+v", daemon, o)
		}
	}
}

// setUp runs tagout setup on this very box, as on a machine that lacks the feature, or on this one where it is "".
func (c *cases) setUp(lacks string) (string, error) {
	c.t.Helper()
	file := filepath.Join(c.t.TempDir(), "box.yaml")
	cfg := c.box.Net.BoxConfig()
	raw, err := cfg.Marshal()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(c.box.Bin, "tagout"), "--instance", c.box.Inst.Name(), "setup", "--config", file)
	cmd.Env = append(os.Environ(), "TAGOUT_DOCTOR_OFF="+lacks)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// nothingMissing: E24. With nothing forced off the same setup succeeds, and changes nothing for a kid that runs.
func (c *cases) nothingMissing() {
	if out, err := c.setUp(""); err != nil {
		c.t.Errorf("%v: %s", err, out)
	}
	c.box.Net.DNS.SetHost("still.turn.test", c.box.Net.FilesAddr())
	if o, ok := c.echoed("still.turn.test"); !ok {
		c.t.Errorf("afterwards: %+v", o)
	}
}

// E24.
func (c *cases) featureMissing() {
	for feature, want := range map[string][]string{
		"cgroup-kill": {"CONFIG_CGROUPS", "5.14"}, "bpf-link": {"CONFIG_NET_XGRESS", "4.5"},
	} {
		out, err := c.setUp(feature)
		if err == nil {
			c.t.Errorf("a machine without %s was set up", feature)
		}
		for _, w := range append(want, feature) {
			if !strings.Contains(out, w) {
				c.t.Errorf("without %s: %q does not say %s", feature, out, w)
			}
		}
	}
}
