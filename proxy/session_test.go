package proxy

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// openAll opens one live connection of every kind to an echoing or waiting server.
func openAll(w *world) (conns []net.Conn, rules []policy.Rule) {
	t := w.t
	tcp := listen(t, serverAddr, 0, echo)
	tlsAt := w.tlsServer(echo, apiHost)
	gone := make(chan struct{})
	t.Cleanup(func() { close(gone) })
	waiting := http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		fmt.Fprint(rw, "first")
		http.NewResponseController(rw).Flush()
		select {
		case <-r.Context().Done():
		case <-gone:
		}
	})
	plain, inspected := w.web(waiting), w.web(waiting, apiHost)
	secret := rule(apiHost, inspected.Port(), policy.TLS)
	secret.Inspect = true
	rules = []policy.Rule{
		rule(apiHost, tcp.Port(), policy.TCP), rule(apiHost, tlsAt.Port(), policy.TLS),
		rule(apiHost, plain.Port(), policy.HTTP), secret,
	}
	w.allow(rules...)

	raw := w.dialName(apiHost, tcp.Port())
	io.WriteString(raw, "x")
	io.ReadFull(raw, make([]byte, 1))
	tunnel, head := w.connect(fmt.Sprintf("%s:%d", apiHost, tlsAt.Port()))
	if !strings.Contains(head, " 200 ") {
		t.Fatal(head)
	}
	must(t, tls.Client(tunnel, &tls.Config{ServerName: apiHost, RootCAs: w.vendor.pool()}).Handshake())
	web := w.dialName(apiHost, plain.Port())
	io.WriteString(web, get(apiHost, "/"))
	readHead(t, web)
	deepRaw := w.dialName(apiHost, inspected.Port())
	deep := w.inspectedConn(deepRaw)
	io.WriteString(deep, get(apiHost, "/"))
	readHead(t, deep)
	return []net.Conn{raw, tunnel, web, deepRaw}, rules
}

// wantCut reads to the end, which must be a reset.
func wantCut(t testing.TB, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: want a reset, got %v", c.LocalAddr(), err)
	}
}

func TestRemoveCutsEverythingBeforeItReturns(t *testing.T) {
	w := newWorld(t)
	conns, _ := openAll(w)
	if n := w.proxy.Remove("kid1"); n != len(conns) {
		t.Errorf("cut %d connections of %d", n, len(conns))
	}
	for _, c := range conns {
		wantCut(t, c)
		port := c.LocalAddr().(*net.TCPAddr).Port
		rec := w.records.wait(t, "the cut", func(r audit.Record) bool {
			return r.Event == audit.EventConnClosed && r.Process.PID == port
		})
		if rec.Reason != reason.Stopped {
			t.Errorf("reason %v", rec.Reason)
		}
	}
	if n := w.proxy.Remove("kid1"); n != 0 {
		t.Errorf("removing again cut %d", n)
	}
	if c, err := w.tryDial(kidAddr, w.explicit); err == nil {
		wantReset(t, c)
	}
	w.wantRefused(reason.UnknownSession)
}

// A newer policy cuts what it does not allow any more and leaves the rest alone.
func TestNewerPolicyCutsOnlyWhatItForbids(t *testing.T) {
	w := newWorld(t)
	conns, rules := openAll(w)
	w.allow(rules...) // the same again
	kept := rules[0]
	other := rules[1]
	other.Inspect = true // same host and port, spoken in another way
	w.allow(kept, other)
	for _, c := range conns[1:] {
		wantCut(t, c)
	}
	io.WriteString(conns[0], "y")
	_, err := io.ReadFull(conns[0], make([]byte, 1))
	must(t, err)
	// The address of the live connection loses its grant.
	kept.Addresses = []netip.Prefix{netip.MustParsePrefix("127.0.3.0/24")}
	w.allow(kept)
	wantCut(t, conns[0])
	rec := w.records.wait(t, "the cut", func(r audit.Record) bool {
		return r.Event == audit.EventConnClosed && r.Reason == reason.PolicyChanged && r.Conn != ""
	})
	if rec.Outcome != audit.OutcomeOK {
		t.Errorf("outcome %v", rec.Outcome)
	}
}

