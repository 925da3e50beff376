package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
)

const (
	tokenEnv = "VENDOR_API_KEY" // a name, not a credential
	// tryWithin bounds one way out; answerWithin is how long a connection that stands may stay silent.
	tryWithin    = 3 * time.Second
	answerWithin = 500 * time.Millisecond
)

// errSilent means that something was sent and nobody refused it: it may well have arrived.
var errSilent = errors.New("sent, not refused")

// whoami uses the token once. It prints the token's hash and that of the credential which arrived, so that a
// reader sees whether they differ, and never prints either.
func whoami(ctx context.Context, w io.Writer, args []string) error {
	if len(args) != 1 {
		usage("whoami wants a URL")
	}
	token := os.Getenv(tokenEnv)
	if token == "" {
		return fmt.Errorf("$%s is empty: the card's identity section gives it", tokenEnv)
	}
	ctx, cancel := context.WithTimeout(ctx, 2*tryWithin)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, args[0], http.NoBody)
	if err != nil {
		return fmt.Errorf("asking %s: %w", args[0], err)
	}
	req.Header.Set("Authorization", "Bearer "+token)
	began := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return fmt.Errorf("asking %s: %w", args[0], err)
	}
	defer resp.Body.Close() // read below
	var id struct {
		Accepted bool   `json:"accepted"`
		SHA256   string `json:"credential_sha256"`
		Detail   string `json:"detail"` // of a refusal on the way
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	if err == nil && json.Unmarshal(body, &id) != nil {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	if err != nil {
		return fmt.Errorf("asking %s: %w", args[0], err)
	}
	mine := sha256.Sum256([]byte(token))
	fmt.Fprintf(w, "whoami: accepted=%t after %s: I sent %.8s…, %.8s… arrived\n",
		id.Accepted, short(time.Since(began)), hex.EncodeToString(mine[:]), id.SHA256)
	if !id.Accepted {
		return fmt.Errorf("%s refused the credential: %s %s", args[0], resp.Status, id.Detail)
	}
	return nil
}

// try walks one way out and prints "way N NAME: denied|GOT OUT after TIME: DETAIL".
//
//	tcp ADDR:PORT    connect, send, wait for an answer
//	udp ADDR:PORT    send a datagram, wait for an answer
//	name NAME:PORT   look the name up, then as tcp
//	dns SERVER NAME  ask another resolver
func try(ctx context.Context, w io.Writer, args []string) error {
	if len(args) < 4 {
		usage("try wants N NAME KIND ADDR")
	}
	n, name, kind, addr := args[0], args[1], args[2], args[3]
	ctx, cancel := context.WithTimeout(ctx, tryWithin)
	defer cancel()
	began := time.Now()
	var err error
	switch {
	case kind == "tcp" || kind == "name":
		err = reach(ctx, "tcp", addr)
	case kind == "udp":
		err = reach(ctx, "udp", addr)
	case kind == "dns" && len(args) == 5:
		err = ask(ctx, addr, args[4])
	default:
		usage("try: unknown kind " + kind)
	}
	took, outcome, detail := short(time.Since(began)), "denied", "got an answer"
	if err != nil {
		detail = err.Error()
	}
	if err == nil || errors.Is(err, errSilent) {
		outcome = "GOT OUT"
	}
	fmt.Fprintf(w, "way %s %s: %s after %s: %s\n", n, name, outcome, took, detail)
	return nil
}

// reach sends to addr; nil or errSilent means that it got somewhere.
func reach(ctx context.Context, network, addr string) error {
	var d net.Dialer
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	if net.ParseIP(host) == nil && !strings.HasSuffix(host, ".") {
		addr = net.JoinHostPort(host+".", port) // no search list: one question a name
	}
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return err
	}
	defer conn.Close() // one way, one connection
	if _, err := conn.Write([]byte("stolen data\n")); err != nil {
		return err
	}
	conn.SetReadDeadline(time.Now().Add(answerWithin)) // a live socket
	_, err = conn.Read(make([]byte, 1))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errSilent
	case errors.Is(err, io.EOF):
		return errors.New("connection closed at once")
	}
	return err
}

// ask sends a DNS question to a server of its own choice.
func ask(ctx context.Context, server, name string) error {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, network, server)
	}}
	_, err := r.LookupHost(ctx, name+".")
	var refused *net.DNSError
	if errors.As(err, &refused) && refused.IsNotFound {
		return fmt.Errorf("%w: the resolver answered", errSilent) // an answer, if only NXDOMAIN
	}
	if ctx.Err() != nil {
		return errSilent
	}
	return err
}

func short(d time.Duration) string {
	return fmt.Sprintf("%.1fms", float64(d.Microseconds())/1000)
}
