package e2e

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/testenv"
	"tagout/internal/wire"
	"tagout/tokencheck"
)

// mintCard is for a kid that calls a service of the user's own; rule and mint are completed by tests.
const mintCard = `apiVersion: tagout/v1
kind: Card
name: reader
task: Read the books.
image: host
egress:
  allow:
    - {host: books.own.test, ports: [443], protocol: tls%s}
identity:
  mint:
    - {name: books, %s}
stop: {authority: "Ada Operator", maxTime: 60s}
`

// inspected is the rule of a kid in whose requests the proxy puts a JWT; carried where it does.
const (
	inspected = ", inspect: true, credential: books"
	carried   = `, env: BOOKS_TOKEN, hosts: ["books.own.test:443"]`
	reads     = `audience: "https://books.own.test", scope: ["books:read"]`
)

// tcp sends everything to one address, in place of the TLS name that a box would have in front of it.
type tcp string

func (t tcp) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.URL.Scheme, r.URL.Host = "http", string(t)
	return http.DefaultTransport.RoundTrip(r)
}

// mintBox is a box whose issuer listens on TCP, and checkers of a service on another machine: one for each way to ask.
type mintBox struct {
	*testenv.Box
	checkers map[string]*tokencheck.Checker
}

func startMinting(t *testing.T) *mintBox {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	door := l.Addr().(*net.TCPAddr).AddrPort()
	box := testenv.StartWith(t, func(c *config.Box) {
		l.Close() // only told which port is free
		c.Issuer.Listen = netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), door.Port())
	})
	key := strings.TrimSpace(box.Must("issuer", "client", "add", "elsewhere", "--role", "introspect"))
	b := &mintBox{Box: box, checkers: map[string]*tokencheck.Checker{}}
	for name, how := range map[string]tokencheck.How{"introspection": tokencheck.Introspection, "status list": tokencheck.StatusList} {
		b.checkers[name], err = tokencheck.New(tokencheck.Config{Issuer: practice.IssuerURL, Audience: practice.BooksAudience, How: how, Key: key,
			Client: &http.Client{Transport: tcp(door.String())}})
		if err != nil {
			t.Fatal(err)
		}
	}
	return b
}

// call makes the kid call the service, and returns status and body.
func (b *mintBox) call(kid, method, token string) string {
	b.T.Helper()
	out := b.Sh(kid, "curl -s -k --noproxy '*' -X "+method+" -H \"Authorization: Bearer "+token+"\" -w ' %{http_code}' https://books.own.test/books")
	return strings.TrimSpace(strings.ReplaceAll(out.Stdout, "\n", " "))
}

