package kids

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/network"
)

// onTheHost is a request for a kid on the machine's network that Grace approves.
func onTheHost(name string) Request {
	p := plan()
	without(&p)
	p.Network = session.NetworkHost
	return Request{Name: name, Purpose: "test", Actor: "test", Plan: p, Approve: func() (Approval, error) {
		return Approval{Approval: wire.Approval{By: "Grace", Order: "o1", Key: "Grace+1"}, Note: "note"}, nil
	}}
}

// abstract calls an abstract socket of the machine's from inside the kid.
func (b *box) abstract(kid, name string) *result {
	b.t.Helper()
	return b.exec(kid, wire.ExecRequest{Argv: []string{"/usr/bin/python3", "-c", "import socket; socket.socket(socket.AF_UNIX).connect('\\0" + name + "')"}})
}

// TestKidOnTheMachinesNetwork has neither link nor network namespace, needs nobody who guards a road, calls no abstract
// socket, and is adopted with the name of whoever approved it.
func TestKidOnTheMachinesNetwork(t *testing.T) {
	b := newBox(t, "tsbhost")
	for _, call := range []string{"put proxy", "put dnsfilter", "delete proxy", "delete dnsfilter"} {
		b.guards.set(call, errors.New("it does not answer"))
	}
	l, err := net.Listen("unix", "@"+b.inst.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // nobody was served
	if k, err := b.Spawn(t.Context(), onTheHost("k1")); err != nil || k.Network != session.NetworkHost || k.Approval == nil || k.Approval.By != "Grace" {
		t.Fatalf("%+v, %v", k, err)
	}
	if got := b.interfaces("k1"); len(got) < 2 {
		t.Errorf("interfaces %v, want the machine's", got)
	}
	if r := b.abstract("k1", b.inst.Name()); r.exit.Code != 1 || !strings.Contains(r.stderr.String(), "not permitted") {
		t.Errorf("calling an abstract socket: %+v %s", r.exit, r.stderr.String())
	}
	rec := b.Manager.kids["k1"].rec.Session
	if e, known := b.guards.entries[rec.Mark]; !known || !e.OnHost || e.IfIndex != 0 || rec.NetNS != "" || rec.Link != "" {
		t.Errorf("the kernel knows %+v, %v; the session is %+v", e, known, rec)
	}
	if links, err := network.Links(b.inst.LinkPrefix()); err != nil || len(links) != 0 {
		t.Errorf("links %v, %v", links, err)
	}
	if _, err := b.Grant(t.Context(), "k1", "test", wire.GrantRequest{Host: "a.test", Port: 443, For: time.Minute, By: "ada", Reason: "x"}, Signature{}); KindOf(err) != Invalid {
		t.Errorf("a grant: %v, want it refused", err)
	}
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.State != wire.KidRunning || k.Approval == nil || k.Approval.By != "Grace" {
		t.Errorf("adopted as %+v, %v", k, err)
	}
	if r := b.abstract("k1", b.inst.Name()); r.exit.Code != 1 {
		t.Errorf("calling an abstract socket, started by runc: %+v", r.exit)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "done"); err != nil {
		t.Error(err)
	}
	b.wantNothingLeft()
}

// TestAbstractSocketsAreCalledWithoutTheFilter is the control: what keeps the machine's abstract sockets away is the filter.
func TestAbstractSocketsAreCalledWithoutTheFilter(t *testing.T) {
	b := newBox(t, "tsbhostopen")
	b.unconfined = true
	l, err := net.Listen("unix", "@"+b.inst.Name())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() // nobody was served
	if _, err := b.Spawn(t.Context(), onTheHost("k1")); err != nil {
		t.Fatal(err)
	}
	if r := b.abstract("k1", b.inst.Name()); r.exit.Code != 0 {
		t.Errorf("without the filter the socket is refused too: %+v %s", r.exit, r.stderr.String())
	}
	p := plan()
	b.spawn("k2", p)
	if r := b.abstract("k2", b.inst.Name()); !strings.Contains(r.stderr.String(), "refused") {
		t.Errorf("in a network of its own there is no such socket: %+v %s", r.exit, r.stderr.String())
	}
}

// TestNobodysWordIsNoApproval: without a person's signed one nothing is made.
func TestNobodysWordIsNoApproval(t *testing.T) {
	b := newBox(t, "tsbhostno")
	no := errors.New("no")
	for name, approve := range map[string]func() (Approval, error){
		"nobody is asked":            nil,
		"refused":                    func() (Approval, error) { return Approval{}, no },
		"nobody's":                   func() (Approval, error) { return Approval{}, nil },
		"a name that signed nothing": func() (Approval, error) { return Approval{Approval: wire.Approval{By: "root"}}, nil },
	} {
		r := onTheHost("k1")
		r.Approve = approve
		if k, err := b.Spawn(t.Context(), r); err == nil || name != "refused" && ReasonOf(err) != reason.OrderUnsigned {
			t.Errorf("%s: %+v, %v", name, k, err)
		}
	}
	if slices.Contains(b.guards.calls, "mint") || len(b.List(t.Context())) != 0 {
		t.Errorf("something was made: %v", b.guards.calls)
	}
	b.wantNothingLeft()
}
