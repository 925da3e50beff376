package alert

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"golang.org/x/sys/unix"
)

const (
	facility = 10 // security and authorization messages, private (RFC 5424, table 1)
	// structuredID names our structured data. 32473 is the enterprise number for examples (RFC 5612): Tagout has
	// none of its own.
	structuredID = "tagout@32473"
	maxParam     = 256 // bytes of a value; with it a message fits the 2,048 bytes that receivers should take
)

// syslog sends RFC 5424 messages: one a datagram over UDP (RFC 5426) or a unix socket, octet-counted over TCP
// (RFC 6587, 3.4.1).
type syslog struct {
	network, address string
	stream           bool
	host             string
	conn             net.Conn // nil: not connected
}

func newSyslog(s Sink) (sender, error) {
	u, err := url.Parse(s.URL)
	if err != nil {
		return nil, err
	}
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	l := &syslog{network: u.Scheme, address: u.Host, stream: u.Scheme == "tcp", host: headerField(host, 255)}
	if u.Scheme == "unix" {
		l.network, l.address = "unixgram", u.Path
	}
	return l, nil
}

func (l *syslog) close() {
	if l.conn != nil {
		l.conn.Close() // what was sent was sent
		l.conn = nil
	}
}

func (l *syslog) send(ctx context.Context, a *alert) error {
	return l.deliver(ctx, message(a, l.host))
}

// deliver sends one message.
func (l *syslog) deliver(ctx context.Context, msg []byte) error {
	if l.stream {
		msg = append([]byte(strconv.Itoa(len(msg))+" "), msg...)
	}
	err := l.write(ctx, msg)
	if err != nil {
		l.close() // half a message may have gone out: the next begins on a new connection
	}
	return err
}

func (l *syslog) write(ctx context.Context, msg []byte) error {
	if l.conn != nil && l.stream && hungUp(l.conn) {
		l.close()
	}
	if l.conn == nil {
		conn, err := new(net.Dialer).DialContext(ctx, l.network, l.address)
		if err != nil {
			return err
		}
		l.conn = conn
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := l.conn.SetWriteDeadline(deadline); err != nil {
			return err
		}
	}
	if _, err := l.conn.Write(msg); err != nil {
		return err
	}
	if l.stream {
		return acknowledged(ctx, l.conn)
	}
	return nil
}

// hungUp says whether the receiver has closed the connection. Syslog has no answers, so whatever it sends is
// thrown away.
func hungUp(conn net.Conn) bool {
	gone := true
	buf := make([]byte, 512)
	err := control(conn, func(fd int) {
		for {
			n, _, err := unix.Recvfrom(fd, buf, unix.MSG_DONTWAIT)
			if n > 0 && err == nil {
				continue
			}
			gone = !errors.Is(err, unix.EAGAIN)
			return
		}
	})
	return err != nil || gone
}

// acknowledged waits until the receiver's TCP has everything (SIOCOUTQ, tcp(7)). It is the most that syslog over
// TCP can tell: a write alone succeeds towards a receiver that is long gone. One that ends with unread messages
// resets the connection, which is an error here when it comes in time.
func acknowledged(ctx context.Context, conn net.Conn) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		left, soErr := 1, 0
		err := control(conn, func(fd int) {
			var err error
			if left, err = unix.IoctlGetInt(fd, unix.SIOCOUTQ); err != nil {
				left = 1
			}
			soErr, _ = unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		})
		switch {
		case err != nil:
			return err
		case soErr != 0:
			return syscall.Errno(soErr)
		case left == 0:
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waiting until the receiver has it: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

func control(conn net.Conn, fn func(fd int)) error {
	sc, ok := conn.(syscall.Conn)
	if !ok {
		return errors.New("this connection has no descriptor")
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) { fn(int(fd)) })
}

// message writes the alert as RFC 5424 wants it. The text is ASCII, the values are UTF-8.
func message(a *alert, host string) []byte {
	level := 4 // warning
	if severity(a.key.reason) == Critical {
		level = 2
	}
	var b bytes.Buffer
	fmt.Fprintf(&b, "<%d>1 %s %s tagout %d denied [%s", facility*8+level, a.first.UTC().Format("2006-01-02T15:04:05.000000Z07:00"),
		host, os.Getpid(), structuredID)
	for _, p := range params(a) {
		if p[1] != "" {
			fmt.Fprintf(&b, ` %s="%s"`, p[0], paramValue(p[1]))
		}
	}
	b.WriteString("] " + a.describe())
	return b.Bytes()
}

// params are names and values of the structured data, in order.
func params(a *alert) [][2]string {
	r := &a.record
	out := [][2]string{
		{"instance", r.Instance}, {"daemon", r.Daemon}, {"event", r.ID}, {"kid", a.key.kid}, {"session", r.Session}, {"card", r.Card},
		{"destination", a.key.destination}, {"reason", a.key.reason.String()}, {"severity", severity(a.key.reason)},
		{"count", strconv.FormatUint(a.count, 10)}, {"last", a.last.UTC().Format(time.RFC3339Nano)},
	}
	if r.Dst != nil {
		out = append(out, [2]string{"proto", r.Dst.Proto})
	}
	if p := r.Process; p != nil {
		out = append(out, [2]string{"pid", strconv.Itoa(p.PID)}, [2]string{"comm", p.Comm}, [2]string{"exe", p.Exe})
	}
	return out
}

// paramValue escapes a value (RFC 5424, 6.3.3). Kids choose some of them: control characters are replaced, so
// that no receiver takes a value for a second message, and long ones are cut.
func paramValue(s string) string {
	if len(s) > maxParam {
		s = s[:maxParam]
		for !utf8.ValidString(s) && len(s) > maxParam-utf8.UTFMax {
			s = s[:len(s)-1]
		}
	}
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) {
			return utf8.RuneError
		}
		return r
	}, strings.ToValidUTF8(s, "\uFFFD"))
	return strings.NewReplacer(`\`, `\\`, `"`, `\"`, `]`, `\]`).Replace(s)
}

// headerField returns s as a header field of printable ASCII, "-" where nothing is left.
func headerField(s string, most int) string {
	s = strings.Map(func(r rune) rune {
		if r < 33 || r > 126 {
			return -1
		}
		return r
	}, s)
	if len(s) > most {
		s = s[:most]
	}
	return orDash(s)
}

// NoteSender sends notes to a syslog receiver: udp://host:port, tcp://host:port or unix:///path. Only one goroutine may use it.
type NoteSender struct{ s *syslog }

// NewNoteSender returns a sender. Nothing is dialled yet.
func NewNoteSender(url string) (*NoteSender, error) {
	s, err := newSyslog(Sink{URL: url})
	if err != nil {
		return nil, err
	}
	return &NoteSender{s.(*syslog)}, nil
}

// SendNote sends a text of some lines, in base64, as one message of facility 13 (log audit). id names what it is.
func (s *NoteSender) SendNote(ctx context.Context, id, log string, note []byte) error {
	const auditNotice = 13*8 + 5
	return s.s.deliver(ctx, fmt.Appendf(nil, `<%d>1 %s %s tagout %d %s [%s log="%s" note="%s"] %s of the audit log of %s`, auditNotice,
		time.Now().UTC().Format("2006-01-02T15:04:05.000000Z07:00"), s.s.host, os.Getpid(), id, structuredID,
		paramValue(log), base64.StdEncoding.EncodeToString(note), id, headerField(log, 64)))
}
