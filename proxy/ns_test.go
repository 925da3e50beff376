package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/testroot"
)

const inNamespace = "TAGOUT_PROXY_TEST_NS"

// TestTransparentBehindTheFirewall drives the proxy with curl and openssl from a namespace of its own, through
// real DNAT. The test runs itself again in a network namespace, which vanishes with the process.
func TestTransparentBehindTheFirewall(t *testing.T) {
	if inItsNamespace(t) {
		newNSBox(t).run(t)
	}
}

// inItsNamespace says whether the test is in a namespace of its own; where not, it has run the test there.
func inItsNamespace(t *testing.T) bool {
	t.Helper()
	testroot.Require(t)
	if os.Getenv(inNamespace) != "" {
		return true
	}
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1") // ourselves
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("in the namespace: %v\n%s", err, out)
	}
	return false
}

// TestDeadAddressesCostLittle: of a name's addresses the first two swallow every packet and the third refuses. Each dead
// one costs a quarter of a second, the refusing one nothing, and none leaves a socket. The server sees marked sockets
// alone, as the firewall of the box lets nothing else reach it.
func TestDeadAddressesCostLittle(t *testing.T) {
	if !inItsNamespace(t) {
		return
	}
	b := newNSBox(t)
	for _, a := range []string{"203.0.113.66", "203.0.113.67", "203.0.113.68"} {
		sh(t, "ip addr add "+a+"/32 dev lo")
	}
	sh(t, "iptables -A INPUT -p tcp -d 203.0.113.66/31 -j DROP")
	b.serveNS(t)
	b.servers(t)
	s := b.session(policy.Rule{Host: fileHost, Ports: []uint16{80}, Protocol: policy.HTTP, Line: 4})
	s.Addr = nsKid
	_, err := b.proxy.Put(s)
	must(t, err)
	fetch := func() (string, time.Duration) {
		start := time.Now()
		out, err := b.kid("curl", "-sS", "-x", "http://198.19.240.1:3128", "http://"+fileHost+"/f")
		if err != nil {
			t.Errorf("%v: %s", err, out)
		}
		return out, time.Since(start)
	}
	addr := netip.MustParseAddr
	b.dns.set(fileHost, addr("203.0.113.66"), addr("203.0.113.67"), addr("203.0.113.68"), nsServer)
	out, took := fetch()
	if !strings.Contains(out, "hello from "+fileHost) || took < 500*time.Millisecond || took > 1500*time.Millisecond {
		t.Errorf("%q after %v, want two waits of a quarter of a second", out, took)
	}
	waitUntil(t, "the attempts that lost are gone", func() bool {
		return !strings.Contains(sh(t, "ss -tnH state syn-sent"), "203.0.113.6")
	})
	b.dns.set(fileHost, addr("203.0.113.66"), addr("203.0.113.67"))
	b.proxy.sessions.find(nsKid).known.drop(fileHost)
	start := time.Now()
	if out, _ := b.kid("curl", "-sS", "-x", "http://198.19.240.1:3128", "http://"+fileHost+"/f"); !strings.Contains(out, "dial-failed") {
		t.Errorf("with dead addresses alone: %q", out)
	}
	if took := time.Since(start); took < b.proxy.cfg.Limits.Connect-time.Second || took > b.proxy.cfg.Limits.Connect+2*time.Second {
		t.Errorf("given up after %v, the limit is %v", took, b.proxy.cfg.Limits.Connect)
	}
}

var (
	nsGateway = netip.MustParseAddr("198.19.240.1")
	nsKid     = netip.MustParseAddr("198.19.240.3")
	nsServer  = netip.MustParseAddr("203.0.113.2")
)

// nsBox is a box, a kid and a server in namespaces.
type nsBox struct {
	*world
	kidPID string
	ca     string
}

func sh(t testing.TB, line string) string {
	t.Helper()
	args := strings.Fields(line)
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput() // the test's own words
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return string(out)
}

func newNSBox(t *testing.T) *nsBox {
	kid := exec.Command("unshare", "-n", "sleep", "300")
	kid.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(t, kid.Start())
	t.Cleanup(func() { kid.Process.Kill(); kid.Wait() })
	b := &nsBox{kidPID: strconv.Itoa(kid.Process.Pid)}
	ours, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	waitUntil(t, "the kid's namespace", func() bool {
		theirs, err := os.Readlink("/proc/" + b.kidPID + "/ns/net")
		return err == nil && theirs != ours
	})
	enter := "nsenter -n -t " + b.kidPID + " "
	for _, line := range []string{
		"ip link set lo up",
		"ip addr add 203.0.113.2/32 dev lo",
		"ip addr add 198.19.240.1/32 dev lo",
		"ip link add kidf-1 type veth peer name eth0 netns " + b.kidPID,
		"ip addr add 198.19.240.2/31 dev kidf-1",
		"ip link set kidf-1 up",
		enter + "ip addr add 198.19.240.3/31 dev eth0",
		enter + "ip link set eth0 up",
		enter + "ip route add default via 198.19.240.2",
		"iptables -t nat -A PREROUTING -i kidf-+ -p tcp -d 198.19.240.1 --dport 3128 -j RETURN",
		"iptables -t nat -A PREROUTING -i kidf-+ -p tcp -j DNAT --to-destination 198.19.240.1:3129",
		// Only the session's mark gets to the server.
		fmt.Sprintf("iptables -A OUTPUT -p tcp -d 203.0.113.2 -m multiport --dports 80,443 -m mark ! --mark %d -j REJECT", kidMark),
	} {
		sh(t, line)
	}
	if c, err := net.DialTimeout("tcp4", "203.0.113.2:443", time.Second); err == nil {
		c.Close()
		t.Fatal("an unmarked connection reaches the server's address: the mark is not tested")
	}
	return b
}

