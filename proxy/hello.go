package proxy

import (
	"encoding/binary"
	"fmt"

	"tagout/internal/reason"
)

// Bounds and numbers of the TLS record and handshake layers (RFC 8446, sections 4 and 5; RFC 6066, section 3).
const (
	maxHello        = 64 << 10 // of the handshake message; the largest post-quantum hellos are around 5 KiB
	maxHelloRaw     = maxHello + 8<<10
	maxRecord       = 1 << 14
	recordHandshake = 22
	typeClientHello = 1
	versionTLS10    = 0x0301
	versionTLS12    = 0x0303
	versionTLS13    = 0x0304

	extServerName        = 0
	extSupportedVersions = 43
	extECH               = 0xfe0d // RFC 9849
	extESNI              = 0xffce // its drafts before that
)

// helloError says why bytes are not a ClientHello that Tagout lets pass.
type helloError struct {
	code   reason.Code
	detail string
}

func (e *helloError) Error() string { return e.code.String() + ": " + e.detail }

func notTLS(format string, args ...any) error {
	return &helloError{reason.NotTLS, fmt.Sprintf(format, args...)}
}

func badHello(format string, args ...any) error {
	return &helloError{reason.Malformed, "ClientHello: " + fmt.Sprintf(format, args...)}
}

// hello is what Tagout wants to know of a ClientHello.
type hello struct {
	legacyVersion uint16
	versions      []uint16 // supported_versions; nil where the extension is absent
	serverName    string   // as sent
	hasServerName bool
	ech           bool
}

// helloAssembler puts a ClientHello together that is spread over any number of TLS records and segments.
// The zero value is ready.
type helloAssembler struct {
	raw []byte // everything that was fed, to be sent on as it came
	msg []byte // the handshake message so far
	pos int    // of the next record in raw
}

// feed takes the next bytes of the stream. done is true once the whole hello is in msg; the error is a
// *helloError and final. Work is linear in the bytes fed.
func (a *helloAssembler) feed(p []byte) (done bool, err error) {
	a.raw = append(a.raw, p...)
	if len(a.raw) > maxHelloRaw {
		return false, badHello("longer than %d bytes", maxHelloRaw)
	}
	for {
		rest := a.raw[a.pos:]
		if err := checkRecordStart(rest, a.pos == 0); err != nil {
			return false, err
		}
		if len(rest) < 5 {
			return false, nil
		}
		size := int(binary.BigEndian.Uint16(rest[3:5]))
		switch {
		case size == 0:
			return false, badHello("an empty record") // RFC 8446, 5.1
		case size > maxRecord:
			return false, notTLS("a record of %d bytes", size)
		case len(rest) < 5+size:
			return false, a.checkMessage(rest[5:])
		}
		a.msg = append(a.msg, rest[5:5+size]...)
		a.pos += 5 + size
		if err := a.checkMessage(nil); err != nil {
			return false, err
		}
		if len(a.msg) >= 4 && len(a.msg) == 4+messageSize(a.msg) {
			return true, nil // records behind it are early data (RFC 8446, 2.3), and go where the hello goes
		}
	}
}

func messageSize(msg []byte) int { return int(msg[1])<<16 | int(msg[2])<<8 | int(msg[3]) }

// checkMessage looks at the handshake header as soon as its bytes are there; partial are bytes of a record
// that is not complete yet.
func (a *helloAssembler) checkMessage(partial []byte) error {
	head := a.msg
	if len(head) < 4 {
		head = append(append([]byte(nil), head...), partial[:min(4, len(partial))]...)
	}
	switch {
	case len(head) > 0 && head[0] != typeClientHello:
		return notTLS("handshake message %d instead of a ClientHello", head[0])
	case len(head) >= 4 && messageSize(head) > maxHello:
		return badHello("%d bytes announced, at most %d are read", messageSize(head), maxHello)
	case len(a.msg) >= 4 && len(a.msg) > 4+messageSize(a.msg):
		return badHello("bytes behind it")
	}
	return nil
}

// checkRecordStart refuses what cannot become a handshake record, by as few bytes as that takes.
func checkRecordStart(b []byte, first bool) error {
	if len(b) == 0 {
		return nil
	}
	if first && b[0] != recordHandshake && sslv2(b) {
		return &helloError{reason.SSLv2, ""}
	}
	if b[0] != recordHandshake {
		// An SSLv2 header needs five bytes to be told from noise.
		if first && b[0]&0x80 != 0 && len(b) < 5 {
			return nil
		}
		return notTLS("begins with byte %#02x", b[0])
	}
	if len(b) >= 2 && b[1] != 3 {
		return notTLS("record version %#02x", b[1])
	}
	return nil
}

// sslv2 recognises a CLIENT-HELLO in SSLv2 framing (RFC 5246, appendix E.2): two bytes of length with the
// top bit set, message type 1, then the version: 0.2 or 3.x.
func sslv2(b []byte) bool {
	return len(b) >= 5 && b[0]&0x80 != 0 && b[2] == 1 && (b[3] == 3 && b[4] <= 4 || b[3] == 0 && b[4] == 2)
}

