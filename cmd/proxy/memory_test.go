package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/inspectca"
	"tagout/internal/instance"
	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/testroot"
	"tagout/internal/wire"
)

const (
	vendorName = "api.vendor.test"
	token      = "tgo_abcdefghijklmnopqrstuvwxyz234567"
)

// vendor is everything that a proxy needs around it to carry secrets: a credd, a resolver and a server that shows what it
// was sent.
type vendor struct {
	at     netip.AddrPort
	dns    netip.AddrPort
	secret string
	got    chan string
	heard  chan struct{} // closed once the proxy listens for revocations
}

func newVendor(t *testing.T, inst instance.Instance, caFile string, size int) *vendor {
	t.Helper()
	raw := make([]byte, size)
	rand.Read(raw)
	v := &vendor{secret: "sk-" + hex.EncodeToString(raw), got: make(chan string, 1000), heard: make(chan struct{})}
	ca, err := inspectca.New("vendor", time.Now())
	must(t, err)
	must(t, os.WriteFile(caFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Cert.Raw}), 0o644))
	key, err := ecdsa.GenerateKey(ca.Key.Curve, rand.Reader)
	must(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: ca.Cert.SerialNumber, DNSNames: []string{vendorName}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}, ca.Cert, &key.PublicKey, ca.Key)
	must(t, err)
	l, err := net.Listen("tcp4", "127.0.2.1:0")
	must(t, err)
	v.at = l.Addr().(*net.TCPAddr).AddrPort()
	srv := &http.Server{
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body) // a short one shows
			v.got <- fmt.Sprint(r.URL, r.Header, string(body))
			w.Header().Set("X-Echo", r.Header.Get("Authorization"))
			fmt.Fprintf(w, "%s %s %s", r.URL, r.Header, body)
		}),
	}
	go srv.ServeTLS(l, "", "")
	t.Cleanup(func() { srv.Close() })
	v.serveDNS(t)
	v.serveCredd(t, inst)
	return v
}

func (v *vendor) serveDNS(t *testing.T) {
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	must(t, err)
	t.Cleanup(func() { pc.Close() })
	v.dns = pc.LocalAddr().(*net.UDPAddr).AddrPort()
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := pc.ReadFrom(buf)
			if err != nil {
				return
			}
			var m dnsmessage.Message
			if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
				continue
			}
			m.Response = true
			m.Additionals = nil
			if q := m.Questions[0]; q.Type == dnsmessage.TypeA {
				m.Answers = []dnsmessage.Resource{{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 60}, Body: &dnsmessage.AResource{A: v.at.Addr().As4()},
				}}
			}
			out, _ := m.Pack() // as it came
			pc.WriteTo(out, from)
		}
	}()
}

func (v *vendor) serveCredd(t *testing.T, inst instance.Instance) {
	must(t, os.MkdirAll(filepath.Dir(inst.Socket(instance.Credd)), 0o755))
	l, err := net.Listen("unix", inst.Socket(instance.Credd))
	must(t, err)
	must(t, os.Chmod(inst.Socket(instance.Credd), 0o777))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/resolve", func(w http.ResponseWriter, r *http.Request) {
		var req wire.ResolveRequest
		if !control.Read(w, r, &req) {
			return
		}
		control.Reply(w, wire.ResolveReply{Secret: "api", Value: v.secret, Present: req.Place})
	})
	mux.HandleFunc("GET /v1/revocations", func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "{}\n")
		http.NewResponseController(w).Flush() // nothing is ever revoked
		close(v.heard)
		<-r.Context().Done()
	})
	srv := &http.Server{Handler: mux}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
}

// client returns a kid's client that goes through the proxy's explicit port.
func (v *vendor) client(t *testing.T, inst instance.Instance, kid netip.Addr, h2 bool) *http.Client {
	certFile, _, _ := inspectca.Files(inst.CADir())
	raw, err := os.ReadFile(certFile)
	must(t, err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(raw)
	to, err := url.Parse("http://" + netip.AddrPortFrom(inst.Gateway(), instance.PortExplicit).String())
	must(t, err)
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(kid, 0))}
	tr := &http.Transport{Proxy: http.ProxyURL(to), DialContext: d.DialContext, TLSClientConfig: &tls.Config{RootCAs: roots}, Protocols: new(http.Protocols)}
	tr.Protocols.SetHTTP1(!h2)
	tr.Protocols.SetHTTP2(h2)
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: patience}
}

// ready waits until a token is swapped.
func (v *vendor) ready(t *testing.T, c *http.Client) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		resp, err := c.Do(newRequest("GET", fmt.Sprintf("https://%s:%d/", vendorName, v.at.Port()), "", "X-Api-Key", token))
		must(t, err)
		io.Copy(io.Discard, resp.Body) // its status says it
		resp.Body.Close()              // read
		if resp.StatusCode == http.StatusOK {
			<-v.got
			return
		}
	}
	t.Fatal("no token is swapped")
}

