package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/control"
	"tagout/internal/reason"
	"tagout/internal/testroot"
	"tagout/internal/wire"
	"tagout/sandboxd/kids"
)

// fakeProofs tells what it was asked.
type fakeProofs struct {
	err       error
	plans     chan kids.Plan
	destroyed chan struct{}
}

func (f fakeProofs) SpawnProof(_ context.Context, _ string, p kids.Plan) (wire.ProofKid, error) {
	f.plans <- p
	return wire.ProofKid{Kid: wire.Kid{Name: "proof-1"}, Token: "t"}, f.err
}

func (f fakeProofs) SendProof(_ context.Context, daemon, nonce string) (bool, error) {
	return daemon == "proxy" && nonce == "n", f.err
}

func (f fakeProofs) DestroyProofs(ctx context.Context, _ string) error {
	f.destroyed <- struct{}{}
	return ctx.Err()
}

func serveProofs(t *testing.T, f fakeProofs, killswitchd int, ending <-chan struct{}) *control.Client {
	t.Helper()
	c := control.NewClient(proofSocket(t, f, killswitchd, ending))
	t.Cleanup(c.CloseIdle)
	return c
}

// proofSocket serves the routes and returns the socket.
func proofSocket(t *testing.T, f fakeProofs, killswitchd int, ending <-chan struct{}) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	for _, dir := range []string{filepath.Dir(path), filepath.Dir(filepath.Dir(path))} { // the test's own: other uids pass
		if err := os.Chmod(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	l, err := control.Listen(path, os.Getgid())
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	RegisterProofs(mux, ProofConfig{Proofs: f, Plan: func() (kids.Plan, error) { return kids.Plan{Card: "built-in"}, nil }, Killswitchd: killswitchd, Ending: ending})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- control.Serve(ctx, l, mux, time.Second) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return path
}

func newFakeProofs() fakeProofs {
	return fakeProofs{plans: make(chan kids.Plan, 8), destroyed: make(chan struct{}, 8)}
}

// TestAProofsKidLivesAsLongAsTheConnection: whoever asked for it may be killed, and it goes.
func TestAProofsKidLivesAsLongAsTheConnection(t *testing.T) {
	f, ending := newFakeProofs(), make(chan struct{})
	c := serveProofs(t, f, os.Getuid(), ending)
	ask(t, c, f, "the caller goes", func(cancel func()) { cancel() })
	ask(t, c, f, "the daemon ends", func(func()) { close(ending) })
	if err := c.Call(t.Context(), http.MethodDelete, "/v1/proof", nil, nil); err != nil {
		t.Error(err)
	}
	<-f.destroyed
	for daemon, want := range map[string]bool{"proxy": true, "dnsfilter": false} {
		var reply wire.ProofPacketReply
		if err := c.Call(t.Context(), http.MethodPost, "/v1/proof/packet", wire.ProofPacket{Daemon: daemon, Nonce: "n"}, &reply); err != nil || reply.Arrived != want {
			t.Errorf("a packet of %s: %+v, %v", daemon, reply, err)
		}
	}
}

func ask(t *testing.T, c *control.Client, f fakeProofs, name string, end func(cancel func())) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	got := make(chan wire.ProofKid, 1)
	go func() {
		defer close(done)
		c.Each(ctx, http.MethodPost, "/v1/proof", nil, func(line json.RawMessage) error { // its end is judged below
			var k wire.ProofKid
			err := json.Unmarshal(line, &k)
			got <- k
			return err
		})
	}()
	if k := <-got; k.Kid.Name != "proof-1" || k.Token != "t" {
		t.Errorf("%s: got %+v", name, k)
	}
	if p := <-f.plans; p.Card != "built-in" {
		t.Errorf("%s: planned %+v", name, p)
	}
	select {
	case <-f.destroyed:
		t.Errorf("%s: destroyed while the connection is open", name)
	default:
	}
	end(cancel)
	select {
	case <-f.destroyed:
	case <-time.After(10 * time.Second):
		t.Errorf("%s: not destroyed", name)
	}
	<-done
}

func TestProofsAreRefused(t *testing.T) {
	f := newFakeProofs()
	f.err = refusal(kids.Conflict, reason.OK)
	if err := serveProofs(t, f, os.Getuid(), nil).Call(t.Context(), http.MethodPost, "/v1/proof", nil, nil); control.Status(err) != http.StatusConflict {
		t.Errorf("%v", err)
	}
}

// TestOnlyKillswitchdAndRootMayAskForProofs: a daemon of the instance that is neither gets no kid and destroys none.
func TestOnlyKillswitchdAndRootMayAskForProofs(t *testing.T) {
	testroot.Require(t) // it takes other uids
	const killswitchd, proxy = 54321, 54322
	f := newFakeProofs()
	path := proofSocket(t, f, killswitchd, nil)
	for uid, want := range map[int]int{killswitchd: http.StatusOK, proxy: http.StatusForbidden} {
		for _, method := range []string{http.MethodDelete, http.MethodPost} {
			if got := statusAs(t, uid, path, method+" /v1/proof"); got != want {
				t.Errorf("uid %d, %s: status %d, want %d", uid, method, got, want)
			}
		}
	}
	if got := statusAs(t, proxy, path, "POST /v1/proof/packet"); got != http.StatusForbidden {
		t.Errorf("a packet for the proxy: status %d", got)
	}
	if len(f.plans) != 1 {
		t.Errorf("%d kids, want killswitchd's", len(f.plans))
	}
}

// statusAs asks with another uid, on a thread that ends with the question.
func statusAs(t *testing.T, uid int, path, request string) int {
	t.Helper()
	got := make(chan int, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the uid is the thread's
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uintptr(uid), uintptr(uid), uintptr(uid)); errno != 0 {
			t.Error(errno)
		}
		conn, err := net.Dial("unix", path) // on this thread: the kernel notes who connects
		if err != nil {
			t.Error(err)
			got <- 0
			return
		}
		defer conn.Close() // the answer's head is all that counts
		fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n", request)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Error(err)
			got <- 0
			return
		}
		got <- resp.StatusCode
	}()
	return <-got
}

// TestListLeavesProofsOut unless it is asked for all.
func TestListLeavesProofsOut(t *testing.T) {
	c := serve(t, fakeKids{list: func(context.Context) []wire.Kid { return []wire.Kid{{Name: "a"}, {Name: "proof-1", Proof: true}} }}, nil)
	for route, want := range map[string]int{"/v1/kids": 1, "/v1/kids?all=1": 2} {
		var got []wire.Kid
		if err := c.Call(t.Context(), http.MethodGet, route, nil, &got); err != nil || len(got) != want {
			t.Errorf("%s: %+v %v", route, got, err)
		}
	}
}
