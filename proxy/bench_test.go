package proxy

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"tagout/internal/policy"
)

// pour sends b.N blocks through c, whose other end swallows them and answers with one byte.
func pour(b *testing.B, c net.Conn) {
	b.Helper()
	c.SetDeadline(time.Time{})
	block := make([]byte, 1<<20)
	b.SetBytes(int64(len(block)))
	b.ResetTimer()
	for range b.N {
		if _, err := c.Write(block); err != nil {
			b.Fatal(err)
		}
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		b.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		b.Fatal(err)
	}
}

func swallow(c net.Conn) {
	io.Copy(io.Discard, c)
	c.Write([]byte{1})
}

// BenchmarkRelay compares the proxy's tunnel with a relay that does nothing but splice, and with no relay.
func BenchmarkRelay(b *testing.B) {
	b.Run("direct", func(b *testing.B) {
		at := listen(b, serverAddr, 0, swallow)
		c, err := net.Dial("tcp4", at.String())
		must(b, err)
		pour(b, c)
	})
	b.Run("splice", func(b *testing.B) {
		at := listen(b, serverAddr, 0, swallow)
		relay := listen(b, gateway, 0, func(c net.Conn) { bareSplice(c, at) })
		c, err := net.Dial("tcp4", relay.String())
		must(b, err)
		pour(b, c)
	})
	b.Run("proxy", func(b *testing.B) {
		w := newWorld(b)
		at := listen(b, serverAddr, 0, swallow)
		w.allow(rule(apiHost, at.Port(), policy.TCP))
		pour(b, w.dialName(apiHost, at.Port()))
	})
	b.Run("proxy-tls", func(b *testing.B) {
		w := newWorld(b)
		at := w.tlsServer(swallow, apiHost)
		w.allow(rule(apiHost, at.Port(), policy.TLS))
		c := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: w.vendor.pool()})
		must(b, c.Handshake())
		pour(b, c)
	})
}

func bareSplice(c net.Conn, to netip.AddrPort) {
	up, err := net.Dial("tcp4", to.String())
	if err != nil {
		return
	}
	defer up.Close()
	go func() {
		io.Copy(up, c)
		up.(*net.TCPConn).CloseWrite()
	}()
	io.Copy(c, up)
}

// BenchmarkConnect is the price of a short connection: decision, lookup, dial, one byte each way.
func BenchmarkConnect(b *testing.B) {
	w := newWorld(b)
	at := listen(b, serverAddr, 0, echo)
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	b.ResetTimer()
	for range b.N {
		c := w.dialName(apiHost, at.Port())
		io.WriteString(c, "x")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

// BenchmarkRequest is the price of one judged request on a connection that is open already.
func BenchmarkRequest(b *testing.B) {
	for _, secure := range []bool{false, true} {
		b.Run(fmt.Sprintf("inspected=%v", secure), func(b *testing.B) {
			w := newWorld(b)
			c, _ := w.judged(secure, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "ok") }), nil)
			c.SetDeadline(time.Time{})
			b.ResetTimer()
			for range b.N {
				ask(b, c, get(apiHost, "/v1/x"), 1)
			}
		})
	}
}

func BenchmarkHello(b *testing.B) {
	raw := captureHello(b, &tls.Config{ServerName: apiHost})
	b.SetBytes(int64(len(raw)))
	for range b.N {
		if _, err := assemble(raw, len(raw)); err != nil {
			b.Fatal(err)
		}
	}
}