// directly uses a JWT past the box, as somebody does who got hold of it.
func (b *mintBox) directly(jwt string) (status int, err error) {
	b.T.Helper()
	c := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: b.Net.Roots()},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, netip.AddrPortFrom(b.Net.BooksAddr(), 443).String())
		}}}
	r, err := http.NewRequestWithContext(b.T.Context(), http.MethodGet, "https://"+practice.NameBooks+"/books", nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set("Authorization", "Bearer "+jwt)
	resp, err := c.Do(r)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// elsewhere asks both ways about a JWT, as a service on another machine.
func (b *mintBox) elsewhere(jwt string, want error) error {
	for name, c := range b.checkers {
		if _, err := c.Check(b.T.Context(), jwt, practice.ScopeRead); !errors.Is(err, want) {
			return fmt.Errorf("by %s: %v, want %v", name, err, want)
		}
	}
	return nil
}

func (b *mintBox) spawn(name, rule, mint string) wire.Kid {
	b.T.Helper()
	kid, err := b.TrySpawn(name, fmt.Sprintf(mintCard, rule, mint), nil)
	if err != nil {
		b.T.Fatal(err)
	}
	return kid
}

// TestMintedTokens (invariant 3): a kid calls the user's own service with an opaque token, in whose place the service gets a
// JWT that lives for the session and for minutes. What has another scope or audience is refused; keys rotate in between; what
// is revoked or has expired is refused at the next use, in every way in which a service may ask.
func TestMintedTokens(t *testing.T) {
	t.Parallel()
	box := startMinting(t)
	kid := box.spawn("reader", inspected, reads+carried)
	got := box.call(kid.Name, "GET", "$BOOKS_TOKEN")
	var who practice.Who
	if err := json.Unmarshal([]byte(strings.TrimSuffix(got, " 200")), &who); err != nil || who.Kid != kid.Name ||
		who.Subject != "spiffe://own.test/card/reader/kid/"+kid.Name+"/session/"+kid.Session {
		t.Fatalf("the service answered %q, %v", got, err)
	}
	jwt := box.Net.Books.LastToken()
	if strings.Count(jwt, ".") != 2 {
		t.Fatalf("the service got %.8s…", jwt)
	}
	if env := box.Sh(kid.Name, "env; cat /proc/*/environ").Stdout; !strings.Contains(env, "BOOKS_TOKEN=tgo_") || strings.Contains(env, "eyJ") {
		t.Errorf("the kid holds %q", env)
	}
	if err := box.elsewhere(jwt, nil); err != nil {
		t.Error(err)
	}
	echo := box.Sh(kid.Name, "curl -s -k -i --noproxy '*' -H \"Authorization: Bearer $BOOKS_TOKEN\" https://books.own.test/debug").Stdout
	if part := strings.Split(jwt, ".")[2]; !strings.Contains(echo, "***") || strings.Contains(echo, part) || strings.Contains(echo, "eyJ") {
		t.Errorf("a service that echoes its token shows the kid %q", echo)
	}
	if got := box.call(kid.Name, "POST", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 403") || !strings.Contains(got, "scope") {
		t.Errorf("with another scope: %q", got)
	}
	stranger := box.spawn("stranger", inspected, `audience: "https://other.own.test", scope: ["books:read"]`+carried)
	if got := box.call(stranger.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 401") || !strings.Contains(got, "audience") {
		t.Errorf("with another audience: %q", got)
	}
	if status, err := box.directly(jwt); err != nil || status != http.StatusOK { // the control
		t.Errorf("a JWT that got out, used from outside: %d, %v", status, err)
	}
	box.rotationAndExpiry(jwt)
	box.revocation(kid, jwt)
	box.stopped(stranger)
	if n, err := box.neverOnDisk(jwt, ""); err != nil || n < 10 {
		t.Errorf("%d files: %v", n, err)
	}
	box.afterACrash()
}

// afterACrash kills credd: while it is dead nobody accepts a JWT, and afterwards none that was made before.
func (b *mintBox) afterACrash() {
	b.T.Helper()
	kid := b.spawn("late", inspected, reads+carried)
	if got := b.call(kid.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 200") {
		b.T.Fatalf("got %q", got)
	}
	jwt := b.Net.Books.LastToken()
	b.Must("issuer", "client", "rm", "elsewhere")
	if _, err := b.checkers["introspection"].Check(b.T.Context(), jwt); !errors.Is(err, tokencheck.ErrUnavailable) {
		b.T.Errorf("with a key that was removed: %v", err)
	}
	if _, err := b.checkers["status list"].Check(b.T.Context(), jwt); err != nil {
		b.T.Errorf("a status list takes no key: %v", err)
	}
	if r := b.Tagout("issuer", "client", "rm", "elsewhere"); r.Code == 0 || !strings.Contains(r.Stderr, "no client") {
		b.T.Errorf("removing it again: %d %q", r.Code, r.Stderr)
	}
	b.Freeze(instance.Credd)
	ctx, cancel := context.WithTimeout(b.T.Context(), 500*time.Millisecond)
	defer cancel()
	for name, c := range b.checkers {
		if _, err := c.Check(ctx, jwt); !errors.Is(err, tokencheck.ErrUnavailable) {
			b.T.Errorf("by %s, while credd hangs: %v", name, err)
		}
	}
	b.Kill9(instance.Credd)
	b.WaitHealthy(instance.Credd)
	if active, err := practice.Introspect(b.T.Context(), b.Client(instance.Credd), jwt); err != nil || active {
		b.T.Errorf("by introspection, after the crash: %t, %v", active, err)
	}
	if _, err := b.checkers["status list"].Check(b.T.Context(), jwt); !errors.Is(err, tokencheck.ErrUnavailable) {
		b.T.Errorf("by status list, after the crash: %v", err)
	}
	if got := b.call(kid.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 403") {
		b.T.Errorf("the kid's token, after the crash: %q", got)
	}
}

// rotationAndExpiry rotates the keys: what the old one signed counts, as what the new one signs, until its own time.
func (b *mintBox) rotationAndExpiry(old string) {
	b.T.Helper()
	b.Must("issuer", "rotate-keys")
	status := b.Must("issuer", "status")
	for _, want := range []string{practice.IssuerURL, "own.test", "current", "next", "old", "elsewhere  introspect"} {
		if !strings.Contains(status, want) {
			b.T.Errorf("tagout issuer status does not show %q:\n%s", want, status)
		}
	}
	kid := b.spawn("brief", inspected, reads+", lifetime: 5s"+carried)
	if got := b.call(kid.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 200") {
		b.T.Errorf("signed by the new key: %q", got)
	}
	brief := b.Net.Books.LastToken()
	if brief == old || strings.Split(brief, ".")[0] == strings.Split(old, ".")[0] {
		b.T.Error("it is signed by the old key")
	}
	if err := b.elsewhere(old, nil); err != nil {
		b.T.Errorf("signed by the old key: %v", err)
	}
	b.Until(soon, "the JWT of five seconds has expired", func() error { return b.elsewhere(brief, tokencheck.ErrExpired) })
	b.Until(soon, "the issuer says so too", func() error {
		active, err := practice.Introspect(b.T.Context(), b.Client(instance.Credd), brief)
		if active {
			return errors.New("it is active")
		}
		return err
	})
	if got := b.call(kid.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 200") || b.Net.Books.LastToken() == brief {
		b.T.Errorf("the kid's next call got no fresh JWT: %q", got)
	}
}

// revocation revokes the kid's tokens: its next call does not reach the service, and its JWT counts nowhere.
func (b *mintBox) revocation(kid wire.Kid, jwt string) {
	b.T.Helper()
	for _, name := range []string{"introspection", "status list"} { // the control
		if _, err := b.checkers[name].Check(b.T.Context(), jwt); err != nil {
			b.T.Fatal(err)
		}
	}
	b.Must("token", "revoke", "--kid", kid.Name)
	if err := b.elsewhere(jwt, tokencheck.ErrRevoked); err != nil {
		b.T.Error(err)
	}
	if status, err := b.directly(jwt); err != nil || status != http.StatusUnauthorized {
		b.T.Errorf("from outside, after it was revoked: %d, %v", status, err)
	}
	before := b.Net.Books.Uses.Tally("").Accepted
	if got := b.call(kid.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 403") || !strings.Contains(got, "token-unknown") {
		b.T.Errorf("after it was revoked: %q", got)
	}
	if after := b.Net.Books.Uses.Tally("").Accepted; after != before {
		b.T.Errorf("the service accepted %d more", after-before)
	}
	minted := b.Records(func(r *audit.Record) bool {
		return r.Event == audit.EventTokenMinted && r.Kid == kid.Name && r.Fields["jti"] != ""
	})
	if len(minted) != 1 || minted[0].Fields["aud"] != practice.BooksAudience || minted[0].Fields["scope"] != "books:read" {
		b.T.Errorf("%+v", minted)
	}
}

// stopped stops a kid's credential layer alone: its JWT is inactive with the acknowledgement.
func (b *mintBox) stopped(kid wire.Kid) {
	b.T.Helper()
	if got := b.call(kid.Name, "GET", "$BOOKS_TOKEN"); !strings.HasSuffix(got, " 401") {
		b.T.Fatalf("got %q", got)
	}
	jwt := b.Net.Books.LastToken()
	if active, err := practice.Introspect(b.T.Context(), b.Client(instance.Credd), jwt); err != nil || !active {
		b.T.Fatalf("before the stop: %t, %v", active, err)
	}
	b.Stop(wire.StopRequest{Scope: wire.Scope{Kid: kid.Name}, Layers: []wire.Layer{wire.LayerCredential}, By: practice.Authority, Reason: "it is enough"})
	if active, err := practice.Introspect(b.T.Context(), b.Client(instance.Credd), jwt); err != nil || active {
		b.T.Errorf("after the stop: %t, %v", active, err)
	}
}

// neverOnDisk looks for a JWT in everything that the box keeps, but for one file.
func (b *mintBox) neverOnDisk(jwt, but string) (files int, err error) {
	for _, root := range []string{b.Inst.RunDir(), b.Inst.StateDir()} {
		walked := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return nil // it vanished, or is a socket or a namespace
			}
			raw, err := os.ReadFile(path)
			if err != nil {
				return nil
			}
			files++
			if but != "" && strings.HasSuffix(path, but) {
				return nil
			}
			if strings.Contains(string(raw), jwt) {
				return fmt.Errorf("%s holds the JWT", path)
			}
			return nil
		})
		err = errors.Join(err, walked)
	}
	return files, err
}

