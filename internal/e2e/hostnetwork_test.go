package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"tagout/internal/audit"
	"tagout/internal/authority"
	"tagout/internal/cgroup"
	"tagout/internal/config"
	"tagout/internal/contain"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

const hostPurpose = "Look at the machine's network."

const hostInputs = `filesystem:
  inputs: [{from: tagout, to: /workspace/tagout, mode: "0755"}]
identity:
  notKeys:
    - {file: /workspace/tagout, rule: aws-amazon-bedrock-api-key-short-lived, reason: the rule's own text is in the program}
    - {file: /workspace/tagout, rule: generic-api-key, reason: a program has all kinds of bytes in it}
`

// hostCard is a card for the machine's network, within reach of these addresses.
func hostCard(reach ...netip.AddrPort) string {
	card := `apiVersion: tagout/v1
kind: Card
name: near
task: ` + hostPurpose + `
image: host
network: host
` + hostInputs + `stop: {authority: "Ada Operator", maxTime: 60s}
`
	if len(reach) > 0 {
		card += "reach:\n"
	}
	for _, at := range reach {
		card += fmt.Sprintf("  - {addresses: [%q], ports: [%d]}\n", at.Addr(), at.Port())
	}
	return card
}

// hostBox is a box on which people approve.
type hostBox struct {
	*testenv.Box
	dir  string // of the cards' input
	sink netip.AddrPort
}