func TestOlderAndBrokenPolicies(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	live := w.dialName(apiHost, at.Port())
	io.WriteString(live, "x")
	io.ReadFull(live, make([]byte, 1))

	old := w.session()
	old.Generation = 0
	if _, err := w.proxy.Put(old); !errors.Is(err, ErrStale) {
		t.Errorf("an older policy: %v", err)
	}
	io.WriteString(live, "x") // still alive
	_, err := io.ReadFull(live, make([]byte, 1))
	must(t, err)

	broken := w.session(policy.Rule{Host: "*", Ports: []uint16{0}, Protocol: "x"})
	if _, err := w.proxy.Put(broken); err == nil {
		t.Error("a policy that does not compile was accepted")
	}
	w.records.wait(t, "the unreadable policy", event(audit.EventPolicyLoaded, audit.OutcomeFail))
	io.WriteString(live, "x") // the old one is in force, and what lives on it lives
	_, err = io.ReadFull(live, make([]byte, 1))
	must(t, err)
	c := w.dialName(apiHost, at.Port())
	io.WriteString(c, "x")
	_, err = io.ReadFull(c, make([]byte, 1))
	must(t, err)
}

// A session whose first policy cannot be read has no rights at all.
func TestBrokenFirstPolicyDeniesEverything(t *testing.T) {
	w := newWorld(t)
	if _, err := w.proxy.Put(w.session(policy.Rule{Host: "*", Ports: []uint16{0}, Protocol: "x"})); err == nil {
		t.Fatal("a policy that does not compile was accepted")
	}
	if c, err := w.tryDial(kidAddr, w.explicit); err == nil {
		wantReset(t, c)
	}
	w.wantRefused(reason.UnknownSession)
}

func TestAnotherSessionOnTheSameAddressTakesOver(t *testing.T) {
	w := newWorld(t)
	conns, rules := openAll(w)
	next := w.session(rules...)
	next.ID, next.Kid = "01OTHER", "kid2"
	_, err := w.proxy.Put(next)
	must(t, err)
	for _, c := range conns {
		wantCut(t, c)
	}
	if got := w.proxy.sessions.find(kidAddr).doc.Kid; got != "kid2" {
		t.Errorf("the address belongs to %s", got)
	}
	foreign := w.session()
	w.proxy.cfg.OwnsMark = func(uint32) bool { return false }
	if _, err := w.proxy.Put(foreign); err == nil {
		t.Error("a foreign mark was accepted")
	}
}

func TestLoadTakesWhatIsWholeAndDeniesTheRest(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	store := session.NewStore(dir)
	must(t, store.Put(w.session(rule(apiHost, 443, policy.TCP)), os.Getgid()))
	must(t, os.WriteFile(filepath.Join(dir, "torn.json"), []byte(`{"version":1,"kid":"to`), 0o600))
	if err := w.proxy.Load(store); err == nil || !strings.Contains(err.Error(), "torn") {
		t.Errorf("loading a torn document: %v", err)
	}
	if w.proxy.sessions.find(kidAddr) == nil {
		t.Error("the whole document was not loaded")
	}
}

func TestCapPerSession(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.ConnsPerSession = 2 })
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	var live []net.Conn
	for range 2 {
		c := w.dialName(apiHost, at.Port())
		io.WriteString(c, "x")
		_, err := io.ReadFull(c, make([]byte, 1))
		must(t, err)
		live = append(live, c)
	}
	if c, err := w.tryDial(kidAddr, w.transparent); err == nil {
		wantReset(t, c)
	}
	w.wantRefused(reason.Capacity)
	live[0].Close()
	w.records.wait(t, "the end of one", event(audit.EventConnClosed, audit.OutcomeOK))
	waitUntil(t, "room for another", func() bool { return len(w.proxy.sessions.find(kidAddr).live()) < 2 })
	c := w.dialName(apiHost, at.Port())
	io.WriteString(c, "x")
	_, err := io.ReadFull(c, make([]byte, 1))
	must(t, err)
}