// speaksTLS says whether an SSLv2 hello offers TLS: its sender then understands an alert.
func speaksTLS(b []byte) bool { return len(b) >= 5 && b[3] == 3 }

// cursor reads big-endian fields; ok turns false at the first one that is not there.
type cursor struct {
	b  []byte
	ok bool
}

func (c *cursor) take(n int) []byte {
	if !c.ok || n > len(c.b) {
		c.ok = false
		return nil
	}
	out := c.b[:n]
	c.b = c.b[n:]
	return out
}

func (c *cursor) uint(n int) int {
	v := 0
	for _, b := range c.take(n) {
		v = v<<8 | int(b)
	}
	return v
}

// vector reads a field whose length stands in the n bytes before it.
func (c *cursor) vector(n int) []byte { return c.take(c.uint(n)) }

// parseHello reads a whole handshake message (RFC 8446, 4.1.2). Unknown extensions and values, GREASE among
// them (RFC 8701), are skipped. The error is a *helloError.
func parseHello(msg []byte) (*hello, error) {
	c := cursor{b: msg, ok: true}
	if c.uint(1) != typeClientHello || c.uint(3) != len(c.b) || !c.ok {
		return nil, badHello("wrong length")
	}
	h := &hello{legacyVersion: uint16(c.uint(2))} // two bytes
	c.take(32)                                    // random
	session, suites, compression := c.vector(1), c.vector(2), c.vector(1)
	switch {
	case !c.ok:
		return nil, badHello("cut short")
	case h.legacyVersion>>8 != 3:
		return nil, notTLS("version %#04x", h.legacyVersion)
	case len(session) > 32 || len(suites) < 2 || len(suites)%2 != 0 || len(compression) == 0:
		return nil, badHello("a field of the wrong length")
	}
	if len(c.b) == 0 {
		return h, nil // no extensions at all: SSL 3.0 and early TLS
	}
	extensions := cursor{b: c.vector(2), ok: true}
	if !c.ok || len(c.b) != 0 {
		return nil, badHello("extensions of the wrong length")
	}
	return h, h.parseExtensions(&extensions)
}

func (h *hello) parseExtensions(c *cursor) error {
	seen := map[int]bool{}
	for len(c.b) > 0 {
		kind := c.uint(2)
		body := c.vector(2)
		if !c.ok {
			return badHello("an extension is cut short")
		}
		if seen[kind] {
			return badHello("extension %d twice", kind)
		}
		seen[kind] = true
		var err error
		switch kind {
		case extServerName:
			err = h.parseServerName(body)
		case extSupportedVersions:
			err = h.parseVersions(body)
		case extECH, extESNI:
			h.ech = true
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// parseServerName accepts exactly one name, of type host_name, as RFC 6066 has it.
func (h *hello) parseServerName(body []byte) error {
	c := cursor{b: body, ok: true}
	list := cursor{b: c.vector(2), ok: true}
	kind := list.uint(1)
	name := list.vector(2)
	if !c.ok || !list.ok || len(c.b) != 0 || len(list.b) != 0 || kind != 0 || len(name) == 0 {
		return badHello("server_name does not hold exactly one host name")
	}
	h.serverName, h.hasServerName = string(name), true
	return nil
}

func (h *hello) parseVersions(body []byte) error {
	c := cursor{b: body, ok: true}
	list := c.vector(1)
	if !c.ok || len(c.b) != 0 || len(list) < 2 || len(list)%2 != 0 {
		return badHello("supported_versions of the wrong length")
	}
	for i := 0; i < len(list); i += 2 {
		h.versions = append(h.versions, binary.BigEndian.Uint16(list[i:]))
	}
	return nil
}

// modern says whether the client can speak TLS 1.2 or newer.
func (h *hello) modern() bool {
	if h.versions == nil {
		return h.legacyVersion >= versionTLS12
	}
	for _, v := range h.versions {
		if v == versionTLS12 || v == versionTLS13 {
			return true
		}
	}
	return false
}

// judge says whether the hello may go to the host called name, a canonical name.
func (h *hello) judge(name string) (reason.Code, string) {
	switch {
	case !h.modern():
		return reason.TLSVersion, fmt.Sprintf("the newest version offered is %#04x", h.newest())
	case h.ech:
		return reason.ECH, ""
	case !h.hasServerName:
		return reason.SNIMissing, "towards " + name
	case lowerASCII(h.serverName) != name:
		return reason.SNIMismatch, fmt.Sprintf("the hello names %q, the address stands for %s", clip(h.serverName, 255), name)
	}
	return reason.OK, ""
}

func (h *hello) newest() uint16 {
	newest := h.legacyVersion
	for i, v := range h.versions {
		if i == 0 || v > newest && v&0x0f0f != 0x0a0a {
			newest = v
		}
	}
	return newest
}

// lowerASCII lower-cases A to Z and nothing else: a comparison of host names must not fold other letters.
func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + 'a' - 'A'
		}
	}
	return string(b)
}

// clip cuts s to n bytes, for records.
func clip(s string, n int) string {
	if len(s) > n {
		return s[:n] + "…"
	}
	return s
}
