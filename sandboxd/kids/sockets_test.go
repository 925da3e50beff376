package kids

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/cgroup"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/sockwatch"
)

// countDenied is nullMetrics for a sockwatch.
type countDenied struct{ nullMetrics }

func (countDenied) Denied(reason.Code, uint64) {}

// watchSockets answers for the box's kids until the test ends, or stop is called.
func (b *box) watchSockets() (stop func()) {
	b.t.Helper()
	b.cfg.SocketWatch = filepath.Join(b.inst.RunDir(), "seccomp.sock")
	w, err := sockwatch.New(sockwatch.Config{
		Path: b.cfg.SocketWatch, Sessions: b.Manager, Audit: b.audit, Metrics: countDenied{},
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	})
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- w.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
	}
	b.t.Cleanup(stop)
	return stop
}

// refusals are the records of sockets that were refused, and how many calls they stand for.
func (b *box) refusals() (found []audit.Record, calls uint64) {
	b.audit.mu.Lock()
	defer b.audit.mu.Unlock()
	for _, r := range b.audit.all {
		if r.Event == audit.EventConnectDenied && r.Reason == reason.RawSocket {
			found = append(found, r)
			calls += max(r.Count, 1)
		}
	}
	return found, calls
}

func socketKid(b *box) wire.Kid {
	b.t.Helper()
	p := plan()
	p.Inputs = []files.Input{probeInput(b.t)}
	return b.spawn("k1", p)
}

// sockets returns what every kind of socket gave.
func (b *box) sockets(kid string) map[string]string {
	b.t.Helper()
	r := b.probe(kid, "sockets")
	var got map[string]string
	if err := json.Unmarshal(r.stdout.Bytes(), &got); err != nil {
		b.t.Fatalf("probe: %v: %s%s %+v", err, r.stdout.String(), r.stderr.String(), r.exit)
	}
	return got
}

// mayOpen says whether a kid may open this, as probe's keys have it.
func mayOpen(key string) bool {
	var call string
	var family, kind, proto int
	fmt.Sscan(key, &call, &family, &kind, &proto)
	switch {
	case call == "socketpair":
		return family == unix.AF_UNIX
	case family == unix.AF_UNIX, family == unix.AF_NETLINK:
		return true
	case family != unix.AF_INET && family != unix.AF_INET6:
		return false
	}
	return kind == unix.SOCK_STREAM && (proto == 0 || proto == unix.IPPROTO_TCP) || kind == unix.SOCK_DGRAM && (proto == 0 || proto == unix.IPPROTO_UDP)
}

// TestEveryRefusedSocketIsRecorded asks for each family, type and many protocols: exactly those that a kid may not
// have are refused and in a record. Without somebody who answers, the same are refused and none is in a record.
func TestEveryRefusedSocketIsRecorded(t *testing.T) {
	for name, watched := range map[string]bool{"tsbsock": true, "tsbsockoff": false} {
		t.Run(name, func(t *testing.T) {
			b := newBox(t, name)
			stop := func() {}
			if watched {
				stop = b.watchSockets()
			}
			kid := socketKid(b)
			want := uint64(0)
			for key, errno := range b.sockets(kid.Name) {
				switch {
				case mayOpen(key):
					if errno == "EPERM" {
						t.Errorf("%s is refused", key)
					}
					continue
				case errno == "":
					t.Errorf("%s works", key)
				case watched && errno != "EPERM" && !(errno == "EPROTONOSUPPORT" && strings.HasSuffix(key, fmt.Sprint(" ", unix.IPPROTO_MPTCP))):
					t.Errorf("%s gives %s", key, errno)
				}
				want++
			}
			stop() // writes the last counts
			found, calls := b.refusals()
			if !watched {
				if calls != 0 {
					t.Errorf("%d calls are recorded though nobody could", calls)
				}
				return
			}
			if calls != want || want < 500 {
				t.Errorf("records stand for %d calls, want %d", calls, want)
			}
			for _, r := range found {
				if r.Kid != kid.Name || r.Session != kid.Session || r.Card != "practice" || r.Outcome != audit.OutcomeDeny || r.Fields["hook"] != sockwatch.Hook ||
					r.Process.Comm != "probe" || r.Process.Exe != "/workspace/probe" {
					t.Fatalf("record %+v of %+v", r, r.Process)
				}
			}
		})
	}
}

