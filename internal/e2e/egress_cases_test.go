package e2e

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/testenv"
	"tagout/internal/wire"
)

//go:embed testdata/attack.py
var attackPy string

// Servers of this file beside the practice internet's own, all on the address of its file server.
const (
	portWeb   = 8081 // plain.vendor.test: notes every request that arrives
	portEcho  = 7100 // echo.vendor.test: sends back what it gets, and closes when the other side does
	portSlow  = 7101 // slow.vendor.test: reads nothing until it is let
	portMany  = 7102 // many.vendor.test: sends manyBytes
	portSSH   = 22   // echoes too: an allowed name's port that the card has not
	portLong  = 7104 // long.vendor.test: sends longBytes, as slowly as it is told
	portNaive = 7103 // naive.vendor.test: relays to the slow one, without half-closes
)

// manyBytes stands for the 10 GB of E26, which `make soak-egress` has; it fits into no buffer on the way.
const manyBytes = 64 << 20

// casesCard allows what the cases call allowed. svc.own.test is TLS that nobody looks into.
const casesCard = `apiVersion: tagout/v1
kind: Card
name: cases
task: Every way around the card.
image: host
egress:
  allow:
    - {host: api.vendor.test, ports: [443], protocol: tls, inspect: true, methods: [GET], paths: ["/v1/*"]}
    - {host: svc.own.test, ports: [443], protocol: tls}
    - {host: plain.vendor.test, ports: [8081], protocol: http, methods: [GET], paths: ["/v1/*"]}
    - {host: files.vendor.test, ports: [80], protocol: http}
    - {host: echo.vendor.test, ports: [7100], protocol: tcp}
    - {host: slow.vendor.test, ports: [7101], protocol: tcp}
    - {host: many.vendor.test, ports: [7102], protocol: tcp}
    - {host: long.vendor.test, ports: [7104], protocol: tcp}
    - {host: naive.vendor.test, ports: [7103], protocol: tcp}
    - {host: "*.turn.test", ports: [7100], protocol: tcp}
    - {host: granted.test, ports: [7100], protocol: tcp, addresses: [PRIVATE]}
    - {host: bücher.vendor.test, ports: [443], protocol: tls}
    - {host: intranet, ports: [443], protocol: tls}
limits: {pids: 128, memory: 512MiB, cpus: 1, openFiles: 16384}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// uncheckedCard allows two of the same servers as plain TCP, where nobody looks at what is said, and what casesCard
// does not have at all. It shows what would come of an attack without the check that stops it.
const uncheckedCard = `apiVersion: tagout/v1
kind: Card
name: unchecked
task: The same without the checks.
image: host
egress:
  allow:
    - {host: svc.own.test, ports: [443], protocol: tcp}
    - {host: plain.vendor.test, ports: [8081], protocol: tcp}
    - {host: api.vendor.test, ports: [22], protocol: tcp}
    - {host: elsewhere.test, ports: [7100], protocol: tcp}
    - {host: mirror.evil.test, ports: [80], protocol: http}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// cases is what the egress cases share: one box, one kid, and servers that see what arrives.
type cases struct {
	t   *testing.T
	box *testenv.Box
	kid wire.Kid
	web *webLog

	unchecked wire.Kid

	read *sync.Cond // let, guarded by its lock: the slow server may read
	let  *bool
	slow *atomic.Int64 // bytes that the slow server got
}