func waitUntil(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// E26, with an idle limit that a test can wait for.
func TestIdleConnectionsEnd(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.Idle = 120 * time.Millisecond })
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	busy, idle := w.dialName(apiHost, at.Port()), w.dialName(apiHost, at.Port())
	for _, c := range []net.Conn{busy, idle} {
		io.WriteString(c, "x")
		_, err := io.ReadFull(c, make([]byte, 1))
		must(t, err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := idle.Read(make([]byte, 1))
		done <- err
	}()
	for {
		io.WriteString(busy, "x")
		_, err := io.ReadFull(busy, make([]byte, 1))
		must(t, err)
		select {
		case err := <-done:
			if !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the idle one ended with %v", err)
			}
			w.records.wait(t, "the idle end", func(r audit.Record) bool { return r.Event == audit.EventConnClosed && r.Reason == reason.Idle })
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func TestLongConnectionsTellInterimCounts(t *testing.T) {
	w := newWorld(t, func(c *Config) { c.Limits.Progress = 50 * time.Millisecond })
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	c := w.dialName(apiHost, at.Port())
	io.WriteString(c, "12345")
	_, err := io.ReadFull(c, make([]byte, 5))
	must(t, err)
	rec := w.records.wait(t, "progress", event(audit.EventConnProgress, audit.OutcomeOK))
	if *rec.Bytes != (audit.Bytes{Up: 5, Down: 5}) {
		t.Errorf("counted %+v", rec.Bytes)
	}
}

// E26: interim counts keep their interval over the whole time, however late the reaper looks.
func TestInterimCountsKeepTheirPace(t *testing.T) {
	// The reaper itself looks every 15 minutes; the kernel's clock of idleness does not jump with ours.
	w := newWorld(t, func(c *Config) { c.Limits.Progress, c.Limits.Idle = time.Hour, 1000*time.Hour })
	at := listen(t, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	k := w.dialName(apiHost, at.Port())
	io.WriteString(k, "1")
	_, err := io.ReadFull(k, make([]byte, 1))
	must(t, err)
	c := w.proxy.sessions.all()[0].live()[0]
	const hours = 100
	for look := 7 * time.Minute; look < hours*time.Hour; look += 16 * time.Minute {
		c.tend(c.start.Add(look))
	}
	n := 0
	for _, r := range w.records.all() {
		if r.Event == audit.EventConnProgress {
			n++
		}
	}
	if n != hours-1 {
		t.Errorf("%d records in %d hours", n, hours)
	}
}

// E26: a reader that does not read stops the sender, and the bytes that arrive are the bytes that are counted.
func TestSlowReaderAndExactCount(t *testing.T) {
	w := newWorld(t)
	const size = 64 << 20
	start := make(chan struct{})
	got := make(chan int64, 1)
	at := listen(t, serverAddr, 0, func(c net.Conn) {
		<-start
		n, _ := io.Copy(io.Discard, c)
		got <- n
	})
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	c := w.dialName(apiHost, at.Port())
	c.SetDeadline(time.Time{})
	var sent atomic.Int64
	go func() {
		buf := make([]byte, 64<<10)
		for sent.Load() < size {
			n, err := c.Write(buf)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
		c.CloseWrite()
	}()
	stable, last := 0, int64(-1)
	waitUntil(t, "the sender stands still", func() bool {
		now := sent.Load()
		if now == last && now > 0 {
			stable++
		} else {
			stable, last = 0, now
		}
		return stable > 20
	})
	if last >= size {
		t.Error("the proxy swallowed everything while nobody read")
	}
	close(start)
	if n := <-got; n != size {
		t.Errorf("%d bytes arrived", n)
	}
	rec := w.records.wait(t, "the end", event(audit.EventConnClosed, audit.OutcomeOK))
	if rec.Bytes.Up != size {
		t.Errorf("counted %+v", rec.Bytes)
	}
}

func TestShutdownEndsEveryConnectionWithARecord(t *testing.T) {
	w := newWorld(t)
	conns, _ := openAll(w)
	w.stop()
	for _, c := range conns {
		wantCut(t, c)
	}
	n := 0
	for _, r := range w.records.all() {
		if r.Event == audit.EventConnClosed {
			n++
		}
	}
	if n != len(conns) {
		t.Errorf("%d records of %d connections when Serve had returned", n, len(conns))
	}
}

// The accept loop survives running out of descriptors, and says so. The limit is the process's, so nothing runs beside it.
func TestAcceptSurvivesEMFILE(t *testing.T) {
	failed := make(chan struct{}, 64)
	w := newWorld(t, func(c *Config) { c.Metrics = &acceptWatch{Metrics: c.Metrics, failed: failed} })
	w.allow(rule(apiHost, 443, policy.TCP))
	free := fillDescriptors(t)
	free(1) // for the client's socket; none is left for the proxy's
	c, err := w.tryDial(kidAddr, w.explicit)
	must(t, err)
	select {
	case <-failed:
	case <-time.After(patience):
		t.Fatal("accept did not fail: the test does not test anything")
	}
	free(math.MaxInt)
	fmt.Fprintf(c, "CONNECT evil.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")
	if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 403 ") {
		t.Error(head)
	}
	var said []string
	for _, r := range w.records.all() {
		if r.Event == audit.EventStarved && strings.Contains(r.Detail, w.explicit.String()) { // the other listener may have looked, too
			said = append(said, r.Outcome)
		}
	}
	if want := []string{audit.OutcomeFail, audit.OutcomeOK}; !slices.Equal(said, want) {
		t.Errorf("recorded %v, want %v", said, want)
	}
}

// A server that cannot be dialled for want of a descriptor is not what failed.
func TestDialWithoutDescriptors(t *testing.T) {
	w := newWorld(t)
	w.allow(rule(apiHost, 443, policy.TCP))
	free := fillDescriptors(t)
	free(2) // for both ends of the kid's connection
	c, err := w.tryDial(kidAddr, w.explicit)
	must(t, err)
	fmt.Fprintf(c, "CONNECT %s:443 HTTP/1.1\r\nHost: x\r\n\r\n", apiHost)
	head := readHead(t, c)
	free(math.MaxInt)
	if !strings.HasPrefix(head, "HTTP/1.1 403 ") {
		t.Error(head)
	}
	rec := w.records.wait(t, "the refusal", func(r audit.Record) bool { return r.Event == audit.EventConnOpened })
	if rec.Reason != reason.Capacity || !strings.Contains(rec.Detail, "too many open files") {
		t.Errorf("record %+v", rec)
	}
}

// fillDescriptors takes every descriptor that this process may have. free gives up to n of them back, and with the last
// one the limit.
func fillDescriptors(t *testing.T) (free func(n int)) {
	t.Helper()
	var old unix.Rlimit
	must(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	low := old
	low.Cur = min(old.Cur, 512)
	must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &low))
	var fillers []int
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			break
		}
		fillers = append(fillers, fd)
	}
	free = func(n int) {
		for ; n > 0 && len(fillers) > 0; n-- {
			unix.Close(fillers[len(fillers)-1])
			fillers = fillers[:len(fillers)-1]
		}
		if len(fillers) == 0 {
			must(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &old))
		}
	}
	t.Cleanup(func() { free(math.MaxInt) })
	return free
}

