package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"time"

	"tagout/internal/reason"
)

// retryRandom is the Random of a ServerHello that is a HelloRetryRequest (RFC 8446, 4.1.3).
var retryRandom = []byte{
	0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91,
	0xc2, 0xa2, 0x11, 0x67, 0xab, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
}

// Where the beginning of a ServerHello shows what it is: record header, handshake header, version, Random.
const (
	randomAt        = 5 + 4 + 2
	serverHelloHead = randomAt + 32
	typeServerHello = 2
	recordCCS       = 20
)

// watchRetry passes the server's first bytes on. Where they ask for another ClientHello, that one is read and
// held against the name like the first: until the server has spoken, nothing of the client's passes, so there
// is no way to slip another name in (E13). ahead is what the client has sent behind its first hello. The error is a refusal where that was tried.
func (c *conn) watchRetry(u *upstream, name string, ahead []byte) error {
	answer, err := c.firstAnswer(u)
	if len(answer) > 0 {
		if passErr := c.pass(u, downward, c.client, answer); passErr != nil {
			return passErr
		}
	}
	if err != nil {
		return err
	}
	if !isRetry(answer) {
		return c.pass(u, upward, u.tcp, ahead)
	}
	again, err := c.secondHello(name, ahead)
	if err != nil {
		x := helloRefusal(err, u.rule)
		x.detail = "after a HelloRetryRequest: " + x.detail
		c.sendAlert(x.code)
		settle(c.client)
		return x
	}
	return c.pass(u, upward, u.tcp, again)
}

// firstAnswer reads what the server says first, at least as much as shows what it is. The end of the stream is
// no error: the relay finds it again.
func (c *conn) firstAnswer(u *upstream) ([]byte, error) {
	buf := relayBufs.Get().(*[relayBuf]byte)
	defer relayBufs.Put(buf)
	u.tcp.SetReadDeadline(time.Now().Add(c.p.cfg.Limits.Answer)) // closed: the read says so
	defer u.tcp.SetReadDeadline(time.Time{})                     // closed: whoever is next finds out
	n := 0
	for {
		k, err := u.tcp.Read(buf[n:])
		n += k
		switch {
		case errors.Is(err, io.EOF), err == nil && !mayBeRetry(buf[:n]):
			return bytes.Clone(buf[:n]), nil
		case err != nil:
			return bytes.Clone(buf[:n]), fmt.Errorf("waiting for the TLS server's first answer: %w", err)
		case n >= serverHelloHead:
			return bytes.Clone(buf[:n]), nil
		}
	}
}

// mayBeRetry says whether b is or may become the beginning of a HelloRetryRequest.
func mayBeRetry(b []byte) bool {
	return (len(b) < 1 || b[0] == recordHandshake) && (len(b) < 6 || b[5] == typeServerHello) &&
		(len(b) <= randomAt || bytes.HasPrefix(retryRandom, b[randomAt:min(len(b), serverHelloHead)]))
}

func isRetry(b []byte) bool { return len(b) >= serverHelloHead && mayBeRetry(b) }

// secondHello reads the ClientHello that answers a HelloRetryRequest, behind the ChangeCipherSpec that clients
// put in front of it for old middleboxes (RFC 8446, D.4). seen was read already. It returns all that was read.
func (c *conn) secondHello(name string, seen []byte) ([]byte, error) {
	ccs := []byte{recordCCS, 3, 3, 0, 1, 1}
	one := make([]byte, 1)
	c.client.SetReadDeadline(time.Now().Add(c.p.cfg.Limits.Hello)) // closed: the read says so
	for len(seen) < len(ccs) && bytes.HasPrefix(ccs, seen) {
		if _, err := c.client.Read(one); err != nil {
			return nil, err
		}
		seen = append(seen, one[0])
	}
	seen, behindCCS := bytes.CutPrefix(seen, ccs)
	h, raw, ahead, err := c.readHello(seen)
	c.letGo()
	if err == nil {
		if code, detail := h.judge(name); code != reason.OK {
			err = &helloError{code, detail}
		}
	}
	raw = append(raw, ahead...)
	if behindCCS {
		raw = append(ccs, raw...)
	}
	return raw, err
}