// TestEgressCases walks the field cases E01 to E26 in the practice internet, each from inside a real kid. What
// shows that a case would fail without its protection is named beside it, or is the control that runs after it.
func TestEgressCases(t *testing.T) {
	t.Parallel()
	c := startCases(t)
	for _, tc := range []struct {
		id  string
		run func(*cases)
		off func(*cases) // the same with the protection off; nil where run shows that itself
	}{
		{"E01", (*cases).dataInNames, (*cases).dataLeaves},
		{"E02", (*cases).emptyAllowlist, (*cases).anyNameAnswered},
		{"E03", (*cases).otherResolvers, (*cases).otherResolversHeard},
		{"E04", (*cases).randomToResolver, (*cases).randomArrives},
		{"E05", (*cases).oddQueries, (*cases).oddQueriesAnswered},
		{"E06", (*cases).otherTypes, (*cases).otherTypesAnswered},
		{"E07", (*cases).namesInDisguise, (*cases).anySpellingAnswered},
		{"E08", (*cases).singleLabels, (*cases).singleLabelsAnswered},
		{"E09", (*cases).privateAnswers, nil},
		{"E10", (*cases).answersThatChange, (*cases).firstAddressOnly},
		{"E11", (*cases).splitHello, (*cases).splitHelloUnread},
		{"E12", (*cases).namesThatDisagree, nil},
		{"E13", (*cases).badHellos, nil},
		{"E14", (*cases).ambiguousHTTP, nil},
		{"E15", (*cases).connectElsewhere, (*cases).connectAllowed},
		{"E16", (*cases).almostTheName, (*cases).almostTheNameAnswered},
		{"E17", (*cases).addressesInDisguise, (*cases).disguisesWork},
		{"E18", (*cases).methodsAndPaths, nil},
		{"E19", (*cases).denyWins, nil},
		{"E20", (*cases).badCards, nil},
		{"E21", (*cases).deniedRedirect, (*cases).redirectFollowed},
		{"E22", (*cases).otherProtocols, (*cases).socketsOpen},
		{"E22, fragments", (*cases).fragments, nil},
		{"E23", (*cases).theBoxItself, (*cases).socketsAnswer},
		{"E24", (*cases).featureMissing, (*cases).nothingMissing},
		{"E26", (*cases).countsAndHalfClose, (*cases).naiveRelay},
		{"E26, long", (*cases).longTransfer, nil},
		{"E25", (*cases).tenThousandConnections, nil},
		{"E25, lookups", (*cases).manyLookups, nil},
	} {
		t.Run(tc.id, func(t *testing.T) { tc.run(c.on(t)) })
		if tc.off != nil {
			c.control(t, tc.id, tc.off)
		}
	}
	if contacts := c.fromKids(); len(contacts) != 0 {
		t.Errorf("the attacker was reached: %+v", contacts)
	}
	c.control(t, "E03, E04, E22 and E23", (*cases).wallsDown)
}

func startCases(t *testing.T) *cases {
	t.Helper()
	var mu sync.Mutex
	c := &cases{t: t, box: testenv.Start(t), web: &webLog{}, read: sync.NewCond(&mu), let: new(bool), slow: &atomic.Int64{}}
	at := c.box.Net.FilesAddr()
	for _, name := range []string{"plain.vendor.test", "echo.vendor.test", "slow.vendor.test", "many.vendor.test", "long.vendor.test", "naive.vendor.test", "elsewhere.test", "intranet"} {
		c.box.Net.DNS.SetHost(name, at)
	}
	web := &http.Server{Handler: c.web}
	go web.Serve(c.listen(at, portWeb))
	t.Cleanup(func() { web.Close() })
	c.serve(at, portEcho, echo)
	c.serve(c.box.Net.APIAddr(), portSSH, echo)
	c.serve(at, portNaive, c.serveNaive)
	c.serve(at, portMany, func(conn *net.TCPConn) { conn.Write(make([]byte, manyBytes)); conn.CloseWrite() })
	c.serve(at, portLong, sendLong)
	c.serve(at, portSlow, func(conn *net.TCPConn) {
		c.read.L.Lock()
		for !*c.let {
			c.read.Wait()
		}
		c.read.L.Unlock()
		n, _ := io.Copy(io.Discard, conn)
		c.slow.Add(n)
		fmt.Fprint(conn, n)
	})
	t.Cleanup(c.letRead)
	c.kid, c.unchecked = c.box.Spawn(c.card(), nil), c.box.Spawn(uncheckedCard, nil)
	return c
}

// card is casesCard for this box.
func (c *cases) card() string { return strings.Replace(casesCard, "PRIVATE", c.private(), 1) }

// on returns c for a subtest: what fails, fails there.
func (c *cases) on(t *testing.T) *cases {
	sub, box := *c, *c.box
	box.T, sub.t, sub.box = t, t, &box
	return &sub
}

func (c *cases) letRead() {
	c.read.L.Lock()
	defer c.read.L.Unlock()
	*c.let = true
	c.read.Broadcast()
}