// serveNS makes the proxy that the firewall's rules lead to.
func (b *nsBox) serveNS(t *testing.T) {
	w := &world{t: t, records: newRecorder(), names: &fakeNames{}, tokens: &fakeTokens{}, dns: newFakeDNS(t),
		vendor: newAuthority(t, "vendor CA"), inspector: newAuthority(t, "inspection CA")}
	b.world = w
	dir := t.TempDir()
	w.inspector.store(t, dir)
	b.ca = filepath.Join(dir, "ca.pem")
	ca, err := LoadCA(dir, "")
	must(t, err)
	cfg := w.config(ca)
	cfg.Gateway, cfg.OriginalDst, cfg.Mark = nsGateway, nil, nil
	w.proxy, err = New(cfg)
	must(t, err)
	w.serve(netip.AddrPortFrom(nsGateway, 3128), netip.AddrPortFrom(nsGateway, 3129))
	w.dns.set(apiHost, nsServer)
	w.dns.set(fileHost, nsServer)
}

func (b *nsBox) servers(t *testing.T) {
	h := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprintf(rw, "hello from %s", r.Host) })
	for _, port := range []uint16{80, 443} {
		l, err := net.Listen("tcp4", netip.AddrPortFrom(nsServer, port).String())
		must(t, err)
		srv := &http.Server{Handler: h}
		if port == 443 {
			cert := b.vendor.issue(t, apiHost)
			srv.TLSConfig = &tls.Config{Certificates: []tls.Certificate{cert}}
			go srv.ServeTLS(l, "", "")
		} else {
			go srv.Serve(l)
		}
		t.Cleanup(func() { srv.Close() })
	}
}

// kid runs a command in the kid's namespace.
func (b *nsBox) kid(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"-n", "-t", b.kidPID}, args...)...) // the test's own words
	cmd.Stdin = bytes.NewReader(nil)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (b *nsBox) run(t *testing.T) {
	b.serveNS(t)
	b.servers(t)
	inspected := policy.Rule{Host: apiHost, Ports: []uint16{443}, Protocol: policy.TLS, Inspect: true, Line: 3}
	files := policy.Rule{Host: fileHost, Ports: []uint16{80}, Protocol: policy.HTTP, Line: 4}
	s := b.session(inspected, files)
	s.Addr = nsKid
	_, err := b.proxy.Put(s)
	must(t, err)
	table := b.proxy.sessions.find(nsKid).current().exact
	api, _ := table.Addr(apiHost)
	file, _ := table.Addr(fileHost)
	curl := []string{"curl", "-sS", "--cacert", b.ca, "--resolve", apiHost + ":443:" + api.String(), "--resolve", fileHost + ":80:" + file.String()}
	for _, tc := range []struct {
		name string
		args []string
		want string
		code reason.Code
	}{
		{"inspected TLS", append(curl, "https://"+apiHost+"/v1"), "hello from " + apiHost, reason.OK},
		{"plain HTTP", append(curl, "http://"+fileHost+"/f"), "hello from " + fileHost, reason.OK},
		{"explicit TLS", append(curl, "-x", "http://198.19.240.1:3128", "https://"+apiHost+"/v1"), "hello from " + apiHost, reason.OK},
		{"explicit HTTP", append(curl, "-x", "http://198.19.240.1:3128", "http://"+fileHost+"/f"), "hello from " + fileHost, reason.OK},
		{"other Host", append(curl, "-H", "Host: evil.test", "http://"+fileHost+"/f"), "host-mismatch", reason.HostMismatch},
		{"explicit, denied name", append(curl, "-x", "http://198.19.240.1:3128", "http://evil.test/"), "name-not-allowed", reason.NameNotAllowed},
		{"raw address", []string{"curl", "-sS", "--max-time", "5", "http://203.0.113.2/"}, "raw-address", reason.RawAddress},
		{"metadata", []string{"curl", "-sS", "--max-time", "5", "http://169.254.169.254/"}, "metadata-address", reason.Metadata},
		{"the transparent port itself", []string{"curl", "-sS", "--max-time", "5", "http://198.19.240.1:3129/"}, "host-address", reason.HostAddress},
		{"wrong SNI", []string{"openssl", "s_client", "-connect", api.String() + ":443", "-servername", "evil.test"}, "alert", reason.SNIMismatch},
		{"no SNI", []string{"openssl", "s_client", "-connect", api.String() + ":443", "-noservername"}, "alert", reason.SNIMissing},
		{"TLS 1.1", []string{"openssl", "s_client", "-connect", api.String() + ":443", "-servername", apiHost, "-tls1_1", "-cipher", "ALL:@SECLEVEL=0"}, "alert", reason.TLSVersion},
	} {
		out, err := b.kid(tc.args...)
		if !strings.Contains(out, tc.want) {
			t.Errorf("%s: %v\n%s\n%s", tc.name, err, out, b.records.dump())
			continue
		}
		b.records.wait(t, tc.name, func(r audit.Record) bool { return r.Reason == tc.code && r.Kid == "kid1" })
	}
}
