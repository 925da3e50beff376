package e2e

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

// gate stands in front of the API and lets nothing through before it is opened: whoever comes has taken its secret
// from credd, and waits for a TLS server that does not answer.
type gate struct {
	came chan struct{} // one for each connection
	open chan struct{}
	gone sync.WaitGroup
}

func newGate(t *testing.T, box *testenv.Box) *gate {
	t.Helper()
	g := &gate{came: make(chan struct{}, 16), open: make(chan struct{})}
	at := netip.AddrPortFrom(box.Net.FilesAddr(), 443)
	var l net.Listener
	if err := box.Net.Do(func() (err error) {
		l, err = net.Listen("tcp4", at.String())
		return err
	}); err != nil {
		t.Fatal(err)
	}
	accepting := make(chan struct{})
	go func() {
		defer close(accepting)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			g.gone.Go(func() { g.serve(box, conn) })
			g.came <- struct{}{}
		}
	}()
	t.Cleanup(func() {
		l.Close() // a test
		<-accepting
	})
	box.Net.DNS.SetHost(practice.NameAPI, at.Addr())
	return g
}

func (g *gate) serve(box *testenv.Box, conn net.Conn) {
	defer conn.Close()
	<-g.open
	conn.SetDeadline(time.Now().Add(2 * time.Second)) // silence can only be seen by listening for a while
	up, err := box.Net.Dial(box.T.Context(), "tcp4", netip.AddrPortFrom(box.Net.APIAddr(), 443).String())
	if err != nil {
		return
	}
	defer up.Close()
	var both sync.WaitGroup
	both.Go(func() { io.Copy(up, conn); up.(*net.TCPConn).CloseWrite() })
	both.Go(func() { io.Copy(conn, up); conn.(*net.TCPConn).CloseWrite() })
	both.Wait()
}

// TestASecretOnItsWayIsStopped (invariant 5, S11): the proxy has taken the secret from credd and not sent it when the
// credential layer fires. Once the layer is acknowledged nothing of it reaches the server, also where the proxy stood
// still during the stop, and where credd had to be killed. Where a person revokes the token, or the session is destroyed,
// the proxy hears of it from credd and cuts what carries the secret. The control is that nothing is done.
func TestASecretOnItsWayIsStopped(t *testing.T) {
	t.Parallel()
	box := start(t)
	credential := func(kid wire.Kid) {
		rep := box.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, Layers: []wire.Layer{wire.LayerCredential}})
		if rep.Layers[wire.LayerCredential].State != wire.StateObserved {
			t.Errorf("report %+v", rep)
		}
	}
	for _, c := range []struct {
		name    string
		stop    func(wire.Kid)
		arrives int
	}{
		{"control", func(wire.Kid) {}, 1},
		{"revoke", func(kid wire.Kid) {
			box.Must("token", "revoke", "--kid", kid.Name, "--reason", "a test")
			cutForItsCredential(box, kid)
		}, 0},
		{"forget", func(kid wire.Kid) {
			if err := box.Client(instance.Credd).Call(t.Context(), http.MethodDelete, "/v1/sessions/"+kid.Name, nil, nil); err != nil {
				t.Error(err)
			}
			cutForItsCredential(box, kid)
		}, 0},
		{"stop", credential, 0},
		{"proxy", func(kid wire.Kid) {
			box.Freeze(instance.Proxy)
			defer box.Thaw(instance.Proxy)
			credential(kid)
		}, 0},
		{"credd", func(kid wire.Kid) {
			box.Freeze(instance.Credd)
			credential(kid)
		}, 0},
	} {
		if !t.Run(c.name, func(t *testing.T) { heldUse(t, box, c.stop, c.arrives) }) {
			return
		}
	}
}

// cutForItsCredential waits until the proxy has cut the kid's connection.
func cutForItsCredential(box *testenv.Box, kid wire.Kid) {
	box.WaitRecord("the proxy's cut", func(r *audit.Record) bool {
		return r.Kid == kid.Name && r.Reason == reason.TokenUnknown && strings.Contains(r.Detail, "was revoked")
	})
}

// heldUse holds one use of a kid's token at the gate, calls stop, opens the gate and counts what arrives.
func heldUse(t *testing.T, box *testenv.Box, stop func(wire.Kid), want int) {
	box.WaitHealthy(instance.Credd)
	kid := box.Spawn(card, hostile(t, box))
	g := newGate(t, box)
	before := box.Net.API.Uses.Total().Accepted
	done := running(t, box, kid.Name, "/workspace/hostile", "whoami", "https://api.vendor.test/v1/whoami")
	select {
	case <-g.came:
	case out := <-done:
		t.Fatalf("the use did not come as far as the gate: %+v", out)
	}
	stop(kid)
	close(g.open)
	out := wait(t, "the use", done)
	g.gone.Wait()
	if n := box.Net.API.Uses.Total().Accepted - before; n != want {
		t.Errorf("%d uses arrived after the acknowledgement, want %d: %+v", n, want, out)
	}
	if len(box.Records(named("api.vendor.test"))) == 0 {
		t.Error("the use left no record")
	}
}