func echo(conn *net.TCPConn) {
	io.Copy(conn, conn)
	conn.CloseWrite()
}

// listen listens on one address inside the practice internet, and on no other: what is dead in a case must be.
func (c *cases) listen(at netip.Addr, port uint16) net.Listener {
	c.t.Helper()
	var l net.Listener
	err := c.box.Net.Do(func() error {
		var err error
		l, err = net.Listen("tcp4", netip.AddrPortFrom(at, port).String())
		return err
	})
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { l.Close() })
	return l
}

func (c *cases) serve(at netip.Addr, port uint16, answer func(*net.TCPConn)) {
	c.t.Helper()
	l := c.listen(at, port)
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				answer(conn.(*net.TCPConn))
			}()
		}
	}()
}

// webLog is plain.vendor.test. It answers everything that arrives, so that what arrives is what was let through.
type webLog struct {
	mu   sync.Mutex
	seen []string // "METHOD host path"
}

func (w *webLog) ServeHTTP(rw http.ResponseWriter, r *http.Request) {
	w.mu.Lock()
	w.seen = append(w.seen, r.Method+" "+r.Host+" "+r.RequestURI)
	w.mu.Unlock()
	if r.URL.Path == "/v1/second-half" {
		http.Redirect(rw, r, "http://mirror.evil.test/second-half", http.StatusFound)
		return
	}
	io.WriteString(rw, "arrived\n")
}

// take returns what arrived since it was last called.
func (w *webLog) take() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	out := w.seen
	w.seen = nil
	return out
}

// step is one thing that attack.py does inside the kid; the file says what each kind needs.
type step struct {
	Kind     string   `json:"kind"`
	Host     string   `json:"host,omitempty"`
	Port     int      `json:"port,omitempty"`
	Send     [][]byte `json:"send,omitempty"`
	Fill     int      `json:"fill,omitempty"`  // and so many zeros
	Shut     bool     `json:"shut,omitempty"`  // half-close after sending
	Until    []byte   `json:"until,omitempty"` // read no further than this
	Any      bool     `json:"any,omitempty"`   // read no further than the first bytes
	Drop     bool     `json:"drop,omitempty"`  // count only
	SNI      string   `json:"sni,omitempty"`
	ALPN     []string `json:"alpn,omitempty"`
	Records  int      `json:"records,omitempty"`
	Segments int      `json:"segments,omitempty"`
	Family   int      `json:"family"`
	Type     int      `json:"type"`
	Proto    int      `json:"proto"`
	Count    int      `json:"count,omitempty"`
	Wave     int      `json:"wave,omitempty"` // how many of them at once
}

// outcome is what came of a step.
type outcome struct {
	Error   string   `json:"error"` // errno by name, "timeout", "no such name", "TLS: …"; "" where it got through
	Cut     string   `json:"cut"`   // sending broke off
	End     string   `json:"end"`   // how reading ended: "eof", "found", errno
	Data    []byte   `json:"data"`
	Size    int64    `json:"size"`
	Addrs   []string `json:"addrs"`
	ALPN    string   `json:"alpn"`
	Served  int      `json:"served"`
	Refused int      `json:"refused"`
	Silent  int      `json:"silent"`
	Took    float64  `json:"took"` // seconds
}

// attack walks the steps inside the kid and returns an outcome each. One that took as long as attack.py is
// patient fails the test: a refusal comes at once, or it is no refusal.
func (c *cases) attack(kid string, steps ...step) []outcome {
	c.t.Helper()
	out, err := c.tryAttack(kid, steps...)
	if err != nil {
		c.t.Fatal(err)
	}
	for i, o := range out {
		if o.Error == "timeout" || o.End == "timeout" || o.Error == "ETIMEDOUT" {
			c.t.Errorf("step %d, %s to %s port %d, hung: %+v", i, steps[i].Kind, steps[i].Host, steps[i].Port, o)
		}
	}
	return out
}

