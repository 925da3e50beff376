package proxy

import (
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"testing"

	"tagout/internal/reason"
)

// helloSpec describes a ClientHello to build, by hand so that it may be as wrong as a test likes.
type helloSpec struct {
	legacy     uint16
	names      []string // of server_name; nil: no such extension
	versions   []uint16 // nil: no such extension
	ech        bool
	grease     bool
	keyShare   int // bytes of a key share in front of the name
	extensions bool
	twice      bool
}

func modernHello(name string) helloSpec {
	return helloSpec{legacy: 0x0303, names: []string{name}, versions: []uint16{0x0304, 0x0303}, extensions: true}
}

func ext(kind uint16, body []byte) []byte {
	out := binary.BigEndian.AppendUint16(nil, kind)
	out = binary.BigEndian.AppendUint16(out, uint16(len(body)))
	return append(out, body...)
}

func (s helloSpec) message() []byte {
	body := binary.BigEndian.AppendUint16(nil, s.legacy)
	body = append(body, make([]byte, 32)...)
	body = append(body, 0)                         // session id
	body = append(body, 0, 4, 0x1a, 0x1a, 0x13, 1) // a GREASE suite and a real one
	body = append(body, 1, 0)
	if s.extensions {
		var all []byte
		if s.grease {
			all = append(all, ext(0x2a2a, nil)...)
		}
		if s.keyShare > 0 {
			all = append(all, ext(51, make([]byte, s.keyShare))...)
		}
		if s.names != nil {
			var list []byte
			for _, n := range s.names {
				list = append(list, 0)
				list = binary.BigEndian.AppendUint16(list, uint16(len(n)))
				list = append(list, n...)
			}
			sn := ext(0, append(binary.BigEndian.AppendUint16(nil, uint16(len(list))), list...))
			all = append(all, sn...)
			if s.twice {
				all = append(all, sn...)
			}
		}
		if s.versions != nil {
			list := []byte{byte(2 * len(s.versions))}
			for _, v := range s.versions {
				list = binary.BigEndian.AppendUint16(list, v)
			}
			all = append(all, ext(43, list)...)
		}
		if s.ech {
			all = append(all, ext(0xfe0d, []byte{0, 0, 1, 0, 1, 0, 0, 0, 0, 0})...)
		}
		if s.grease {
			all = append(all, ext(0xdada, []byte{0})...)
		}
		body = append(body, binary.BigEndian.AppendUint16(nil, uint16(len(all)))...)
		body = append(body, all...)
	}
	return append([]byte{1, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body...)
}

// records cuts a message into n handshake records.
func inRecords(msg []byte, n int) []byte {
	var out []byte
	for i := range n {
		part := msg[i*len(msg)/n : (i+1)*len(msg)/n]
		out = append(out, 22, 3, 1)
		out = binary.BigEndian.AppendUint16(out, uint16(len(part)))
		out = append(out, part...)
	}
	return out
}

// assemble feeds raw in pieces of the given size.
func assemble(raw []byte, piece int) (*hello, error) {
	var a helloAssembler
	for len(raw) > 0 {
		n := min(piece, len(raw))
		done, err := a.feed(raw[:n])
		if err != nil {
			return nil, err
		}
		raw = raw[n:]
		if done {
			return parseHello(a.msg)
		}
	}
	return nil, io.ErrUnexpectedEOF
}

func helloCode(h *hello, err error, name string) reason.Code {
	var he *helloError
	if errors.As(err, &he) {
		return he.code
	}
	if err != nil {
		return reason.Idle
	}
	code, _ := h.judge(name)
	return code
}

var helloCases = []struct {
	name string
	raw  []byte
	want reason.Code
}{
	{"right", inRecords(modernHello(apiHost).message(), 1), reason.OK},
	{"capitals", inRecords(modernHello("API.Vendor.Test").message(), 1), reason.OK},
	{"three records", inRecords(modernHello(apiHost).message(), 3), reason.OK},
	{"grease and a post-quantum share before the name", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x1a1a, 0x0304}, grease: true, keyShare: 1800, extensions: true}.message(), 3), reason.OK},
	{"60 KiB", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x0304}, keyShare: 60000, extensions: true}.message(), 5), reason.OK},
	{"TLS 1.2 without supported_versions", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, extensions: true}.message(), 1), reason.OK},
	{"other name", inRecords(modernHello("evil.test").message(), 1), reason.SNIMismatch},
	{"Kelvin sign", inRecords(modernHello("api.vendor.test\u212a").message(), 1), reason.SNIMismatch},
	{"trailing dot", inRecords(modernHello(apiHost+".").message(), 1), reason.SNIMismatch},
	{"NUL in the name", inRecords(modernHello("api.vendor.test\x00.evil.test").message(), 1), reason.SNIMismatch},
	{"no name", inRecords(helloSpec{legacy: 0x0303, versions: []uint16{0x0304}, extensions: true}.message(), 1), reason.SNIMissing},
	{"ECH", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x0304}, ech: true, extensions: true}.message(), 1), reason.ECH},
	{"TLS 1.0", inRecords(helloSpec{legacy: 0x0301, names: []string{apiHost}, extensions: true}.message(), 1), reason.TLSVersion},
	{"TLS 1.1 by supported_versions", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, versions: []uint16{0x0302}, extensions: true}.message(), 1), reason.TLSVersion},
	{"SSL 3.0", inRecords(helloSpec{legacy: 0x0300}.message(), 1), reason.TLSVersion},
	{"SSLv2", []byte{0x80, 0x2e, 1, 3, 1, 0, 21, 0, 0, 0, 16}, reason.SSLv2},
	{"SSLv2, version 2", []byte{0x80, 0x2e, 1, 0, 2, 0, 21, 0, 0, 0, 16}, reason.SSLv2},
	{"two names", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost, "evil.test"}, extensions: true}.message(), 1), reason.Malformed},
	{"server_name twice", inRecords(helloSpec{legacy: 0x0303, names: []string{apiHost}, twice: true, extensions: true}.message(), 1), reason.Malformed},
	{"plain HTTP", []byte("GET / HTTP/1.1\r\n\r\n"), reason.NotTLS},
	{"noise", []byte{0x9f, 0x11, 0x22, 0x33, 0x44, 0x55}, reason.NotTLS},
	{"another handshake message", inRecords([]byte{2, 0, 0, 1, 0}, 1), reason.NotTLS},
	{"an alert", []byte{21, 3, 1, 0, 2, 1, 0}, reason.NotTLS},
	{"an empty record", []byte{22, 3, 1, 0, 0}, reason.Malformed},
	{"16 MiB announced", []byte{22, 3, 1, 0, 8, 1, 0xff, 0xff, 0xff, 3, 3, 0, 0}, reason.Malformed},
	{"early data behind it", append(inRecords(modernHello(apiHost).message(), 1), 23, 3, 3, 0, 1, 0), reason.OK},
	{"bytes behind it in its record", inRecords(append(modernHello(apiHost).message(), 0), 1), reason.Malformed},
	{"never ends", inRecords(modernHello(apiHost).message(), 1)[:60], reason.Idle},
}