// TestAMintedFile: a kid that reaches the service past the proxy's eyes holds the JWT itself, and it dies with the session.
func TestAMintedFile(t *testing.T) {
	t.Parallel()
	box := startMinting(t)
	kid := box.spawn("filer", "", reads+", file: /workspace/keys/books.jwt")
	if out := box.Sh(kid.Name, "stat -c '%a %U' /workspace/keys/books.jwt; id -un"); len(strings.Fields(out.Stdout)) != 3 || strings.Fields(out.Stdout)[0] != "400" || strings.Fields(out.Stdout)[1] != strings.Fields(out.Stdout)[2] {
		t.Errorf("the file: %q %q", out.Stdout, out.Stderr)
	}
	const token = "$(cat /workspace/keys/books.jwt)"
	if got := box.call(kid.Name, "GET", token); !strings.HasSuffix(got, " 200") {
		t.Fatalf("got %q", got)
	}
	jwt := box.Net.Books.LastToken()
	if err := box.elsewhere(jwt, nil); err != nil {
		t.Error(err)
	}
	if n, err := box.neverOnDisk(jwt, kid.Name+"/workspace/keys/books.jwt"); err != nil || n < 10 {
		t.Errorf("%d files: %v", n, err)
	}
	if _, err := box.neverOnDisk(jwt, ""); err == nil { // the control
		t.Error("the file itself was not found")
	}
	box.renewed()
	box.Must("token", "revoke", "--kid", kid.Name)
	if got := box.call(kid.Name, "GET", token); !strings.HasSuffix(got, " 401") || !strings.Contains(got, "not active") {
		t.Errorf("after it was revoked: %q", got)
	}
	if err := box.elsewhere(jwt, tokencheck.ErrRevoked); err != nil {
		t.Error(err)
	}
}