func (c *cases) tryAttack(kid string, steps ...step) ([]outcome, error) {
	in, err := json.Marshal(steps)
	if err != nil {
		return nil, err
	}
	got, err := c.box.TryExec(context.Background(), kid, wire.ExecRequest{Argv: []string{"/usr/bin/python3", "-c", attackPy}, Stdin: in})
	if err != nil {
		return nil, err
	}
	out, err := outcomes(strings.NewReader(got.Stdout), len(steps))
	if err != nil {
		err = fmt.Errorf("%w: %s", err, got.Stderr)
	}
	return out, err
}

// outcomes reads what attack.py printed about n steps.
func outcomes(r io.Reader, n int) ([]outcome, error) {
	var out []outcome
	for dec := json.NewDecoder(r); len(out) < n; {
		var o outcome
		if err := dec.Decode(&o); err != nil {
			return nil, fmt.Errorf("the attack broke off at step %d: %w", len(out), err)
		}
		out = append(out, o)
	}
	return out, nil
}

// passesUnchecked shows that raw, which was refused, reaches the server where nobody looks at it.
func (c *cases) passesUnchecked(what, host string, port int, raw []byte) {
	c.t.Helper()
	c.attack(c.unchecked.Name, step{Kind: "tcp", Host: host, Port: port, Send: [][]byte{raw}, Shut: true})
	c.box.WaitRecord(what+", unchecked", func(r *audit.Record) bool {
		return r.Session == c.unchecked.Session && r.Event == audit.EventConnClosed && named(host)(r) && r.Bytes != nil && r.Bytes.Up == int64(len(raw))
	})
}

// proxied is a request to the explicit proxy.
func (c *cases) proxied(raw string) step {
	return step{Kind: "tcp", Host: c.gateway(), Port: instance.PortExplicit, Send: [][]byte{[]byte(raw)}}
}

func (c *cases) gateway() string { return c.box.Inst.Gateway().String() }

// wantProblem checks that answer is a 403 with a machine-readable body that gives the code.
func (c *cases) wantProblem(what string, o outcome, code reason.Code) {
	c.t.Helper()
	head, body, _ := bytes.Cut(o.Data, []byte("\r\n\r\n"))
	var p struct {
		Status int         `json:"status"`
		Reason reason.Code `json:"reason"`
		Detail string      `json:"detail"`
	}
	err := json.NewDecoder(bytes.NewReader(body)).Decode(&p)
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 403 ")) || !bytes.Contains(head, []byte("application/problem+json")) ||
		err != nil || p.Status != 403 || p.Reason != code || p.Detail == "" {
		c.t.Errorf("%s: want a problem that says %v, got %v %+v (%v): %q", what, code, o.Error, p, err, o.Data)
	}
}

// denied returns the session's denials so far that match.
func (c *cases) denied(kid wire.Kid, match func(*audit.Record) bool) []audit.Record {
	c.t.Helper()
	return c.box.Records(func(r *audit.Record) bool {
		return r.Session == kid.Session && r.Outcome == audit.OutcomeDeny && match(r)
	})
}

// waitDenied waits until denials that match stand for n attempts, and returns them. More than n fail the test.
func (c *cases) waitDenied(what string, kid wire.Kid, n uint64, match func(*audit.Record) bool) []audit.Record {
	c.t.Helper()
	var found []audit.Record
	sum := func() (n uint64) {
		found = c.denied(kid, match)
		for _, r := range found {
			n += max(r.Count, 1)
		}
		return n
	}
	c.box.Until(soon, fmt.Sprintf("%s is recorded %d times", what, n), func() error {
		if got := sum(); got < n {
			return fmt.Errorf("%d times", got)
		}
		return nil
	})
	if got := sum(); got != n {
		c.t.Errorf("%s is recorded %d times, want %d: %+v", what, got, n, found)
	}
	return found
}

func code(want reason.Code) func(*audit.Record) bool {
	return func(r *audit.Record) bool { return r.Reason == want }
}

// to matches denials of one destination by its address.
func to(addr string, port uint16) func(*audit.Record) bool {
	a := netip.MustParseAddr(addr)
	return func(r *audit.Record) bool { return r.Dst != nil && r.Dst.Addr == a && r.Dst.Port == port }
}

// named matches denials by the name in question.
func named(name string) func(*audit.Record) bool {
	return func(r *audit.Record) bool { return r.Dst != nil && r.Dst.Name == name }
}
