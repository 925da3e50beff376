package kids

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/network"
)

func without(p *Plan) {
	p.Network, p.Egress, p.Ports, p.Hosts = session.NetworkNone, plan().Egress, nil, nil
	p.Egress.Allow = nil
}

// interfaces lists what the kid's /proc/net/dev has.
func (b *box) interfaces(kid string) (out []string) {
	b.t.Helper()
	r := b.sh(kid, "cat /proc/net/dev")
	for line := range strings.Lines(r.stdout.String()) {
		if name, _, ok := strings.Cut(strings.TrimSpace(line), ":"); ok {
			out = append(out, name)
		}
	}
	return out
}

// TestKidWithoutANetwork has no road, and so needs nobody who guards one: the proxy and dnsfilter are not there.
func TestKidWithoutANetwork(t *testing.T) {
	b := newBox(t, "tsbnonet")
	b.probed("k2", nil) // the control
	for _, call := range []string{"put proxy", "put dnsfilter", "delete proxy", "delete dnsfilter"} {
		b.guards.set(call, errors.New("it does not answer"))
	}
	b.probed("k1", without)
	if got := b.interfaces("k1"); len(got) != 1 || got[0] != "lo" {
		t.Errorf("interfaces %v, want lo alone", got)
	}
	if got := b.interfaces("k2"); len(got) != 2 {
		t.Errorf("the interfaces of a kid with a network: %v: the test shows nothing", got)
	}
	gateway := b.inst.Gateway().String()
	for _, to := range []string{"127.0.0.1/80", gateway + "/53", "192.0.2.1/80"} {
		r := b.exec("k1", wire.ExecRequest{Argv: []string{"/bin/bash", "-c", "exec 3<>/dev/tcp/" + to}})
		if !strings.Contains(r.stderr.String(), "unreachable") {
			t.Errorf("connecting to %s: %q, want no route", to, r.stderr.String())
		}
	}
	if r := b.sh("k1", "cat /etc/resolv.conf /etc/hosts"); strings.Contains(r.stdout.String(), gateway) || strings.Contains(r.stdout.String(), "nameserver") {
		t.Errorf("it is told of a resolver: %s", r.stdout.String())
	}
	if k, err := b.Get(t.Context(), "k1"); err != nil || k.Network != session.NetworkNone || k.Addr.IsValid() {
		t.Errorf("shown as %+v, %v", k, err)
	}
	links, err := network.Links(b.inst.LinkPrefix())
	if err != nil || len(links) != 1 {
		t.Errorf("links %v, %v, want that of k2", links, err)
	}
	if _, err := b.Grant(t.Context(), "k1", "test", wire.GrantRequest{Host: "a.test", Port: 443, For: time.Minute, By: "ada", Reason: "x"}, Signature{}); KindOf(err) != Invalid {
		t.Errorf("a grant: %v, want it refused", err)
	}
	if e, known := b.guards.entries[b.Manager.kids["k1"].rec.Session.Mark]; !known || e.IfIndex != 0 || e.CgroupID == 0 {
		t.Errorf("the kernel knows %+v, %v: the stop layers need its cgroup and mark", e, known)
	}
	if err := b.Destroy(t.Context(), "k1", "test", "done"); err != nil {
		t.Error(err)
	}
	for _, call := range []string{"delete proxy", "delete dnsfilter"} {
		b.guards.set(call, nil)
	}
	if err := b.Destroy(t.Context(), "k2", "test", "done"); err != nil {
		t.Error(err)
	}
	b.wantNothingLeft()
}

// TestKidWithoutANetworkIsAdopted, and one that was given a link meanwhile is not.
func TestKidWithoutANetworkIsAdopted(t *testing.T) {
	b := newBox(t, "tsbnoadopt")
	b.probed("k1", without)
	b.probed("k2", without)
	second := b.Manager.kids["k2"].rec
	second.Session.Link = b.inst.KidLink(second.Session.Index)
	if err := errors.Join(b.Manager.store.Put(&second.Session, b.inst.GroupID()), os.MkdirAll(filepath.Dir(b.inst.KidDir("k2")), 0o711)); err != nil {
		t.Fatal(err)
	}
	if _, err := network.Connect(network.LinkConfig{NetNS: second.Session.NetNS, Name: second.Session.Link, HostAddr: second.Session.HostAddr, KidAddr: second.Session.Addr}); err != nil {
		t.Fatal(err)
	}
	b.Manager = makeManager(t, b.inst, b.layout, initPath, b.guards, b.audit)
	if err := b.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	kids := b.List(t.Context())
	if len(kids) != 1 || kids[0].Name != "k1" || kids[0].State != wire.KidRunning {
		t.Errorf("adopted %+v, want k1 alone", kids)
	}
	if got := b.interfaces("k1"); len(got) != 1 {
		t.Errorf("interfaces %v", got)
	}
}
