package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base32"
	"encoding/hex"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"
)

// leakWithin bounds one name; a refusal comes at once, silence is worth no more.
const leakWithin = 2 * time.Second

// leak is what dnsleak was told to do, and what came of it.
type leak struct {
	domain string
	names  int
	style  string // base32, hex or words
	server string // the resolver to ask, host:port; empty: the system's
	via    string // an HTTP proxy, host:port; empty: none
	port   string // where names that resolve are connected to

	answered, connected, tunnelled int
	last                           error
}

// dnsleak carries made-up data out in names below a domain, in every way in which a name can leave: lookups of
// several types over UDP and TCP, connections to what they answer, and CONNECT through a proxy, which resolves
// the name itself. It prints one line; whether anything arrived is for the other end to say.
func dnsleak(ctx context.Context, w io.Writer, args []string) error {
	var l leak
	fs := flag.NewFlagSet("dnsleak", flag.ContinueOnError)
	fs.IntVar(&l.names, "n", 32, "how many names")
	fs.StringVar(&l.style, "style", "base32", "how data is written: base32, hex, or words, which hold little and look like nothing")
	fs.StringVar(&l.server, "server", "", "the resolver to ask, host:port; default: the system's")
	fs.StringVar(&l.via, "via", "", "an HTTP proxy to CONNECT through, host:port")
	fs.StringVar(&l.port, "port", "443", "the port to connect to")
	if err := fs.Parse(args); err != nil {
		return err
	}
	if l.domain = fs.Arg(0); fs.NArg() != 1 {
		usage("dnsleak wants a domain")
	}
	for i := range l.names {
		l.carry(ctx, i)
	}
	fmt.Fprintf(w, "dnsleak %s: %d names, %d answered, %d connected, %d tunnelled", l.domain, l.names, l.answered, l.connected, l.tunnelled)
	if l.last != nil {
		fmt.Fprintf(w, ", last refusal: %v", l.last)
	}
	fmt.Fprintln(w)
	return nil
}

// carry tries every way for one name. The names are the same in every run, so that runs can be compared.
func (l *leak) carry(ctx context.Context, i int) {
	ctx, cancel := context.WithTimeout(ctx, leakWithin)
	defer cancel()
	name := l.name(i)
	addrs, err := l.resolver([]string{"udp", "tcp"}[i%2]).LookupHost(ctx, name+".")
	if err != nil {
		l.last = err
		l.resolver("udp").LookupTXT(ctx, name+".")
	} else {
		l.answered++
		l.connect(ctx, addrs[0], name)
	}
	if l.via != "" {
		l.tunnel(ctx, name)
	}
}

func (l *leak) name(i int) string {
	data := make([]byte, 30)
	r := rand.New(rand.NewPCG(uint64(i), 7))
	for j := range data {
		data[j] = byte(r.Uint32())
	}
	switch l.style {
	case "hex":
		return hex.EncodeToString(data) + "." + l.domain
	case "words":
		return fmt.Sprintf("item%d.%s", i, l.domain)
	}
	return strings.ToLower(base32.StdEncoding.EncodeToString(data)) + "." + l.domain
}

func (l *leak) resolver(network string) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, server string) (net.Conn, error) {
		if l.server != "" {
			server = l.server
		}
		var d net.Dialer
		return d.DialContext(ctx, network, server)
	}}
}

// connect says the name in a TLS hello, as a browser would.
func (l *leak) connect(ctx context.Context, addr, name string) {
	d := tls.Dialer{Config: &tls.Config{ServerName: name, InsecureSkipVerify: true}} // the name is the point
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(addr, l.port))
	if err != nil {
		return
	}
	l.connected++
	conn.Close()
}

func (l *leak) tunnel(ctx context.Context, name string) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", l.via)
	if err != nil {
		l.last = err
		return
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	conn.SetDeadline(deadline)
	target := net.JoinHostPort(name, l.port)
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodConnect})
	if err != nil {
		l.last = err
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusOK {
		l.tunnelled++
		tls.Client(conn, &tls.Config{ServerName: name, InsecureSkipVerify: true}).HandshakeContext(ctx)
		return
	}
	l.last = fmt.Errorf("CONNECT %s: %s", name, resp.Status)
}
