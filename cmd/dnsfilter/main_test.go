package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tagout/bpf"
	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/cgroup"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/testroot"
)

const (
	testInstance = "tdnsf1"
	askEnv       = "TAGOUT_DNSFILTER_TEST_ASK" // "network local-address server name": the test binary is the kid
)

func TestMain(m *testing.M) {
	if what := strings.Fields(os.Getenv(askEnv)); len(what) == 4 {
		ask(what[0], what[1], what[2], what[3])
		return
	}
	os.Exit(m.Run())
}

// ask prints the answer's code and address.
func ask(network, local, server, name string) {
	c := &dns.Client{Net: network, Timeout: 5 * time.Second, Dialer: &net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(local)}}}
	if network == "tcp" {
		c.Dialer.LocalAddr = &net.TCPAddr{IP: net.ParseIP(local)}
	}
	r, _, err := c.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), server)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Print(dns.RcodeToString[r.Rcode])
	for _, rr := range r.Answer {
		fmt.Print(" ", rr.(*dns.A).A) // the test fails then
	}
	fmt.Println()
}

// world is an instance with a network namespace, cgroups and BPF programs, and dnsfilter as the only daemon.
// Its methods run on the test's goroutine, whose thread is in the namespace.
type world struct {
	t      *testing.T
	inst   instance.Instance
	layout cgroup.Layout
	binary string
	cmd    *exec.Cmd
	stderr bytes.Buffer
}

func newWorld(t *testing.T) *world {
	testroot.Require(t)
	runtime.LockOSThread() // never given back: the thread and its namespace end with the test
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, binary: filepath.Join(t.TempDir(), "dnsfilter")}
	w.loopbackUp()
	w.must(os.Chmod(filepath.Dir(filepath.Dir(w.binary)), 0o755)) // dnsfilter runs as another user
	build := exec.Command("go", "build", "-o", w.binary, ".")     // our own package
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("building dnsfilter: %v\n%s", err, out)
	}
	var err error
	w.inst, err = instance.Claim(testInstance)
	w.must(err)
	w.layout, err = cgroup.Detect()
	w.must(err)
	t.Cleanup(w.remove)
	w.makeDirs()
	w.installBPF()
	return w
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) makeDirs() {
	uid, gid := w.inst.UID(instance.DNSFilter), w.inst.GroupID()
	own := []string{filepath.Dir(w.inst.Socket(instance.DNSFilter)), w.inst.DNSStateDir(), filepath.Dir(w.inst.AuditFile(instance.DNSFilter))}
	for _, dir := range append(own, w.inst.SessionDir()) {
		w.must(os.MkdirAll(dir, 0o755)) // a test's own instance
	}
	for _, dir := range own {
		w.must(os.Chown(dir, uid, gid))
	}
	raw, err := (&config.Box{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("203.0.113.2:53")}}).Marshal()
	w.must(err)
	w.must(os.WriteFile(w.inst.BoxConfig(), raw, 0o644)) // not secret
}

func (w *world) installBPF() {
	daemons := []string{}
	for _, d := range []string{instance.DNSFilter, instance.Proxy} {
		w.must(w.layout.Create(w.inst.DaemonCgroupRel(d)))
		daemons = append(daemons, w.layout.V2(w.inst.DaemonCgroupRel(d)))
	}
	w.must(w.layout.Create(w.inst.KidsCgroupRel() + "/kid1"))
	w.must(bpf.Install(bpf.Config{
		PinDir: w.inst.PinDir(), KidsCgroup: w.layout.V2(w.inst.KidsCgroupRel()), DaemonCgroups: daemons, KidLevel: instance.KidCgroupLevel,
		Gateway: w.inst.Gateway(), KidNet: w.inst.KidNet(), Virtual: w.inst.VirtualNet(), BoxMark: w.inst.BoxMark(),
		GID: w.inst.GroupID(), KillUID: w.inst.UID(instance.Killswitchd),
	}))
}

// loopbackUp comes before everything else: in a namespace without any address the kernel takes every address
// for a broadcast one, and a socket that is bound early then answers from another address.
func (w *world) loopbackUp() {
	lo, err := netlink.LinkByName("lo")
	w.must(err)
	w.must(netlink.LinkSetUp(lo))
}

// addAddrs makes the gateway's address, and the kid's as if the kid had no namespace of its own.
func (w *world) addAddrs() {
	_, kid := w.inst.KidAddrs(1)
	lo, err := netlink.LinkByName("lo")
	w.must(err)
	for _, a := range []netip.Addr{w.inst.Gateway(), kid} {
		w.must(netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}}))
	}
}