// use shows the token in many places, and sees that the secret arrived.
func (v *vendor) use(t *testing.T, c *http.Client) {
	t.Helper()
	base := fmt.Sprintf("https://%s:%d/", vendorName, v.at.Port())
	for _, f := range []func() *http.Request{
		func() *http.Request { return newRequest("GET", base, "", "Authorization", "Bearer "+token) },
		func() *http.Request { return newRequest("POST", base, "hello", "X-Api-Key", token) },
		func() *http.Request {
			return newRequest("POST", base, `{"key":"`+token+`"}`, "Content-Type", "application/json")
		},
		func() *http.Request { return newRequest("GET", base+"?key="+token, "") },
		func() *http.Request { return newRequest("GET", base, "", "Cookie", "a="+token) },
	} {
		for range 3 {
			resp, err := c.Do(f())
			must(t, err)
			answer, err := io.ReadAll(resp.Body)
			must(t, err)
			resp.Body.Close() // read
			if resp.StatusCode != 200 || strings.Contains(string(answer), v.secret) {
				t.Fatalf("%s %s", resp.Status, answer)
			}
			if got := <-v.got; !strings.Contains(got, v.secret) {
				t.Fatalf("the server got %s", got)
			}
		}
	}
}

func newRequest(method, to, body string, fields ...string) *http.Request {
	r, err := http.NewRequest(method, to, strings.NewReader(body))
	if err != nil {
		panic(err)
	}
	for i := 0; i < len(fields); i += 2 {
		r.Header.Set(fields[i], fields[i+1])
	}
	return r
}

// copies counts what a process holds of a secret, in clear and in the encodings that the proxy makes of it, and shows what is around the
// first of them.
func copies(t *testing.T, pid int, secret string) (n int, around string) {
	t.Helper()
	maps, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	must(t, err)
	defer maps.Close()
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	must(t, err)
	defer mem.Close()
	forms := [][]byte{[]byte(secret), []byte(hex.EncodeToString([]byte(secret)))}
	for before := range 3 {
		text := base64.RawStdEncoding.EncodeToString(append(make([]byte, before), secret...))
		forms = append(forms, []byte(text[4:len(text)-4]))
	}
	read := 0
	for lines := bufio.NewScanner(maps); lines.Scan(); {
		var from, to uint64
		var mode string
		if _, err := fmt.Sscanf(lines.Text(), "%x-%x %s", &from, &to, &mode); err != nil || !strings.HasPrefix(mode, "rw") {
			continue
		}
		region := make([]byte, to-from)
		got, err := mem.ReadAt(region, int64(from))
		if err != nil && got == 0 { // never touched
			continue
		}
		read += got
		for _, form := range forms {
			for rest := region[:got]; ; {
				i := bytes.Index(rest, form)
				if i < 0 {
					break
				}
				if n++; around == "" {
					around = fmt.Sprintf("%s: %q", lines.Text(), rest[max(0, i-60):min(len(rest), i+len(form)+40)])
				}
				rest = rest[i+len(form):]
			}
		}
	}
	if read < 1<<20 {
		t.Fatalf("only %d bytes of memory were read", read)
	}
	return n, around
}

// TestTheProxyForgets (invariant 3): a while after the last request with a secret, a proxy process that still serves the
// kid's connections holds no copy of it: of one that is short enough for a stack, which is the harder case. (One of less
// than 16 bytes may share its memory with something that lives on: see docs/credentials.md.) The control is a garbage
// collector that does not overwrite what it frees.
func TestTheProxyForgets(t *testing.T) {
	testroot.Require(t)
	t.Run("overwritten", func(t *testing.T) { forgets(t, true, 8) })
	t.Run("control", func(t *testing.T) {
		t.Setenv("GODEBUG", instance.Forgetful+",clobberfree=0")
		forgets(t, false, 24)
	})
}

func forgets(t *testing.T, overwrites bool, size int) {
	inst := setUp(t)
	_, kid := inst.KidAddrs(1)
	addAddrs(t, inst.Gateway(), kid)
	caFile := filepath.Join(inst.RunDir(), "vendor.pem")
	v := newVendor(t, inst, caFile, size)
	box, err := (&config.Box{Resolvers: []netip.AddrPort{v.dns}, UpstreamCAs: []string{caFile}}).Marshal()
	must(t, err)
	must(t, os.WriteFile(inst.BoxConfig(), box, 0o644))
	must(t, session.NewStore(inst.SessionDir()).Put(&session.Session{
		Version: session.Version, ID: "01S", Kid: "kid1", Card: "c", Index: 1, Mark: inst.SessionMark(7), Addr: kid, HostAddr: kid,
		Cgroup: "/x", CgroupID: 1, Generation: 1,
		Egress: policy.Spec{Allow: []policy.Rule{{
			Host: vendorName, Ports: []uint16{v.at.Port()}, Protocol: policy.TLS, Inspect: true, Credential: "api", Addresses: []netip.Prefix{netip.MustParsePrefix("127.0.2.0/24")},
		}}},
	}, inst.GroupID()))
	cmd, stderr := start(t, inst, unix.CAP_NET_RAW)
	ctl := control.NewClient(inst.Socket(instance.Proxy))
	defer ctl.CloseIdle()
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	waitHealth(ctx, t, ctl, stderr)
	<-v.heard // and a moment later secrets are given
	v.ready(t, v.client(t, inst, kid, false))
	h1, h2 := v.client(t, inst, kid, false), v.client(t, inst, kid, true)
	v.use(t, h1)
	if n, _ := copies(t, cmd.Process.Pid, v.secret); n == 0 {
		t.Error("no copy right after a use: nothing is shown by there being none later")
	}
	v.use(t, h2)
	n, around := 1, ""
	wait := patience
	if !overwrites {
		wait = 6 * time.Second // longer than it takes otherwise
	}
	for deadline := time.Now().Add(wait); n > 0 && time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
		n, around = copies(t, cmd.Process.Pid, v.secret)
	}
	if (n == 0) != overwrites {
		t.Errorf("%d copies of the secret are left, the first in %s", n, around)
	}
	v.use(t, h1) // the connections were there all the time
}
