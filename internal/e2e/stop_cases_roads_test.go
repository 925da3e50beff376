package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"
)

// patience is how long a road may take for one round trip before the agent opens it anew.
const patience = time.Second

// walkRoads keeps four roads out of a kid open and goes over each again and again. A road that breaks is opened
// anew, for ever.
func walkRoads() {
	gateway := flag.Arg(0)
	for road, open := range map[string]func() (trip func() error, closeIt func(), err error){
		"connect": func() (func() error, func(), error) { return openTunnel(gateway) },
		"http2":   openHTTP2,
		"tcp":     openEcho,
		"dns":     openLookups,
	} {
		go func() {
			trips, tries := appendTo(road), appendTo("tries")
			for {
				trip, closeIt, err := open()
				for err == nil {
					if err = trip(); err == nil {
						trips.Write([]byte(".")) // its size is what the test looks at
						time.Sleep(5 * time.Millisecond)
					}
				}
				if closeIt != nil {
					closeIt()
				}
				fmt.Fprintln(os.Stderr, road, err)
				tries.Write([]byte("."))          // as above
				time.Sleep(10 * time.Millisecond) // not to spin
			}
		}()
	}
	stayUp()
}

func appendTo(file string) *os.File {
	f, err := os.OpenFile("/workspace/"+file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	return f
}

// openTunnel makes a CONNECT tunnel through the explicit proxy and speaks TLS in it over one connection.
func openTunnel(gateway string) (func() error, func(), error) {
	proxy := &url.URL{Scheme: "http", Host: net.JoinHostPort(gateway, "3128")}
	return requests(&http.Transport{
		Proxy: http.ProxyURL(proxy), TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // whose it is is not what is tested
	}, "https://svc.own.test/v1/use", 1)
}

func openHTTP2() (func() error, func(), error) {
	return requests(&http.Transport{
		ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // as above
	}, "https://api.vendor.test/v1/hello", 2)
}

// requests asks for the URL over one kept connection. Any answer is a round trip.
func requests(tr *http.Transport, url string, version int) (func() error, func(), error) {
	client := &http.Client{Transport: tr, Timeout: patience}
	trip := func() error {
		resp, err := client.Get(url)
		if err != nil {
			return err
		}
		defer resp.Body.Close() // read to its end
		if resp.ProtoMajor != version {
			return fmt.Errorf("HTTP/%d", resp.ProtoMajor)
		}
		_, err = io.Copy(io.Discard, resp.Body)
		return err
	}
	return trip, tr.CloseIdleConnections, nil
}

func openEcho() (func() error, func(), error) {
	conn, err := (&net.Dialer{Timeout: patience}).Dial("tcp", "echo.vendor.test:7100")
	if err != nil {
		return nil, nil, err
	}
	back := bufio.NewReader(conn)
	trip := func() error {
		conn.SetDeadline(time.Now().Add(patience)) // a live socket
		if _, err := io.WriteString(conn, "echo\n"); err != nil {
			return err
		}
		_, err := back.ReadString('\n')
		return err
	}
	return trip, func() { conn.Close() }, nil
}

func openLookups() (func() error, func(), error) {
	trip := func() error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, err := (&net.Resolver{PreferGo: true}).LookupHost(ctx, "files.vendor.test")
		return err
	}
	return trip, func() {}, nil
}
