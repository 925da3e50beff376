package alert

import (
	"context"
	"fmt"
	"time"
)

// ErrRefused means that a receiver will never take what was sent.
var ErrRefused = errRefused

// HTTP posts to receivers as alerts are posted: it follows no redirect, and its errors do not quote the URL. Only one
// goroutine may use it.
type HTTP struct{ poster }

// NewHTTP returns one; Close it in the end.
func NewHTTP() *HTTP { return &HTTP{newPoster()} }

// Post sends body and returns the beginning of the answer. The error is an ErrRefused where another try would change
// nothing. Content-Type is JSON unless header says otherwise.
func (h *HTTP) Post(ctx context.Context, url string, body []byte, header map[string]string) ([]byte, error) {
	return h.ask(ctx, url, body, header)
}

// Close closes connections that are kept.
func (h *HTTP) Close() { h.close() }

// Signature is the value of SignatureHeader for body, now, with the key in a file.
func Signature(secretFile string, body []byte) (string, error) {
	secret, err := readSecret(secretFile)
	if err != nil {
		return "", err
	}
	return sign(secret, time.Now(), body), nil
}

// SyslogConn sends RFC 5424 messages to a receiver, udp://host:port, tcp://host:port or unix:///path. Only one goroutine may
// use it.
type SyslogConn struct{ *syslog }

// NewSyslog returns one for a URL that the configuration has checked; Close it in the end.
func NewSyslog(url string) (*SyslogConn, error) {
	s, err := newSyslog(Sink{URL: url})
	if err != nil {
		return nil, err
	}
	return &SyslogConn{s.(*syslog)}, nil
}

// Host is this machine's name as messages carry it.
func (s *SyslogConn) Host() string { return s.host }

// Stream says that messages go over one connection, which has no limit for their length.
func (s *SyslogConn) Stream() bool { return s.stream }

// Send sends messages. Over TCP it returns when the receiver's kernel has all of them.
func (s *SyslogConn) Send(ctx context.Context, messages [][]byte) error {
	err := s.sendAll(ctx, messages)
	if err != nil {
		s.close() // half a message may have gone out: the next begins on a new connection
	}
	return err
}

func (s *SyslogConn) sendAll(ctx context.Context, messages [][]byte) error {
	if !s.stream {
		for _, m := range messages {
			if err := s.write(ctx, m); err != nil {
				return err
			}
		}
		return nil
	}
	var all []byte
	for _, m := range messages {
		all = append(fmt.Appendf(all, "%d ", len(m)), m...)
	}
	return s.write(ctx, all)
}

// Close closes the connection.
func (s *SyslogConn) Close() { s.close() }

// Param is a value of structured data (RFC 5424, 6.3.3), escaped, without control characters and cut where it is long.
func Param(s string) string { return paramValue(s) }

// HeaderField is a field of a message's head: printable ASCII, "-" for nothing.
func HeaderField(s string, most int) string { return headerField(s, most) }
