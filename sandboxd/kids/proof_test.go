package kids

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/wire"
)

func proofPlan(b *box) Plan {
	p := plan()
	p.Proof, p.Secrets = true, nil
	p.InitArgs = []string{"proof", b.inst.Gateway().String(), "proof.test"}
	return p
}

// TestProofKid: it is a kid like any other, except that nobody counts it, nobody else can have its name, and a credd
// that gives no token keeps it from nothing.
func TestProofKid(t *testing.T) {
	b := newBox(t, "tsbproof")
	k, err := b.SpawnProof(t.Context(), "test", proofPlan(b))
	if err != nil {
		t.Fatal(err)
	}
	if k.Kid.Name != "proof-1" || !k.Kid.Proof || k.Kid.State != wire.KidRunning || k.MaxTime != time.Second || k.NoToken == "" {
		t.Errorf("spawned %+v", k) // the fake credd knows no proofs
	}
	if _, err := b.SpawnProof(t.Context(), "test", proofPlan(b)); KindOf(err) != Conflict {
		t.Errorf("a second one at the same time: %v", err)
	}
	if _, err := b.Spawn(t.Context(), Request{Name: "proof-x", Plan: plan()}); KindOf(err) != Invalid {
		t.Errorf("somebody else with such a name: %v", err)
	}
	if err := b.DestroyProofs(t.Context(), "test"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
	b.guards.set("mint", errors.New("credd hangs"))
	if k, err = b.SpawnProof(t.Context(), "test", proofPlan(b)); err != nil || k.Kid.Name != "proof-2" || k.NoToken != "credd hangs" {
		t.Errorf("without credd: %+v, %v", k, err)
	}
	if _, err := b.Spawn(t.Context(), Request{Name: "real", Plan: plan()}); KindOf(err) != Unavailable {
		t.Errorf("a real kid without credd: %v", err)
	}
	if err := b.DestroyProofs(t.Context(), "test"); err != nil {
		t.Fatal(err)
	}
	b.guards.set("put proxy", errors.New("the proxy hangs"))
	if k, err = b.SpawnProof(t.Context(), "test", proofPlan(b)); KindOf(err) != Unavailable {
		t.Errorf("without the proxy: %+v, %v", k, err)
	}
	b.wantNothingLeft()
	if n := b.audit.count(audit.EventKidRefused, audit.OutcomeDeny); n != 1 {
		t.Errorf("%d refusals are recorded, want the real kid's", n)
	}
}

// TestProofKidIsNotAdopted: a successor destroys it.
func TestProofKidIsNotAdopted(t *testing.T) {
	b := newBox(t, "tsbproofa")
	if _, err := b.SpawnProof(t.Context(), "test", proofPlan(b)); err != nil {
		t.Fatal(err)
	}
	b.spawn("real", plan())
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if kids := b.List(t.Context()); len(kids) != 1 || kids[0].Name != "real" {
		t.Errorf("kids after the restart: %+v", kids)
	}
	if err := b.Destroy(t.Context(), "real", "test", "end of the test"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
}

// TestProofKidLooksUp: its queries reach the gateway's address, again and again.
func TestProofKidLooksUp(t *testing.T) {
	b := newBox(t, "tsbprooft")
	p := proofPlan(b)
	host, _ := b.inst.KidAddrs(1) // of the first kid; its other end of the link stands for the gateway here
	p.InitArgs[1] = host.String()
	k, err := b.SpawnProof(t.Context(), "test", p)
	if err != nil {
		t.Fatal(err)
	}
	c, err := net.ListenPacket("udp4", net.JoinHostPort(host.String(), "53"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close() // only read
	buf := make([]byte, 512)
	for range 3 {
		if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			t.Fatal(err)
		}
		if got := from.(*net.UDPAddr).AddrPort().Addr(); got != k.Kid.Addr {
			t.Errorf("a query came from %v, the kid is %v", got, k.Kid.Addr)
		}
		const want = "\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x05proof\x04test\x00\x00\x01\x00\x01"
		if string(buf[2:n]) != want {
			t.Errorf("query %q", buf[:n])
		}
	}
	if err := b.DestroyProofs(t.Context(), "test"); err != nil {
		t.Fatal(err)
	}
	b.wantNothingLeft()
}

// TestProofPacket: it has the mark of the proof's kid and comes from where the daemon lives; without either there is none.
func TestProofPacket(t *testing.T) {
	b := newBox(t, "tsbpacket")
	if _, err := b.SendProof(t.Context(), instance.Proxy, "n"); KindOf(err) != NotFound {
		t.Errorf("without a proof: %v", err)
	}
	if _, err := b.SpawnProof(t.Context(), "test", proofPlan(b)); err != nil {
		t.Fatal(err)
	}
	if err := b.layout.Create(b.inst.DaemonCgroupRel(instance.Proxy)); err != nil {
		t.Fatal(err)
	}
	if arrived, err := b.SendProof(t.Context(), instance.Proxy, "n"); err != nil || !arrived {
		t.Errorf("from a cgroup where no program is: arrived %v, %v", arrived, err)
	}
	for _, daemon := range []string{instance.Credd, "", "../kids"} {
		if _, err := b.SendProof(t.Context(), daemon, "n"); KindOf(err) != Invalid {
			t.Errorf("from %q: %v", daemon, err)
		}
	}
	for _, nonce := range []string{"", strings.Repeat("n", maxNonce+1)} {
		if _, err := b.SendProof(t.Context(), instance.Proxy, nonce); KindOf(err) != Invalid {
			t.Errorf("a nonce of %d bytes: %v", len(nonce), err)
		}
	}
	if _, err := b.SendProof(t.Context(), instance.DNSFilter, "n"); KindOf(err) != Unavailable {
		t.Errorf("from a cgroup that is not there: %v", err)
	}
	if err := b.DestroyProofs(t.Context(), "test"); err != nil {
		t.Fatal(err)
	}
}
