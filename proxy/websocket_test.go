package proxy

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// frameOf writes a frame of a WebSocket (RFC 6455, 5.2); kind is its opcode.
func frameOf(final bool, kind byte, payload string, key []byte) []byte {
	head := []byte{kind, 0}
	if final {
		head[0] |= frameFinal
	}
	switch n := len(payload); {
	case n < 126:
		head[1] = byte(n)
	case n < 1<<16:
		head[1] = 126
		head = binary.BigEndian.AppendUint16(head, uint16(n))
	default:
		head[1] = 127
		head = binary.BigEndian.AppendUint64(head, uint64(n))
	}
	body := []byte(payload)
	if key != nil {
		head[1] |= frameMasked
		head = append(head, key...)
		for i := range body {
			body[i] ^= key[i&3]
		}
	}
	return append(head, body...)
}

func clientFrame(final bool, kind byte, payload string) []byte {
	return frameOf(final, kind, payload, []byte{1, 2, 3, 250})
}

func serverFrame(final bool, kind byte, payload string) []byte {
	return frameOf(final, kind, payload, nil)
}

// TestFramesAreMasked: whatever frames and pieces a message comes in, its secrets are blanked, and all else stays: heads,
// lengths, order.
func TestFramesAreMasked(t *testing.T) {
	secrets := []secret{{"api", realValue}}
	values := maskedForms(secrets)
	r := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		var stream, want []byte
		for range 1 + r.IntN(3) { // messages
			text := strings.Repeat("x", r.IntN(200)) + realValue + realValue[:r.IntN(len(realValue))] + strings.Repeat("y", r.IntN(5))
			if r.IntN(20) == 0 {
				text += strings.Repeat("z", 70000)
			}
			hidden := masked(text, values)
			kind := byte(1 + r.IntN(2))
			for first := true; ; first = false {
				n := min(r.IntN(len(realValue)), len(text))
				if r.IntN(8) == 0 {
					n = len(text)
				}
				final := n == len(text)
				if !first {
					kind = 0
				}
				stream, want = append(stream, serverFrame(final, kind, text[:n])...), append(want, serverFrame(final, kind, hidden[:n])...)
				if final {
					break
				}
				text, hidden = text[n:], hidden[n:]
				if r.IntN(3) == 0 { // a ping in the middle
					stream, want = append(stream, serverFrame(true, 9, "p"+realValue)...), append(want, serverFrame(true, 9, "p"+strings.Repeat("*", len(realValue)))...)
				}
			}
		}
		m := &frameMask{mask: newMask(secrets)}
		for rest := stream; len(rest) > 0; {
			n := min(len(rest), 1+r.IntN(40))
			must(t, m.feed(bytes.Clone(rest[:n])))
			rest = rest[n:]
		}
		if len(m.held.text) > 0 {
			t.Fatalf("%d bytes are held back although every message is whole", len(m.held.text))
		}
		if !bytes.Equal(m.ready, want) {
			t.Fatalf("%q\nbecame %q\nwant   %q", clip(string(stream), 600), clip(string(m.ready), 600), clip(string(want), 600))
		}
	}
}

// TestTokensInFramesAreFound, in whatever frames and pieces they come, and not across messages.
func TestTokensInFramesAreFound(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for i := range 2000 {
		there := i%2 == 0
		var stream []byte
		text := strings.Repeat("tgo_", r.IntN(30)) + token + "x"
		for kind := byte(1); ; kind = 0 {
			n := r.IntN(len(text))
			final := n == len(text)-1
			stream = append(stream, clientFrame(final || !there && len(stream) > 0, kind, text[:n])...)
			text = text[n:]
			if final {
				break
			}
			if r.IntN(3) == 0 {
				stream = append(stream, clientFrame(true, 9, "ping")...)
			}
			if !there {
				text = text[min(1, len(text)-1):] // something is always missing
				kind = 1
			}
		}
		var s frameScan
		found := ""
		for rest := stream; len(rest) > 0 && found == ""; {
			n := min(len(rest), 1+r.IntN(30))
			got, err := s.feed(rest[:n])
			must(t, err)
			found, rest = got, rest[n:]
		}
		if there && found != token {
			t.Fatalf("the token in %q was not found", stream)
		}
	}
}

// FuzzFrames: hostile bytes end in an error or in frames; nothing of a stream is lost or made up.
func FuzzFrames(f *testing.F) {
	f.Add(serverFrame(true, 1, "hello"), false)
	f.Add(clientFrame(false, 2, token), true)
	f.Add([]byte{0x81, 127, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, false)
	f.Fuzz(func(t *testing.T, stream []byte, up bool) {
		if up {
			var s frameScan
			s.feed(bytes.Clone(stream)) // does not panic
			return
		}
		m := &frameMask{mask: newMask([]secret{{"api", realValue}})}
		err := m.feed(bytes.Clone(stream))
		m.end()
		if err == nil && len(m.ready)+len(m.head)+len(m.talk) != len(stream) {
			t.Errorf("%d bytes became %d", len(stream), len(m.ready)+len(m.head)+len(m.talk))
		}
	})
}

// webSocketServer answers the wish for a WebSocket and then calls talk.
func webSocketServer(t *testing.T, extra string, talk func(r *http.Request, c io.ReadWriter)) http.Handler {
	return http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		c, buf, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		fmt.Fprintf(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Echo: %s\r\n%s\r\n", r.Header.Get("X-Key"), extra)
		talk(r, struct {
			io.Reader
			io.Writer
		}{buf, c})
	})
}