func (w *world) remove() {
	if w.cmd != nil {
		w.kill()
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	daemons := []string{w.layout.V2(w.inst.DaemonCgroupRel(instance.DNSFilter)), w.layout.V2(w.inst.DaemonCgroupRel(instance.Proxy))}
	err := errors.Join(
		bpf.Uninstall(w.inst.PinDir(), w.layout.V2(w.inst.KidsCgroupRel()), daemons),
		w.layout.Remove(ctx, w.inst.CgroupRel()),
		os.RemoveAll(w.inst.RunDir()), os.RemoveAll(w.inst.StateDir()), w.inst.Release())
	if err != nil {
		w.t.Error(err)
	}
}

// inCgroup makes cmd start in the cgroup.
func (w *world) inCgroup(cmd *exec.Cmd, rel string) (done func()) {
	w.t.Helper()
	dir, err := os.Open(w.layout.V2(rel))
	w.must(err)
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	return func() { dir.Close() } // a directory
}

// start runs dnsfilter with its own uid, cgroup and the one capability that it may have.
func (w *world) start() {
	w.t.Helper()
	w.cmd = exec.Command(w.binary, "--instance", testInstance) // built above
	w.cmd.Stderr = &w.stderr
	w.cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: uint32(w.inst.UID(instance.DNSFilter)), Gid: uint32(w.inst.GroupID())}, // not negative
		AmbientCaps: []uintptr{unix.CAP_NET_BIND_SERVICE},
		Pdeathsig:   syscall.SIGKILL,
	}
	defer w.inCgroup(w.cmd, w.inst.DaemonCgroupRel(instance.DNSFilter))()
	w.must(w.cmd.Start())
	deadline := time.Now().Add(10 * time.Second)
	for w.call("GET", "/healthz", nil) != nil {
		if time.Now().After(deadline) {
			w.t.Fatalf("dnsfilter is not healthy: %s", w.stderr.String())
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (w *world) kill() {
	w.cmd.Process.Kill() // may be dead already
	w.cmd.Wait()         // killed
}

func (w *world) call(method, route string, in any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	c := control.NewClient(w.inst.Socket(instance.DNSFilter))
	defer c.CloseIdle()
	return c.Call(ctx, method, route, in, nil)
}

// kid asks from the kid's cgroup and address.
func (w *world) kid(network, name string) (answer string, pid int) {
	w.t.Helper()
	_, addr := w.inst.KidAddrs(1)
	cmd := exec.Command(os.Args[0]) // this test binary
	cmd.Env = append(os.Environ(), askEnv+"="+strings.Join([]string{network, addr.String(), w.inst.Gateway().String() + ":53", name}, " "))
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	defer w.inCgroup(cmd, w.inst.KidsCgroupRel()+"/kid1")()
	w.must(cmd.Run())
	return strings.TrimSpace(out.String()), cmd.Process.Pid
}

func (w *world) session() *session.Session {
	host, kid := w.inst.KidAddrs(1)
	dir := w.layout.V2(w.inst.KidsCgroupRel() + "/kid1")
	id, err := cgroup.ID(dir)
	w.must(err)
	return &session.Session{
		Version: session.Version, ID: "01DNSF", Kid: "kid1", Card: "c", Index: 1, Mark: w.inst.SessionMark(1), Addr: kid, HostAddr: host,
		Cgroup: dir, CgroupID: id, Generation: 1,
		Egress: policy.Spec{Allow: []policy.Rule{
			{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: policy.TLS}, {Host: "*.cdn.test", Ports: []uint16{443}, Protocol: policy.TLS},
		}},
	}
}

// TestRealFilterNamesTheProcess runs the real binary as its own user behind the real BPF programs: queries of
// a process in the kid's cgroup are judged and recorded with that process, also after a kill -9.
func TestRealFilterNamesTheProcess(t *testing.T) {
	w := newWorld(t)
	w.start() // before its address exists
	w.addAddrs()
	s := w.session()
	maps, err := bpf.Open(w.inst.PinDir())
	w.must(err)
	defer maps.Close() // only descriptors
	w.must(maps.PutSession(s.Mark, bpf.SessionEntry{State: bpf.StateActive, Addr: s.Addr}))
	w.must(maps.GrantLease(s.Mark, bootclock.Now()+time.Hour))
	w.must(maps.PutKid(s.CgroupID, 0, s.Mark))

	pids := map[int]string{} // who asked for what
	expect := func(network, name, want string) string {
		t.Helper()
		got, pid := w.kid(network, name)
		if !strings.HasPrefix(got, want) {
			t.Errorf("%s over %s: %q, want %q", name, network, got, want)
		}
		pids[pid] = strings.TrimSuffix(name, ".")
		return got
	}
	expect("udp", "api.vendor.test.", "REFUSED") // not loaded yet
	w.must(session.NewStore(w.inst.SessionDir()).Put(s, w.inst.GroupID()))
	w.must(w.call("PUT", "/v1/sessions/kid1", s))
	foreign := *s
	foreign.Kid, foreign.ID, foreign.Mark = "kid2", "01OTHER", w.inst.BoxMark()
	if err := w.call("PUT", "/v1/sessions/kid2", &foreign); control.Status(err) != 422 {
		t.Errorf("a session with the box's own mark: %v", err)
	}
	expect("udp", "api.vendor.test.", "NOERROR 198.18.")
	wild := expect("tcp", "a.cdn.test.", "NOERROR 198.18.")
	expect("udp", "evil.test.", "REFUSED")
	expect("tcp", "evil.test.", "REFUSED")

	w.kill()
	w.start()
	if again := expect("udp", "a.cdn.test.", "NOERROR 198.18."); again != wild {
		t.Errorf("the wildcard's address moved from %q to %q", wild, again)
	}
	w.must(w.cmd.Process.Signal(syscall.SIGTERM))
	if err := w.cmd.Wait(); err != nil {
		t.Errorf("SIGTERM ended dnsfilter with %v: %s", err, w.stderr.String())
	}
	w.checkRecords(pids)
}

func (w *world) checkRecords(pids map[int]string) {
	w.t.Helper()
	raw, err := os.ReadFile(w.inst.AuditFile(instance.DNSFilter))
	w.must(err)
	for line := range strings.Lines(string(raw)) {
		var rec audit.Record
		w.must(json.Unmarshal([]byte(line), &rec))
		if rec.Event != audit.EventLookup {
			continue
		}
		if rec.Process == nil || strings.TrimSuffix(rec.Dst.Name, ".") != pids[rec.Process.PID] || rec.Process.Comm == "" {
			w.t.Errorf("no process of ours in %s", line)
			continue
		}
		delete(pids, rec.Process.PID)
	}
	if len(pids) != 0 {
		w.t.Errorf("no records of %v", pids)
	}
}