// TestRefusalNamesTheProcess looks at the process that the record names while it is still there.
func TestRefusalNamesTheProcess(t *testing.T) {
	b := newBox(t, "tsbsockpid")
	b.watchSockets()
	socketKid(b)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan error, 1)
	go func() {
		_, err := runExec(ctx, b.Manager, "k1", wire.ExecRequest{Argv: []string{"/workspace/probe", "60"}, Env: map[string]string{"TAGOUT_TEST_PROBE": "socket"}})
		done <- err
	}()
	var found []audit.Record
	eventually(t, "the record", func() bool { found, _ = b.refusals(); return len(found) > 0 })
	r := found[0]
	group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", r.Process.PID))
	if err != nil || !strings.Contains(string(group), b.cgroupRel("k1")) {
		t.Errorf("process %d is not the kid's: %q %v", r.Process.PID, group, err)
	}
	env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", r.Process.PID))
	if err != nil || !strings.Contains(string(env), "TAGOUT_TEST_PROBE=socket") {
		t.Errorf("process %d is not the probe: %v", r.Process.PID, err)
	}
	if r.Fields["family"] != "alg" || r.Fields["type"] != "dgram" || r.Fields["protocol"] != "0" || r.Fields["call"] != "socket" {
		t.Errorf("what was asked for: %v", r.Fields)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestFloodOfSocketsIsCounted: few records, exact number.
func TestFloodOfSocketsIsCounted(t *testing.T) {
	b := newBox(t, "tsbsockmany")
	stop := b.watchSockets()
	socketKid(b)
	const n = 1500
	if r := b.probe("k1", "many sockets", fmt.Sprint(n)); r.exit.Code != 0 {
		t.Fatalf("probe: %+v %s", r.exit, r.stderr.String())
	}
	stop()
	if found, calls := b.refusals(); calls != n || len(found) > 100 {
		t.Errorf("%d records stand for %d calls, want %d", len(found), calls, n)
	}
}

// TestTheNextWatchIsAskedByLaterCommands: a kid outlives sandboxd and its watch. Without a watch nothing starts in it
// then; with the next sandboxd's, commands do, and what they ask is recorded.
func TestTheNextWatchIsAskedByLaterCommands(t *testing.T) {
	b := newBox(t, "tsbsocknext")
	stop := b.watchSockets()
	socketKid(b)
	stop()
	b.succeed()
	if r := b.probe("k1", "many sockets", "2"); r.exit.Result != resultFailed {
		t.Errorf("without a watch: %+v", r.exit)
	}
	stop = b.watchSockets()
	if r := b.probe("k1", "many sockets", "3"); r.exit.Result != resultExited || r.exit.Code != 0 {
		t.Errorf("with the next watch: %+v", r.exit)
	}
	stop()
	if _, calls := b.refusals(); calls != 3 {
		t.Errorf("records stand for %d calls, want 3", calls)
	}
}

// TestNobodyAnswers: while a call waits for an answer that never comes, the rest of the kid goes on and a stop
// works as ever; when the one who does not answer is gone, so is the call.
func TestNobodyAnswers(t *testing.T) {
	b := newBox(t, "tsbsockdead")
	b.cfg.SocketWatch = filepath.Join(b.inst.RunDir(), "seccomp.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: b.cfg.SocketWatch})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	filters := make(chan int, 16)
	go holdFilters(l, filters)
	socketKid(b)
	filter := <-filters // kid-init's, and so every command's
	result := make(chan string, 2)
	asked := "k1"
	ask := func() {
		r, err := runExec(context.Background(), b.Manager, asked, wire.ExecRequest{Argv: []string{"/workspace/probe", "0"}, Env: map[string]string{"TAGOUT_TEST_PROBE": "socket"}})
		if err != nil {
			result <- err.Error()
			return
		}
		result <- strings.TrimSpace(r.stdout.String()) + r.exit.Signal
	}
	go ask()
	waitAsked(t, filter)
	if r := b.sh("k1", "echo on"); r.stdout.String() != "on\n" {
		t.Errorf("beside a call that waits: %+v", r.exit)
	}
	unix.Close(filter)
	if got := <-result; got != "ENOSYS" {
		t.Errorf("after whoever should answer is gone: %q", got)
	}

	asked = "k2"
	p := plan()
	p.Inputs = []files.Input{probeInput(t)}
	kid := b.spawn(asked, p)
	filter = <-filters
	go ask()
	defer unix.Close(filter)
	waitAsked(t, filter)
	if err := cgroup.Kill(kid.Cgroup); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kid to be empty", func() bool {
		populated, err := cgroup.Populated(kid.Cgroup)
		return err == nil && !populated
	})
	if got := <-result; got != "SIGKILL" {
		t.Errorf("the call that waited: %q", got)
	}
}

// holdFilters takes the filters that runc sends and does nothing with them.
func holdFilters(l *net.UnixListener, filters chan<- int) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			return
		}
		buf, oob := make([]byte, 1<<16), make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := conn.ReadMsgUnix(buf, oob)
		conn.Close()
		if err != nil {
			continue
		}
		if messages, err := unix.ParseSocketControlMessage(oob[:n]); err == nil && len(messages) == 1 {
			if fds, err := unix.ParseUnixRights(&messages[0]); err == nil && len(fds) == 1 {
				filters <- fds[0]
			}
		}
	}
}

// waitAsked waits until a call waits for an answer.
func waitAsked(t *testing.T, filter int) {
	t.Helper()
	fds := []unix.PollFd{{Fd: int32(filter), Events: unix.POLLIN}}
	eventually(t, "a call that waits", func() bool {
		n, err := unix.Poll(fds, 0)
		return err == nil && n == 1 && fds[0].Revents&unix.POLLIN != 0
	})
}