const wsWish = "GET /ws HTTP/1.1\r\nHost: " + apiHost + "\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Extensions: permessage-deflate\r\n"

// TestASecretInAWebSocket: the wish for a WebSocket carries a secret, and what comes back in frames does not show it.
func TestASecretInAWebSocket(t *testing.T) {
	w := newWorld(t)
	w.tokens.resolve = credd
	half := len(realValue) / 2
	c, _ := w.judged(true, webSocketServer(t, "", func(r *http.Request, c io.ReadWriter) {
		if r.Header.Get("X-Key") != realValue || r.Header.Get("Sec-WebSocket-Extensions") != "" {
			t.Errorf("the server got %v", r.Header)
		}
		c.Write(serverFrame(false, 1, "you sent "+realValue[:half]))
		c.Write(serverFrame(true, 9, realValue))
		c.Write(serverFrame(true, 0, realValue[half:]+"!"))
		c.Write(serverFrame(true, 2, "\x00"+realValue))
		io.Copy(c, c) // what the kid sends, masked as it is
	}), func(r *policy.Rule) { r.Credential = "api" })
	io.WriteString(c, wsWish+"X-Key: "+token+"\r\n\r\n")
	if head := readHead(t, c); !strings.HasPrefix(head, "HTTP/1.1 101 ") || strings.Contains(head, realValue) {
		t.Fatal(head)
	}
	stars := strings.Repeat("*", len(realValue))
	want := bytes.Join([][]byte{
		serverFrame(false, 1, "you sent "+stars[:half]), serverFrame(true, 9, stars), serverFrame(true, 0, stars[half:]+"!"), serverFrame(true, 2, "\x00"+stars),
	}, nil)
	got := make([]byte, len(want))
	_, err := io.ReadFull(c, got)
	must(t, err)
	if !bytes.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestATokenInAMessage: a token in a WebSocket's message ends the WebSocket before the server has it; so do bytes that
// are no frames, and extensions that would hide what is in them.
func TestATokenInAMessage(t *testing.T) {
	for _, tc := range []struct {
		name, extra string
		send        []byte
		status      int
		want        reason.Code
	}{
		{"text", "", clientFrame(true, 1, `{"key":"`+token+`"}`), 101, reason.TokenScope},
		{"two frames", "", append(clientFrame(false, 1, token[:9]), clientFrame(true, 0, token[9:])...), 101, reason.TokenScope},
		{"binary", "", clientFrame(true, 2, "\x00"+token+"\x00"), 101, reason.TokenScope},
		{"a close frame", "", clientFrame(true, 8, "\x03\xe8"+token), 101, reason.TokenScope},
		{"no frames", "", []byte("GET /smuggled HTTP/1.1\r\n\r\n"), 101, reason.AmbiguousHTTP},
		{"an unmasked frame", "", serverFrame(true, 1, "hello"), 101, reason.AmbiguousHTTP},
		{"an extension", "Sec-WebSocket-Extensions: permessage-deflate\r\n", nil, 403, reason.AmbiguousHTTP},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			var asked question
			w.tokens.resolve = noneBelongs(&asked)
			var got bytes.Buffer
			served := make(chan struct{})
			c, _ := w.judged(true, webSocketServer(t, tc.extra, func(_ *http.Request, c io.ReadWriter) {
				defer close(served)
				c.Write(serverFrame(true, 1, "ready"))
				io.Copy(&got, c)
			}), func(r *policy.Rule) { r.Credential = "api" })
			io.WriteString(c, wsWish+"\r\n")
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			must(t, err)
			if resp.StatusCode != tc.status {
				t.Fatal(resp.Status)
			}
			c.Write(clientFrame(true, 1, "fine"))
			c.Write(tc.send)
			if _, err := io.Copy(io.Discard, c); err != nil && tc.status != 101 {
				t.Error(err)
			}
			<-served
			if strings.Contains(unmaskAll(got.Bytes()), token) || strings.Contains(got.String(), "smuggled") {
				t.Errorf("the server got %q", got.Bytes())
			}
			rec := w.records.wait(t, "the refusal", event(audit.EventRequest, audit.OutcomeDeny))
			if rec.Reason != tc.want {
				t.Errorf("recorded %v %s", rec.Reason, rec.Detail)
			}
			if tc.want == reason.TokenScope && (asked.get().Place.As != wire.PlaceWebSocket || !asked.get().None) {
				t.Errorf("credd was asked %+v", asked.get())
			}
		})
	}
}

// unmaskAll is what a server would read in the frames, put together.
func unmaskAll(stream []byte) string {
	var out []byte
	for len(stream) > 1 {
		f, size, err := readFrame(stream)
		if err != nil || len(stream) < size {
			break
		}
		stream = stream[size:]
		n := min(int(f.left), len(stream))
		for i, b := range stream[:n] {
			out = append(out, b^f.key[i&3])
		}
		stream = stream[n:]
	}
	return string(out)
}