// renewed follows a file whose JWT lives for seconds: another one is in it before that one expires, also where the kid has put
// something else there or taken the directory away for a while, and after sandboxd was killed. A link is never followed.
func (b *mintBox) renewed() {
	b.T.Helper()
	kid := b.spawn("brief", "", reads+", lifetime: 5s, file: /workspace/keys/books.jwt")
	read := func() string { return b.Sh(kid.Name, "cat /workspace/keys/books.jwt").Stdout }
	other := func(what, than string) string {
		b.T.Helper()
		var now string
		b.Until(soon, what, func() error {
			if now = read(); strings.Count(now, ".") != 2 || now == than {
				return errors.New("not yet")
			}
			return nil
		})
		return now
	}
	first := read()
	second := other("another JWT is in the file", first)
	if got := b.call(kid.Name, "GET", "$(cat /workspace/keys/books.jwt)"); !strings.HasSuffix(got, " 200") {
		b.T.Errorf("with the renewed JWT: %q", got)
	}
	b.Sh(kid.Name, "cd /workspace; mv keys away; echo mine > target; mkdir keys; ln -s ../target keys/books.jwt")
	b.Kill9(instance.Sandboxd)
	b.WaitHealthy(instance.Sandboxd)
	b.Until(soon, "the link is seen", func() error {
		raw, err := os.ReadFile(filepath.Join(b.Inst.RunDir(), "log", "sandboxd.log"))
		if err == nil && !strings.Contains(string(raw), "renewing the tokens in a kid's files") {
			err = errors.New("not yet")
		}
		return err
	})
	if got := b.Sh(kid.Name, "cat /workspace/target").Stdout; got != "mine\n" {
		b.T.Errorf("a link was followed: %.8s…", got)
	}
	b.Sh(kid.Name, "cd /workspace; rm -r keys; mv away keys")
	other("it is renewed where it was", second)
}