func newHostBox(t *testing.T, change func(*config.Box)) *hostBox {
	t.Helper()
	box := testenv.StartWith(t, change)
	b := &hostBox{Box: box, dir: t.TempDir(), sink: netip.AddrPortFrom(box.Net.TicksAddr(), practice.PortTicks)}
	program, err := os.ReadFile(filepath.Join(box.Bin, "tagout"))
	if err == nil {
		err = os.WriteFile(filepath.Join(b.dir, "tagout"), program, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *hostBox) approval(kid, card, by string) string {
	b.T.Helper()
	return b.Sign(authority.Order{Action: authority.ActionHost, Kid: kid, Card: authority.CardSum(card), Reason: hostPurpose}, by).Note
}

func (b *hostBox) try(kid, card, approval string) (wire.Kid, error) {
	var view wire.Kid
	err := b.Client(instance.Sandboxd).Call(b.T.Context(), http.MethodPost, "/v1/kids",
		wire.SpawnRequest{Name: kid, Purpose: hostPurpose, Card: card, InputDir: b.dir, Approval: approval}, &view)
	return view, err
}

func (b *hostBox) spawn(kid, card string) wire.Kid {
	b.T.Helper()
	view, err := b.try(kid, card, b.approval(kid, card, practice.Second))
	if err != nil {
		b.T.Fatal(err)
	}
	return view
}

func (b *hostBox) refused(what string, code reason.Code, err error) {
	b.T.Helper()
	var no *control.Error
	if !errors.As(err, &no) || no.Problem.Reason != code {
		b.T.Errorf("%s: %v, want %s", what, err, code)
		return
	}
	b.WaitRecord(what+" on record", func(r *audit.Record) bool {
		return r.Event == audit.EventOrderRefused && r.Reason == code && r.Detail == no.Problem.Detail
	})
}

// TestTheMachinesNetworkTakesAnApproval: of a person with the role, for this card, kid, purpose and box, once and within two
// minutes; not of root, not through an agent, not again after sandboxd was killed.
func TestTheMachinesNetworkTakesAnApproval(t *testing.T) {
	t.Parallel()
	b := newHostBox(t, nil)
	card := hostCard(b.sink)
	list, err := authority.NewBook(b.Inst.AuthorityFile(), 0).List()
	if err != nil {
		t.Fatal(err)
	}
	signed := func(at time.Time, life time.Duration, change func(*authority.Order)) string {
		o := authority.Order{Action: authority.ActionHost, Box: list.Box, By: practice.Second, Kid: "k1", Card: authority.CardSum(card), Reason: hostPurpose}
		change(&o)
		raw, err := authority.Sign(authority.New(o, at, life), b.Net.Key(practice.Second))
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	as := func(change func(*authority.Order)) string { return signed(time.Now(), authority.HostLife, change) }
	same := func(*authority.Order) {}
	good := as(same)
	for what, c := range map[string]struct {
		code     reason.Code
		approval string
	}{
		"root alone":       {reason.OrderUnsigned, ""},
		"every other role": {reason.OrderRole, b.approval("k1", card, practice.Authority)},
		"another kid":      {reason.OrderInvalid, as(func(o *authority.Order) { o.Kid = "k2" })},
		"another card":     {reason.OrderInvalid, as(func(o *authority.Order) { o.Card = authority.CardSum(card + "\n") })},
		"another purpose":  {reason.OrderInvalid, as(func(o *authority.Order) { o.Reason = "something else" })},
		"another box":      {reason.OrderBox, as(func(o *authority.Order) { o.Box = "01JD0000000000000000000000" })},
		"expired":          {reason.OrderExpired, signed(time.Now().Add(-authority.HostLife-time.Second), authority.HostLife, same)},
		"too long":         {reason.OrderExpired, signed(time.Now(), authority.HostLife+time.Second, same)},
		"a signed spawn":   {reason.OrderInvalid, b.Sign(authority.Order{Action: authority.ActionSpawn, Kid: "k1", Card: authority.CardSum(card), Reason: hostPurpose}, practice.Authority).Note},
		"changed":          {reason.OrderKey, strings.Replace(good, `"kid":"k1"`, `"kid":"k2"`, 1)},
		"no signature":     {reason.OrderInvalid, strings.SplitAfter(good, "\n\n")[0]},
	} {
		_, err := b.try("k1", card, c.approval)
		b.refused(what, c.code, err)
	}
	if _, err := b.try("k1", bareCard, good); err == nil || !strings.Contains(err.Error(), "does not say `network: host`") {
		t.Errorf("an approval that is not needed: %v", err)
	}
	b.neverForAgents(strings.Replace(card, hostInputs, "", 1))
	if kids := b.Must("list", "--json"); strings.Contains(kids, `"near"`) {
		t.Fatalf("a kid was made: %s", kids)
	}

	view, err := b.try("k1", card, good)
	if err != nil || view.Network != "host" || view.Approval == nil || view.Approval.By != practice.Second || view.Addr.IsValid() {
		t.Fatalf("an approved spawn: %+v, %v", view, err)
	}
	for _, event := range []string{audit.EventHostApproved, audit.EventKidSpawned} {
		b.WaitRecord("the approval in "+event, func(r *audit.Record) bool {
			return r.Event == event && r.Kid == "k1" && (r.Fields["note"] == good && r.Actor == practice.Second || r.Fields["approval_note"] == good && r.Fields["approved_by"] == practice.Second)
		})
	}
	_, err = b.try("k1", card, good)
	b.refused("a second use", reason.OrderReplayed, err)
	b.Destroy("k1")
	b.Kill9(instance.Sandboxd)
	b.WaitHealthy(instance.Sandboxd)
	_, err = b.try("k1", card, good)
	b.refused("a second use after sandboxd was killed", reason.OrderReplayed, err)

	// It is used up before anything is made: a spawn that fails afterwards does not give it back.
	if _, err := b.TrySpawn("k2", bareCard, nil); err != nil {
		t.Fatal(err)
	}
	taken := as(func(o *authority.Order) { o.Kid = "k2" })
	if _, err := b.try("k2", card, taken); err == nil || !strings.Contains(err.Error(), "taken") {
		t.Errorf("a name that is taken: %v", err)
	}
	b.Destroy("k2")
	_, err = b.try("k2", card, taken)
	b.refused("after a spawn that failed", reason.OrderReplayed, err)
	b.onceForAll(card)
	b.approvesByCommand(card)
}

// onceForAll: of many spawns at once with one approval a single one gets it, and it stays used where sandboxd is killed over
// the spawn.
func (b *hostBox) onceForAll(card string) {
	t := b.T
	approval := b.approval("k4", card, practice.Second)
	const askers = 8
	errs := make(chan error, askers)
	for range askers {
		go func() {
			_, err := b.try("k4", card, approval)
			errs <- err
		}()
	}
	made := 0
	for range askers {
		if err := <-errs; err == nil {
			made++
		} else if no := (*control.Error)(nil); !errors.As(err, &no) || no.Problem.Reason != reason.OrderReplayed {
			t.Errorf("beside the one that was made: %v", err)
		}
	}
	if made != 1 {
		t.Errorf("%d spawns of %d got the approval", made, askers)
	}
	b.Destroy("k4")

	approval = b.approval("k5", card, practice.Second)
	b.Freeze(instance.Credd) // the spawn waits for it, after the approval
	done := make(chan error, 1)
	go func() {
		_, err := b.try("k5", card, approval)
		done <- err
	}()
	b.WaitRecord("the approval that is used", func(r *audit.Record) bool { return r.Event == audit.EventHostApproved && r.Kid == "k5" })
	b.Kill9(instance.Sandboxd)
	b.Thaw(instance.Credd)
	if err := <-done; err == nil {
		t.Error("a spawn was answered by a sandboxd that was killed over it")
	}
	b.WaitHealthy(instance.Sandboxd, instance.Credd)
	if kids := b.Must("list", "--json"); strings.Contains(kids, `"k5"`) {
		t.Errorf("a half-made kid is there: %s", kids)
	}
	_, err := b.try("k5", card, approval)
	b.refused("after sandboxd was killed over the spawn", reason.OrderReplayed, err)
	if _, err := b.try("k5", card, b.approval("k5", card, practice.Second)); err != nil {
		t.Errorf("the control, another approval: %v", err)
	}
	b.Destroy("k5")
}

// neverForAgents tries as an agent, with an approval that counts.
func (b *hostBox) neverForAgents(card string) {
	t := b.T.(*testing.T)
	approval := b.approval("k1", card, practice.Second)
	cmd := exec.CommandContext(context.Background(), b.Bin+"/tagout", "--instance", b.Inst.Name(), "mcp", "--agent", "helper")
	s := agent(t, &sdk.CommandTransport{Command: cmd})
	for says, args := range map[string]map[string]any{
		"a person has to":       {"name": "k1", "purpose": hostPurpose, "card": card},
		"additional properties": {"name": "k1", "purpose": hostPurpose, "card": card, "approval": approval},
	} {
		if why := use(t, s, "kid_spawn", args, nil); !strings.Contains(why, says) {
			t.Errorf("an agent asks for the machine's network: %q, want %q", why, says)
		}
	}
	body, err := json.Marshal(wire.SpawnRequest{Name: "k1", Purpose: hostPurpose, Card: card, Approval: approval})
	if err != nil {
		t.Fatal(err)
	}
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://tagout/v1/kids", strings.NewReader(string(body)))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Tagout-Agent", "helper")
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", b.Inst.Socket(instance.Sandboxd))
	}}}
	defer client.CloseIdleConnections()
	resp, err := client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() // read whole
	var no wire.Problem
	if err := json.NewDecoder(resp.Body).Decode(&no); err != nil || resp.StatusCode != http.StatusForbidden || no.Reason != reason.RoleMissing {
		t.Errorf("an agent with an approval: %d %+v %v", resp.StatusCode, no, err)
	}
	// The control: the same request, in nobody's name but root's.
	if _, err := b.try("k1", card, approval); err != nil {
		t.Errorf("a person with that approval: %v", err)
	}
	b.Destroy("k1")
}