// E11, E12 and E13: every hello gets its own verdict, however it is cut into segments.
func TestHelloVerdicts(t *testing.T) {
	for _, tc := range helloCases {
		for _, piece := range []int{1, 7, 97, len(tc.raw)} {
			h, err := assemble(tc.raw, piece)
			if got := helloCode(h, err, apiHost); got != tc.want {
				t.Errorf("%s in pieces of %d: %v (%v), want %v", tc.name, piece, got, err, tc.want)
			}
		}
	}
}

// A hello of Go's own client, post-quantum key share included, is read as it was meant.
func TestHelloOfARealClient(t *testing.T) {
	raw := captureHello(t, &tls.Config{ServerName: apiHost, MinVersion: tls.VersionTLS12})
	if len(raw) < 1200 {
		t.Fatalf("a hello of %d bytes carries no post-quantum key share", len(raw))
	}
	h, err := assemble(raw, 61)
	if err != nil || h.serverName != apiHost || h.ech || !h.modern() {
		t.Fatalf("read %+v, %v", h, err)
	}
}

func captureHello(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	client, server := net.Pipe()
	go func() {
		tls.Client(client, cfg).Handshake()
		client.Close()
	}()
	head := make([]byte, 5)
	_, err := io.ReadFull(server, head)
	must(t, err)
	body := make([]byte, binary.BigEndian.Uint16(head[3:]))
	_, err = io.ReadFull(server, body)
	must(t, err)
	server.Close()
	return append(head, body...)
}

// FuzzClientHello: no input panics, is read past its bounds or gets another verdict by being cut differently;
// and what we take for a name is what Go's own server takes for it.
func FuzzClientHello(f *testing.F) {
	for _, tc := range helloCases {
		f.Add(tc.raw)
	}
	f.Add(captureHello(f, &tls.Config{ServerName: apiHost}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if len(raw) > 100<<10 {
			return
		}
		whole, wholeErr := assemble(raw, max(len(raw), 1))
		pieces, piecesErr := assemble(raw, 1+rand.IntN(9))
		if a, b := helloCode(whole, wholeErr, apiHost), helloCode(pieces, piecesErr, apiHost); (a == reason.OK) != (b == reason.OK) {
			t.Fatalf("whole: %v, in pieces: %v", a, b)
		}
		if wholeErr != nil || helloCode(whole, nil, apiHost) != reason.OK {
			return
		}
		var seen *string
		tls.Server(&scriptConn{in: bytes.NewReader(raw)}, &tls.Config{GetConfigForClient: func(i *tls.ClientHelloInfo) (*tls.Config, error) {
			seen = &i.ServerName
			return nil, errors.New("enough")
		}}).Handshake()
		if seen != nil && !strings.EqualFold(*seen, whole.serverName) {
			t.Fatalf("Go's server reads %q, we read %q", *seen, whole.serverName)
		}
	})
}

// scriptConn reads from in and swallows writes.
type scriptConn struct {
	net.Conn
	in io.Reader
}

func (c *scriptConn) Read(p []byte) (int, error)  { return c.in.Read(p) }
func (c *scriptConn) Write(p []byte) (int, error) { return len(p), nil }
func (c *scriptConn) Close() error                { return nil }