type acceptWatch struct {
	Metrics
	failed chan struct{}
}

func (a *acceptWatch) AcceptFailed() {
	select {
	case a.failed <- struct{}{}:
	default:
	}
}

// The control socket: only root may change sessions, and the answers say what happened.
func TestControlRoutes(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	l, err := control.Listen(filepath.Join(dir, "s"), os.Getgid())
	must(t, err)
	mux := http.NewServeMux()
	w.proxy.Routes(mux)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- control.Serve(ctx, l, mux, time.Second) }()
	t.Cleanup(func() { cancel(); <-done })
	c := control.NewClient(l.Addr().String())
	defer c.CloseIdle()
	put := func(kid string, s *session.Session) (wire.Ack, error) {
		var ack wire.Ack
		err := c.Call(ctx, http.MethodPut, "/v1/sessions/"+kid, s, &ack)
		return ack, err
	}
	s := w.session(rule(apiHost, 443, policy.TCP))
	if os.Geteuid() != 0 {
		if _, err := put("kid1", s); control.Status(err) != http.StatusForbidden {
			t.Errorf("a session from uid %d: %v", os.Geteuid(), err)
		}
		return
	}
	if ack, err := put("kid1", s); err != nil || ack != (wire.Ack{Kid: "kid1", Generation: s.Generation}) {
		t.Errorf("ack %+v, %v", ack, err)
	}
	if _, err := put("kid2", s); control.Status(err) != http.StatusBadRequest {
		t.Errorf("another kid's document: %v", err)
	}
	stale := *s
	stale.Generation--
	if _, err := put("kid1", &stale); control.Status(err) != http.StatusConflict {
		t.Errorf("an older document: %v", err)
	}
	if _, err := put("kid1", w.session(policy.Rule{Host: "*"})); control.Status(err) != http.StatusUnprocessableEntity {
		t.Errorf("a policy that does not compile: %v", err)
	}
	var strange map[string]any
	raw, err := json.Marshal(s)
	must(t, err)
	must(t, json.Unmarshal(raw, &strange))
	strange["generation"], strange["deny_more"] = 99, true
	if err := c.Call(ctx, http.MethodPut, "/v1/sessions/kid1", strange, nil); control.Status(err) != http.StatusUnprocessableEntity {
		t.Errorf("a document with a field that nobody knows: %v", err)
	}
	if e := w.proxy.sessions.find(kidAddr); e == nil || e.current().generation != s.Generation {
		t.Error("an unreadable document changed what is in force")
	}
	for range 2 {
		must(t, c.Call(ctx, http.MethodDelete, "/v1/sessions/kid1", nil, nil))
	}
	if w.proxy.sessions.find(kidAddr) != nil {
		t.Error("the session is still there")
	}
}

