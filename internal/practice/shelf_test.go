package practice_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"strings"
	"testing"

	"tagout/internal/practice"
)

func TestShelfServesItsNames(t *testing.T) {
	n := start(t, "tprshelf", "")
	n.Shelf.Handle("GET /extra/", http.StripPrefix("/extra", http.NotFoundHandler()))
	c := &http.Client{Timeout: within, Transport: &http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: n.Roots()},
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			_, port, _ := net.SplitHostPort(address)
			var d net.Dialer
			return d.DialContext(ctx, network, net.JoinHostPort(n.ShelfAddr().String(), port))
		},
	}}
	t.Cleanup(c.CloseIdleConnections)
	for _, name := range []string{practice.NameRegistry, practice.NameMirror, practice.NameGit} {
		if _, body := get(t, c, "http://"+name+"/hello.txt"); body != "hello from "+name+"\n" {
			t.Errorf("http://%s: %q", name, body)
		}
		if _, body := get(t, c, "https://"+name+"/proto"); body != "HTTP/2.0\n" {
			t.Errorf("https://%s: %q", name, body)
		}
	}
	if _, body := get(t, c, "https://"+practice.NameMirror+"/events/3"); body != "data: 1\n\ndata: 2\n\ndata: 3\n\n" {
		t.Errorf("events: %q", body)
	}
	if code, _ := get(t, c, "https://"+practice.NameMirror+"/extra/x"); code != http.StatusNotFound {
		t.Errorf("what was put on the shelf: %d", code)
	}
	resp, err := c.Get("https://" + practice.NameMirror + "/events/0")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if line, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil || line != "data: 1\n" {
		t.Errorf("the first of endless events: %q, %v", line, err)
	}
	seen := n.Shelf.Served()
	if last := seen[len(seen)-1]; last.Path != "/events/0" || last.Host != practice.NameMirror || !last.TLS || !strings.HasPrefix(last.Agent, "Go-") {
		t.Errorf("served %+v", last)
	}
}
