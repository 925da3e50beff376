package proxy

import (
	"bytes"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// A client whose key share the server does not want says hello twice, and is let through.
func TestHelloRetryPasses(t *testing.T) {
	w := newWorld(t)
	cert := w.vendor.issue(t, apiHost)
	at := listen(t, serverAddr, 0, func(c net.Conn) {
		tc := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}, CurvePreferences: []tls.CurveID{tls.CurveP384}})
		io.Copy(tc, tc)
	})
	w.allow(rule(apiHost, at.Port(), policy.TLS))
	tc := tls.Client(w.dialName(apiHost, at.Port()), &tls.Config{ServerName: apiHost, RootCAs: w.vendor.pool(),
		CurvePreferences: []tls.CurveID{tls.X25519, tls.CurveP384}})
	must(t, tc.Handshake())
	if !tc.ConnectionState().HelloRetryRequest {
		t.Fatal("the server did not ask for another hello: this tests nothing")
	}
	_, err := io.WriteString(tc, "hello")
	must(t, err)
	_, err = io.ReadFull(tc, make([]byte, 5))
	must(t, err)
}

// retryRequest is the beginning of a HelloRetryRequest in a record of its own; nobody here reads its rest.
func retryRequest() []byte {
	msg := append([]byte{typeServerHello, 0, 0, 40, 3, 3}, retryRandom...)
	msg = append(msg, 0, 0x13, 0x01, 0, 0, 0)
	return append([]byte{recordHandshake, 3, 3, 0, byte(len(msg))}, msg...)
}

// askingAgain starts a server that asks for a second hello and tells all that it was sent.
func askingAgain(t testing.TB, first int) (netip.AddrPort, chan []byte) {
	got := make(chan []byte, 1)
	return listen(t, serverAddr, 0, func(c net.Conn) {
		hello := make([]byte, first)
		io.ReadFull(c, hello)
		c.Write(retryRequest())
		rest, _ := io.ReadAll(c)
		got <- append(hello, rest...)
	}), got
}

// E13: the second hello must name the same server, also where it is sent before the server asks for it.
func TestSecondHelloCannotNameAnother(t *testing.T) {
	ccs := []byte{recordCCS, 3, 3, 0, 1, 1}
	for _, early := range []bool{false, true} {
		for _, name := range []string{apiHost, "evil.test"} {
			t.Run(fmt.Sprintf("%s, early %v", name, early), func(t *testing.T) {
				w := newWorld(t)
				first := inRecords(modernHello(apiHost).message(), 1)
				second := append(bytes.Clone(ccs), inRecords(modernHello(name).message(), 1)...)
				at, got := askingAgain(t, len(first))
				w.allow(rule(apiHost, at.Port(), policy.TLS))
				c := w.dialName(apiHost, at.Port())
				if early {
					_, err := c.Write(append(bytes.Clone(first), second...))
					must(t, err)
				} else {
					_, err := c.Write(first)
					must(t, err)
				}
				_, err := io.ReadFull(c, make([]byte, len(retryRequest())))
				must(t, err)
				if !early {
					_, err := c.Write(second)
					must(t, err)
				}
				if name == apiHost {
					must(t, c.CloseWrite())
					if b := <-got; !bytes.Equal(b, append(first, second...)) {
						t.Errorf("the server got %d bytes of %d", len(b), len(first)+len(second))
					}
					return
				}
				alert := make([]byte, 7)
				if _, err := io.ReadFull(c, alert); err != nil || alert[6] != alertUnrecognizedName {
					t.Errorf("alert %x, %v", alert, err)
				}
				if b := <-got; !bytes.Equal(b, first) {
					t.Errorf("%d bytes of the second hello reached the server", len(b)-len(first))
				}
				rec := w.records.wait(t, "the end", event(audit.EventConnClosed, audit.OutcomeOK))
				if rec.Reason != reason.SNIMismatch {
					t.Errorf("reason %v: %s", rec.Reason, rec.Detail)
				}
			})
		}
	}
}

// The check is what refuses: where the rule says tcp the same second hello passes.
func TestSecondHelloPassesWhereNobodyLooks(t *testing.T) {
	w := newWorld(t)
	first, second := inRecords(modernHello(apiHost).message(), 1), inRecords(modernHello("evil.test").message(), 1)
	at, got := askingAgain(t, len(first))
	w.allow(rule(apiHost, at.Port(), policy.TCP))
	c := w.dialName(apiHost, at.Port())
	_, err := c.Write(append(bytes.Clone(first), second...))
	must(t, err)
	must(t, c.CloseWrite())
	if b := <-got; !bytes.Equal(b, append(first, second...)) {
		t.Errorf("the server got %d bytes", len(b))
	}
}
