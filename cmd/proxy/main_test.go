package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/inspectca"
	"tagout/internal/instance"
	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

const patience = 10 * time.Second

// runAsProxy makes this test binary be the proxy.
const runAsProxy = "TAGOUT_TEST_RUN_AS_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(runAsProxy) != "" {
		main()
	}
	os.Exit(m.Run())
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// setUp makes what `tagout setup` makes for the proxy, and no more.
func setUp(t *testing.T) instance.Instance {
	t.Helper()
	inst, err := instance.Claim(fmt.Sprintf("tpx%d", os.Getpid()%100000))
	must(t, err)
	t.Cleanup(func() {
		if err := errors.Join(os.RemoveAll(inst.RunDir()), os.RemoveAll(inst.StateDir()), inst.Release()); err != nil {
			t.Error(err)
		}
	})
	uid, gid := inst.UID(instance.Proxy), inst.GroupID()
	for _, dir := range []string{
		inst.SessionDir(), inst.CADir(), filepath.Dir(inst.AuditFile(instance.Proxy)), filepath.Dir(inst.Socket(instance.Proxy)),
	} {
		must(t, os.MkdirAll(dir, 0o755))
		must(t, os.Chown(dir, uid, gid))
	}
	raw, err := (&config.Box{Resolvers: []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")}}).Marshal()
	must(t, err)
	must(t, os.WriteFile(inst.BoxConfig(), raw, 0o644))
	writeCA(t, inst.CADir(), uid)
	return inst
}

func writeCA(t *testing.T, dir string, uid int) {
	t.Helper()
	ca, err := inspectca.New("test", time.Now())
	must(t, err)
	must(t, ca.Write(dir, "", uid, -1))
}

// start runs the proxy as its own user with the given ambient capabilities.
func start(t *testing.T, inst instance.Instance, caps ...uintptr) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	bin := filepath.Join(inst.RunDir(), "proxy.test") // where the proxy's user can read it
	raw, err := os.ReadFile(os.Args[0])
	must(t, err)
	must(t, os.WriteFile(bin, raw, 0o755))
	cmd := exec.Command(bin, "--instance", inst.Name()) // ourselves
	cmd.Env = append(os.Environ(), runAsProxy+"=1")
	cmd.Dir = "/"
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: uint32(inst.UID(instance.Proxy)), Gid: uint32(inst.GroupID())},
		AmbientCaps: caps, Pdeathsig: syscall.SIGKILL,
	}
	must(t, cmd.Start())
	t.Cleanup(func() { cmd.Process.Kill() })
	return cmd, &stderr
}

// The real process, as its own user with CAP_NET_RAW alone: it serves, takes sessions, refuses with a record,
// cuts on order and ends cleanly.
func TestProxyProcess(t *testing.T) {
	testroot.Require(t)
	inst := setUp(t)
	_, kid := inst.KidAddrs(1)
	addAddrs(t, inst.Gateway(), kid)
	doc := &session.Session{
		Version: session.Version, ID: "01S", Kid: "kid1", Card: "c", Index: 1, Mark: inst.SessionMark(7), Addr: kid, HostAddr: kid,
		Cgroup: "/x", CgroupID: 1, Generation: 1,
		Egress: policy.Spec{Allow: []policy.Rule{{Host: "api.vendor.test", Ports: []uint16{443}, Protocol: policy.TLS}}},
	}
	must(t, session.NewStore(inst.SessionDir()).Put(doc, inst.GroupID()))
	cmd, stderr := start(t, inst, unix.CAP_NET_RAW)
	ctl := control.NewClient(inst.Socket(instance.Proxy))
	defer ctl.CloseIdle()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	health := waitHealth(ctx, t, ctl, stderr)
	if health == nil || !strings.Contains(health.Error(), "degraded") {
		t.Errorf("without BPF maps the health is %v", health)
	}
	head := connect(t, kid, inst.Gateway(), "evil.test:443")
	if !strings.HasPrefix(head, "HTTP/1.1 403 ") {
		t.Errorf("with a session from disk: %q", head)
	}
	doc.Generation = 2
	var ack wire.Ack
	must(t, ctl.Call(ctx, http.MethodPut, "/v1/sessions/kid1", doc, &ack))
	if ack.Generation != 2 {
		t.Errorf("ack %+v", ack)
	}
	must(t, ctl.Call(ctx, http.MethodDelete, "/v1/sessions/kid1", nil, nil))
	if head := connect(t, kid, inst.Gateway(), "evil.test:443"); head != "" {
		t.Errorf("without a session: %q", head)
	}
	must(t, cmd.Process.Signal(unix.SIGTERM))
	if err := cmd.Wait(); err != nil {
		t.Errorf("ended with %v\n%s", err, stderr)
	}
	raw, err := os.ReadFile(inst.AuditFile(instance.Proxy))
	must(t, err)
	for _, want := range []string{audit.EventDaemonStarted, audit.EventPolicyLoaded, "name-not-allowed", "unknown-session", audit.EventDaemonStopped} {
		if !strings.Contains(string(raw), want) {
			t.Errorf("no %s in the audit log:\n%s", want, raw)
		}
	}
}

// A proxy that may not mark its sockets does not start: unmarked traffic could not be stopped.
func TestProxyNeedsItsCapability(t *testing.T) {
	testroot.Require(t)
	inst := setUp(t)
	cmd, stderr := start(t, inst)
	err := cmd.Wait()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(stderr.String(), "CAP_NET_RAW") {
		t.Errorf("ended with %v: %s", err, stderr)
	}
}

func addAddrs(t *testing.T, addrs ...netip.Addr) {
	t.Helper()
	for _, a := range addrs {
		if out, err := exec.Command("ip", "addr", "add", a.String()+"/32", "dev", "lo").CombinedOutput(); err != nil { // an address
			t.Fatalf("adding %s: %v: %s", a, err, out)
		}
		t.Cleanup(func() {
			if err := exec.Command("ip", "addr", "del", a.String()+"/32", "dev", "lo").Run(); err != nil { // an address
				t.Error(err)
			}
		})
	}
}

// waitHealth waits until the daemon answers and returns what its health says.
func waitHealth(ctx context.Context, t *testing.T, ctl *control.Client, stderr *bytes.Buffer) error {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		err := ctl.Call(ctx, http.MethodGet, "/healthz", nil, nil)
		if err == nil || control.Status(err) != 0 {
			return err
		}
	}
	t.Fatalf("the proxy does not answer: %s", stderr)
	return nil
}

// connect sends a CONNECT from kid and returns the answer, "" for a reset.
func connect(t *testing.T, kid, gateway netip.Addr, target string) string {
	t.Helper()
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(kid, 0)), Timeout: patience}
	c, err := d.Dial("tcp4", netip.AddrPortFrom(gateway, instance.PortExplicit).String())
	if errors.Is(err, syscall.ECONNRESET) {
		return ""
	}
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(patience)))
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	answer, err := io.ReadAll(c)
	if err != nil && !errors.Is(err, syscall.ECONNRESET) {
		t.Error(err)
	}
	return string(answer)
}