// approvesByCommand goes the operator's way.
func (b *hostBox) approvesByCommand(card string) {
	t := b.T
	file, note := filepath.Join(b.dir, "card.yaml"), filepath.Join(b.dir, "approval")
	if err := os.WriteFile(file, []byte(card), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := b.Tagout("spawn", file, "--name", "k3"); r.Code != 3 || !strings.Contains(r.Stderr, "tagout approve") || !strings.Contains(r.Stderr, practice.Second) {
		t.Errorf("without an approval: %+v", r)
	}
	said := b.Must("approve", file, "--name", "k3", "--key", b.KeyFile(practice.Second))
	if err := os.WriteFile(note, []byte(said), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := b.Tagout("order", note); r.Code != 2 || !strings.Contains(r.Stderr, "--approval") {
		t.Errorf("delivered as an order: %+v", r)
	}
	if out := b.Must("spawn", file, "--approval", note); out != "k3\n" {
		t.Errorf("with an approval: %q", out)
	}
	for _, args := range [][]string{{"list"}, {"status"}, {"doctor"}} {
		if r := b.Tagout(args...); !strings.Contains(r.Stdout, "machine's") || !strings.Contains(r.Stdout, practice.Second) {
			t.Errorf("tagout %v does not show the kid and who approved it:\n%s", args, r.Stdout)
		}
	}
	b.Destroy("k3")
	if r := b.Tagout("status"); strings.Contains(r.Stdout, "machine's network") {
		t.Errorf("status after it is gone:\n%s", r.Stdout)
	}
}

// TestAKidOnTheMachinesNetwork sees the machine's interfaces, reaches what its card names and nothing else, takes none of the
// machine's ports, and every stop falls on it, the network layer by itself too.
func TestAKidOnTheMachinesNetwork(t *testing.T) {
	t.Parallel()
	var served netip.AddrPort
	b := newHostBox(t, func(c *config.Box) { served = freePort(t); c.API.Listen = served })
	open, shut := echoes(t), echoes(t)
	if _, err := b.try("k0", hostCard(served), ""); err == nil || !strings.Contains(err.Error(), "Tagout itself serves") {
		t.Errorf("the API in reach: %v", err)
	}
	card := hostCard(b.sink, open)
	kid := b.spawn("k1", card)
	if out := b.Sh(kid.Name, "cat /proc/net/dev; cat /etc/resolv.conf"); !strings.Contains(out.Stdout, b.Net.Link()) || strings.Contains(out.Stdout, "nameserver") {
		t.Errorf("it sees %+v", out)
	}
	for to, want := range map[netip.AddrPort]reason.Code{
		open: reason.OK, b.sink: reason.OK,
		shut: reason.NotInReach, served: reason.NotInReach,
		netip.AddrPortFrom(b.sink.Addr(), 7001):                               reason.NotInReach,
		netip.AddrPortFrom(b.Inst.Gateway(), 53):                              reason.HostAddress,
		netip.AddrPortFrom(netip.MustParseAddr("169.254.169.254"), 80):        reason.Metadata,
		netip.AddrPortFrom(netip.MustParseAddr("203.0.113.255"), open.Port()): reason.NotInReach,
	} {
		out := b.Exec(kid.Name, "/bin/bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d", to.Addr(), to.Port()))
		if (out.Exit.Code == 0) != (want == reason.OK) {
			t.Errorf("connecting to %v: %+v, want %v", to, out, want)
		}
		if want != reason.OK {
			b.WaitRecord(fmt.Sprint("the refused ", to), func(r *audit.Record) bool {
				return r.Event == audit.EventConnectDenied && r.Kid == kid.Name && r.Reason == want && r.Dst != nil && r.Dst.Addr == to.Addr() && r.Dst.Port == to.Port()
			})
		}
	}
	for what, line := range map[string]string{
		"taking a port":            "socket.socket().bind(('', 18999))",
		"taking any port":          "socket.socket().bind(('127.0.0.1', 0))",
		"listening without a name": "socket.socket().listen()",
		"UDP":                      "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
		"raw sockets":              "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
		"packet sockets":           "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
		"the kernel's events":      "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15)",
		"others' sockets":          "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4)",
		"a local socket":           "socket.socket(socket.AF_UNIX)",
		"a pair of datagrams":      "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
		"a mark of its own":        "socket.socket().setsockopt(socket.SOL_SOCKET, 36, 7)",
		"the machine's settings":   "open('/proc/sys/net/ipv4/ip_forward', 'w')",
		"a tap device":             "open('/dev/net/tun', 'r+')",
	} {
		out := b.Exec(kid.Name, "/usr/bin/python3", "-c", "import socket\n"+line)
		if out.Exit.Code != 1 || !strings.Contains(out.Stderr, "not permitted") && !strings.Contains(out.Stderr, "Permission denied") && !strings.Contains(out.Stderr, "Read-only") && !strings.Contains(out.Stderr, "No such file") {
			t.Errorf("%s: %+v", what, out)
		}
	}
	if out := b.Exec(kid.Name, "/usr/bin/python3", "-c", "import socket; socket.socketpair(); print(socket.if_nameindex())"); !strings.Contains(out.Stdout, b.Net.Link()) {
		t.Errorf("what it may: %+v", out)
	}
	if _, err := grant(t, b.Box, kid.Name, wire.GrantRequest{Host: "files.vendor.test", Port: 80, For: time.Minute}); err == nil {
		t.Error("something was granted to it")
	}
	b.Kill9(instance.Sandboxd)
	b.WaitHealthy(instance.Sandboxd)
	b.cut(kid, wire.LayerNetwork)
	b.cut(b.spawn("k2", card), wire.AllLayers()...)
}

// echoes is a server on the machine's own loopback that says nothing.
func echoes(t *testing.T) netip.AddrPort {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return netip.MustParseAddrPort(l.Addr().String())
}

// cut stops a kid that uploads by these layers, and sees from outside that no byte comes after the stop.
func (b *hostBox) cut(kid wire.Kid, layers ...wire.Layer) {
	b.T.Helper()
	ended := make(chan string, 1)
	go func() {
		out, err := b.TryExec(context.Background(), kid.Name, wire.ExecRequest{Argv: []string{"/bin/bash", "-c",
			fmt.Sprintf("exec 3<>/dev/tcp/%s/%d && echo bulk %s >&3 && exec cat /dev/zero >&3", b.sink.Addr(), b.sink.Port(), kid.Name)}})
		ended <- fmt.Sprintf("%+v %v", out, err)
	}()
	b.Until(10*time.Second, "the upload flows", func() error {
		if s := b.Net.Sink.Streams(kid.Name); len(s) != 1 || s[0].Bytes < 1<<20 {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	report := b.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, Layers: layers})
	stopped := practice.Now()
	if report.State != wire.StateObserved {
		b.T.Errorf("stopping %s by %v: %+v", kid.Name, layers, report)
	}
	how := ""
	select {
	case how = <-ended:
	case <-time.After(10 * time.Second):
		b.T.Fatalf("the upload of %s goes on after its stop by %v", kid.Name, layers)
	}
	if len(layers) == 1 && !strings.Contains(how, "abort") { // the kernel took the socket from a process that lives on
		b.T.Errorf("the upload ended with %s, want its socket destroyed", how)
	}
	if last := b.Net.Sink.LastByte(kid.Name); last == 0 || last > stopped {
		b.T.Errorf("the last byte of %s came %v after its stop was observed", kid.Name, last-stopped)
	}
	b.Release(report.Stop)
	b.Destroy(kid.Name)
}

// TestContainmentOnTheMachinesNetwork: of all the attempts of package contain one reaches what it is after: the kernel lists
// the machine's local sockets to whoever lives on its network (docs/kids.md). None of them can be called.
func TestContainmentOnTheMachinesNetwork(t *testing.T) {
	t.Parallel()
	b := newHostBox(t, nil)
	kid, neighbour := b.spawn("k1", hostCard()), b.Spawn(bareCard, nil)
	target := contain.Target{
		Dir: "/workspace", Marker: filepath.Join(b.dir, "marker"), PID: os.Getpid(), File: "/etc/hostname",
		Socket: filepath.Join(b.dir, "socket"), Abstract: "tagout-" + b.Inst.Name(), Env: "TAGOUT_NOBODY=1", Disk: "/dev/none",
	}
	var err error
	if target.Host, err = os.Hostname(); err == nil {
		err = os.WriteFile(target.Marker, []byte("outside\n"), 0o644)
	}
	var pids []int
	if err == nil {
		pids, err = cgroup.Procs(neighbour.Cgroup)
	}
	if err != nil || len(pids) == 0 {
		t.Fatal(pids, err)
	}
	target.Neighbour = pids[0]
	for _, addr := range []string{target.Socket, "@" + target.Abstract} {
		l, err := net.Listen("unix", addr)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	raw, err := json.Marshal(target)
	if err != nil {
		t.Fatal(err)
	}
	out, err := b.TryExec(t.Context(), kid.Name, wire.ExecRequest{Argv: []string{"/workspace/tagout", "contain", "inside"}, Env: map[string]string{"TAGOUT_CONTAIN": string(raw)}})
	var results []contain.Result
	if err := errors.Join(err, json.Unmarshal([]byte(out.Stdout), &results)); err != nil || len(results) < 40 {
		t.Fatalf("%d results, %v: %+v", len(results), err, out)
	}
	if reached := contain.Reached(results); reached != "abstract unix sockets: see the sockets of others" {
		t.Errorf("it reached %q", reached)
	}
	if conn, err := net.Dial("unix", "@"+target.Abstract); err != nil {
		t.Errorf("the control, from outside: %v", err)
	} else {
		conn.Close()
	}
}
