package proxy

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
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

// unlimited is for benchmarks, which are one kid's.
func unlimited(c *Config) {
	c.Limits.ConnsPerSession, c.Limits.NewConnsPerSecond = 1<<20, 1<<20
	c.Limits.BufferPerSession = 1 << 40
}

// BenchmarkConnect is the price of a short connection: decision, lookup, dial, one byte each way. The bare
// relay does nothing but dial.
func BenchmarkConnect(b *testing.B) {
	short := func(b *testing.B, dial func() net.Conn) {
		b.ReportAllocs()
		b.ResetTimer()
		one := make([]byte, 1)
		for range b.N {
			c := dial()
			io.WriteString(c, "x")
			if _, err := io.ReadFull(c, one); err != nil {
				b.Fatal(err)
			}
			c.Close()
		}
	}
	b.Run("splice", func(b *testing.B) {
		at := listen(b, serverAddr, 0, echo)
		relay := listen(b, gateway, 0, func(c net.Conn) { bareSplice(c, at) })
		short(b, func() net.Conn {
			c, err := net.Dial("tcp4", relay.String())
			must(b, err)
			return c
		})
	})
	b.Run("proxy", func(b *testing.B) {
		w := newWorld(b, unlimited)
		w.dns.ttl.Store(60) // as the world's servers have it
		at := listen(b, serverAddr, 0, echo)
		w.allow(rule(apiHost, at.Port(), policy.TCP))
		to := netip.AddrPortFrom(w.virtual(apiHost), at.Port())
		w.toward.Store(&to)
		d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(kidAddr, 0))}
		short(b, func() net.Conn {
			c, err := d.Dial("tcp4", w.transparent.String())
			must(b, err)
			return c
		})
	})
}

// BenchmarkLatency is the time of a small message and its answer on an open tunnel.
func BenchmarkLatency(b *testing.B) {
	pingPong := func(b *testing.B, c net.Conn) {
		b.Cleanup(func() { c.Close() }) // or its server would be waited for
		c.SetDeadline(time.Time{})
		buf := make([]byte, 64)
		times := make([]time.Duration, 0, b.N)
		b.ResetTimer()
		for range b.N {
			start := time.Now()
			c.Write(buf)
			if _, err := io.ReadFull(c, buf); err != nil {
				b.Fatal(err)
			}
			times = append(times, time.Since(start))
		}
		slices.Sort(times)
		b.ReportMetric(float64(times[len(times)/2].Nanoseconds()), "p50-ns")
		b.ReportMetric(float64(times[len(times)*99/100].Nanoseconds()), "p99-ns")
	}
	b.Run("direct", func(b *testing.B) {
		at := listen(b, serverAddr, 0, echo)
		c, err := net.Dial("tcp4", at.String())
		must(b, err)
		pingPong(b, c)
	})
	b.Run("splice", func(b *testing.B) {
		at := listen(b, serverAddr, 0, echo)
		relay := listen(b, gateway, 0, func(c net.Conn) { bareSplice(c, at) })
		c, err := net.Dial("tcp4", relay.String())
		must(b, err)
		pingPong(b, c)
	})
	b.Run("proxy", func(b *testing.B) {
		w := newWorld(b)
		at := listen(b, serverAddr, 0, echo)
		w.allow(rule(apiHost, at.Port(), policy.TCP))
		pingPong(b, w.dialName(apiHost, at.Port()))
	})
}

// BenchmarkIdleTunnels says what an idle tunnel costs in memory of this process, which holds the clients' and
// servers' ends too; the bare relay of the same run is what to compare with. Run it with -benchtime 1000x:
// the bare relay keeps four descriptors of pipes for each tunnel besides its sockets.
func BenchmarkIdleTunnels(b *testing.B) {
	measure := func(b *testing.B, open func()) {
		var before, after runtime.MemStats
		goroutines := runtime.NumGoroutine()
		runtime.GC()
		runtime.ReadMemStats(&before)
		for range b.N {
			open()
		}
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&after)
		n := float64(b.N)
		b.ReportMetric(float64(after.HeapAlloc-before.HeapAlloc)/n, "heap-B/tunnel")
		b.ReportMetric(float64(after.StackInuse-before.StackInuse)/n, "stack-B/tunnel")
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/n, "goroutines/tunnel")
	}
	ping := func(c net.Conn) {
		io.WriteString(c, "x")
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
	}
	b.Run("splice", func(b *testing.B) {
		at := listen(b, serverAddr, 0, echo)
		relay := listen(b, gateway, 0, func(c net.Conn) { bareSplice(c, at) })
		measure(b, func() {
			c, err := net.Dial("tcp4", relay.String())
			must(b, err)
			b.Cleanup(func() { c.Close() })
			ping(c)
		})
	})
	b.Run("transparent", func(b *testing.B) {
		w := newWorld(b, unlimited)
		at := listen(b, serverAddr, 0, echo)
		w.allow(rule(apiHost, at.Port(), policy.TCP))
		measure(b, func() { ping(w.dialName(apiHost, at.Port())) })
	})
	b.Run("explicit", func(b *testing.B) {
		w := newWorld(b, unlimited)
		at := listen(b, serverAddr, 0, echo)
		w.allow(rule(apiHost, at.Port(), policy.TCP))
		to := fmt.Sprintf("%s:%d", apiHost, at.Port())
		measure(b, func() {
			c, _ := w.connect(to)
			ping(c)
		})
	})
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