func TestLeavesAreCachedAndBounded(t *testing.T) {
	w := newWorld(t)
	ca := w.proxy.cfg.CA
	first, err := ca.leaf(apiHost)
	must(t, err)
	if again, _ := ca.leaf(apiHost); again != first {
		t.Error("minted twice")
	}
	for i := range maxLeaves + 5 {
		_, err := ca.leaf(fmt.Sprintf("h%d.vendor.test", i))
		must(t, err)
	}
	if len(ca.leaves) != maxLeaves {
		t.Errorf("%d leaves are kept", len(ca.leaves))
	}
	if _, err := LoadCA(t.TempDir(), ""); err == nil || !strings.Contains(err.Error(), "tagout setup") {
		t.Errorf("loading a CA that is not there: %v", err)
	}
}

// A burst of connections leaves no descriptor, goroutine or entry behind.
func TestNothingLeaks(t *testing.T) {
	w := newWorld(t)
	at := listen(t, serverAddr, 0, echo)
	web := w.web(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { fmt.Fprint(rw, "ok") }), apiHost)
	secret := rule(apiHost, web.Port(), policy.TLS)
	secret.Inspect = true
	w.allow(rule(apiHost, at.Port(), policy.TCP), secret)
	use := func() {
		c := w.dialName(apiHost, at.Port())
		io.WriteString(c, "x")
		io.ReadFull(c, make([]byte, 1))
		c.Close()
		raw := w.dialName(apiHost, web.Port())
		ask(t, w.inspectedConn(raw), get(apiHost, "/"), 1)
		raw.Close()
		c, _ = w.connect("evil.test:443")
		c.Close()
	}
	use() // what is made once and kept
	quiet := func() bool { return len(w.proxy.sessions.find(kidAddr).live()) == 0 }
	waitUntil(t, "the first connections end", quiet)
	goroutines, fds := runtime.NumGoroutine(), openFiles(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				use()
			}
		})
	}
	wg.Wait()
	waitUntil(t, "all connections end", quiet)
	waitUntil(t, "descriptors and goroutines are given back", func() bool {
		return runtime.NumGoroutine() <= goroutines+10 && openFiles(t) <= fds+32 // the kernel's pipes of splice stay in a pool
	})
}

func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return len(entries)
}
