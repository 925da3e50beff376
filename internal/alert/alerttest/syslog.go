// Package alerttest holds receivers of alerts for tests: a syslog receiver that reads RFC 5424 strictly, a
// webhook that checks signatures as a user's would, and a real Alertmanager.
package alerttest

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

// Message is a syslog message, taken apart.
type Message struct {
	Facility, Severity       int
	Time                     time.Time
	Host, App, ProcID, MsgID string
	StructuredID, Text       string
	Params                   map[string]string // of the only element
}

// header is RFC 5424's HEADER up to and with the space behind it: printable ASCII fields of bounded length.
var header = regexp.MustCompile(`^<(0|[1-9][0-9]{0,2})>1 ([0-9T:.Z+-]{20,32}) ([!-~]{1,255}) ([!-~]{1,48}) ([!-~]{1,128}) ([!-~]{1,32}) `)

// sdName is SD-NAME: no =, space, ] or ".
var sdName = regexp.MustCompile(`^[!#-<>-\\^-~]{1,32}`)

// ParseMessage reads one message with exactly one structured data element, as RFC 5424 section 6 has it, and
// refuses everything else.
func ParseMessage(raw []byte) (Message, error) {
	m := Message{Params: map[string]string{}}
	h := header.FindSubmatch(raw)
	if h == nil {
		return m, errors.New("the header is not RFC 5424's")
	}
	pri, err := strconv.Atoi(string(h[1]))
	if err != nil || pri > 191 {
		return m, fmt.Errorf("priority %s", h[1])
	}
	m.Facility, m.Severity = pri/8, pri%8
	if m.Time, err = time.Parse(time.RFC3339Nano, string(h[2])); err != nil {
		return m, fmt.Errorf("time stamp: %w", err)
	}
	m.Host, m.App, m.ProcID, m.MsgID = string(h[3]), string(h[4]), string(h[5]), string(h[6])
	rest, err := m.parseElement(raw[len(h[0]):])
	if err != nil {
		return m, err
	}
	if len(rest) > 0 {
		if rest[0] != ' ' {
			return m, errors.New("no space before the text")
		}
		m.Text = string(rest[1:])
	}
	for _, r := range m.Text { // without a byte order mark it is to be ASCII
		if r < 32 || r > 126 {
			return m, fmt.Errorf("the text has the character %U", r)
		}
	}
	return m, nil
}

// parseElement reads "[ID NAME="VALUE" ...]" and returns what follows.
func (m *Message) parseElement(s []byte) ([]byte, error) {
	if len(s) == 0 || s[0] != '[' {
		return nil, errors.New("no structured data")
	}
	s = s[1:]
	id := sdName.Find(s)
	if id == nil {
		return nil, errors.New("structured data without a name")
	}
	m.StructuredID, s = string(id), s[len(id):]
	for len(s) > 0 && s[0] == ' ' {
		name := sdName.Find(s[1:])
		if name == nil {
			return nil, errors.New("a parameter without a name")
		}
		s = s[1+len(name):]
		if len(s) < 2 || s[0] != '=' || s[1] != '"' {
			return nil, fmt.Errorf("parameter %s has no quoted value", name)
		}
		value, rest, err := parseValue(s[2:])
		if err != nil {
			return nil, fmt.Errorf("parameter %s: %w", name, err)
		}
		if _, twice := m.Params[string(name)]; twice {
			return nil, fmt.Errorf("parameter %s is there twice", name)
		}
		m.Params[string(name)], s = value, rest
	}
	if len(s) == 0 || s[0] != ']' {
		return nil, errors.New("structured data does not end")
	}
	return s[1:], nil
}

// parseValue reads up to the closing quote. Only ", \ and ] are escaped, and each of them must be.
func parseValue(s []byte) (value string, rest []byte, err error) {
	var out []byte
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == '"':
			if !utf8.Valid(out) {
				return "", nil, errors.New("not UTF-8")
			}
			return string(out), s[i+1:], nil
		case c == ']':
			return "", nil, errors.New("] is not escaped")
		case c == '\\':
			if i++; i == len(s) || s[i] != '"' && s[i] != '\\' && s[i] != ']' {
				return "", nil, errors.New("an escape that there is not")
			}
			out = append(out, s[i])
		case c < 32 || c == 127:
			return "", nil, fmt.Errorf("control character %#x", c)
		default:
			out = append(out, c)
		}
	}
	return "", nil, errors.New("the value does not end")
}

// SyslogServer receives messages. Each that is not RFC 5424 fails the test.
type SyslogServer struct {
	URL string
	t   testing.TB

	mu    sync.Mutex
	got   []Message  // guarded by mu
	conns []net.Conn // guarded by mu
	stop  func()
}

// StartSyslog starts a receiver. kind is udp, tcp or unix; address is empty for one of the test's own, or that
// of a receiver that was stopped. It ends with the test.
func StartSyslog(t testing.TB, kind, address string) *SyslogServer {
	t.Helper()
	s := &SyslogServer{t: t}
	var err error
	switch kind {
	case "tcp":
		err = s.listenTCP(or(address, "127.0.0.1:0"))
	case "udp":
		err = s.listenPackets(kind, or(address, "127.0.0.1:0"))
	case "unix":
		err = s.listenPackets("unixgram", or(address, filepath.Join(t.TempDir(), "log")))
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func or(s, instead string) string {
	if s == "" {
		return instead
	}
	return s
}

func (s *SyslogServer) listenTCP(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	s.URL = "tcp://" + l.Addr().String()
	s.stop = func() { l.Close() }
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			go s.readStream(conn)
		}
	}()
	return nil
}

// readStream reads octet-counted messages (RFC 6587, 3.4.1).
func (s *SyslogServer) readStream(conn net.Conn) {
	defer conn.Close()
	r := bufio.NewReader(conn)
	for {
		digits, err := r.ReadString(' ')
		if err != nil {
			return
		}
		n, err := strconv.Atoi(digits[:len(digits)-1])
		if err != nil || n < 1 || digits[0] == '0' || n > 65536 {
			s.t.Errorf("a message of %q bytes", digits)
			return
		}
		raw := make([]byte, n)
		if _, err := io.ReadFull(r, raw); err != nil {
			return
		}
		s.take(raw)
	}
}

func (s *SyslogServer) listenPackets(network, address string) error {
	conn, err := net.ListenPacket(network, address)
	if err != nil {
		return err
	}
	s.URL = "udp://" + conn.LocalAddr().String()
	if network == "unixgram" {
		s.URL = "unix://" + address
	}
	s.stop = func() { conn.Close() }
	go func() {
		buf := make([]byte, 65536)
		for {
			n, _, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if n > 2048 {
				s.t.Errorf("a datagram of %d bytes", n)
			}
			s.take(buf[:n])
		}
	}()
	return nil
}

func (s *SyslogServer) take(raw []byte) {
	m, err := ParseMessage(raw)
	if err != nil {
		s.t.Errorf("not RFC 5424: %v: %q", err, raw)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.got = append(s.got, m)
}

// Messages returns what arrived.
func (s *SyslogServer) Messages() []Message {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Message(nil), s.got...)
}

// Stop closes the receiver and its connections.
func (s *SyslogServer) Stop() {
	s.stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.conns {
		c.Close()
	}
	s.conns = nil
}
