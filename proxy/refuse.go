package proxy

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TLS alert descriptions (RFC 8446, section 6).
const (
	alertUnexpected       = 10
	alertHandshakeFailure = 40
	alertAccessDenied     = 49
	alertDecodeError      = 50
	alertProtocolVersion  = 70
	alertInternal         = 80
	alertMissingExtension = 109
	alertUnsupportedExt   = 110
	alertUnrecognizedName = 112
)

// problem is the body of a refusal: RFC 9457, with what a program needs to act on it.
type problem struct {
	wire.Problem
	Name string `json:"name,omitempty"`
	Port uint16 `json:"port,omitempty"`
	Rule int    `json:"rule,omitempty"` // line in the card
	Host string `json:"rule_host,omitempty"`
	Hint string `json:"hint,omitempty"`  // what would have to change
	Ask  string `json:"grant,omitempty"` // what an operator can run to let it pass for a while
	Conn string `json:"conn,omitempty"`  // joins the records in the audit log
}

// problem puts a refusal into words for the kid.
func (c *conn) problem(x refusal, t target) problem {
	info := x.code.Info()
	status := http.StatusForbidden
	if x.outcome() == audit.OutcomeFail || x.code == reason.UpstreamTLS {
		status = http.StatusBadGateway
	}
	detail := info.Text
	if x.detail != "" {
		detail += " (" + x.detail + ")"
	}
	out := problem{
		Problem: wire.Problem{
			Type: "urn:tagout:reason:" + info.Word, Title: "Refused by Tagout: " + info.Word,
			Status: status, Detail: detail, Reason: x.code,
		},
		Name: t.name, Port: t.port, Hint: info.Hint, Conn: c.id, Ask: c.askFor(x.code, t),
	}
	if x.rule != nil {
		out.Rule, out.Host = x.rule.Line, x.rule.Host
	}
	return out
}

// askFor returns the command by which an operator grants what was refused, where a grant can.
func (c *conn) askFor(code reason.Code, t target) string {
	switch code {
	case reason.NameNotAllowed, reason.PublicSuffix, reason.PortNotAllowed, reason.Expired:
	default:
		return ""
	}
	if t.name == "" || t.port == 0 || c.sess == nil {
		return ""
	}
	grantor := ""
	if c.p.cfg.Grantor != nil {
		grantor = c.p.cfg.Grantor()
	}
	return policy.GrantCommand(c.sess.doc.Kid, t.name, t.port, grantor)
}

func (p problem) body() []byte {
	raw, err := json.Marshal(p)
	if err != nil { // the form is fixed: only a bug gets here, and a refusal must not fail
		return []byte(`{"title":"refused","status":403}` + "\n")
	}
	return append(raw, '\n')
}

// answer writes the refusal as a whole HTTP/1.1 response and asks the client to hang up.
func (c *conn) answer(x refusal, w interface{ Write([]byte) (int, error) }) {
	prob := c.problem(x, c.aimedAt())
	body := prob.body()
	fmt.Fprintf(w, "HTTP/1.1 %d %s\r\nContent-Type: application/problem+json\r\nContent-Length: %d\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n%s", // the client is gone
		prob.Status, http.StatusText(prob.Status), len(body), body)
}

// alertFor picks the TLS alert that comes closest to the reason.
func alertFor(code reason.Code) byte {
	switch code {
	case reason.SNIMissing:
		return alertMissingExtension
	case reason.SNIMismatch:
		return alertUnrecognizedName
	case reason.ECH:
		return alertUnsupportedExt
	case reason.TLSVersion, reason.SSLv2:
		return alertProtocolVersion
	case reason.Malformed:
		return alertDecodeError
	case reason.NotTLS:
		return alertUnexpected
	case reason.ResolveFailed, reason.DialFailed:
		return alertHandshakeFailure
	case reason.Internal, reason.Capacity:
		return alertInternal
	}
	return alertAccessDenied
}

// sendAlert writes a fatal alert in a record of its own; a client that has sent a hello understands it.
func (c *conn) sendAlert(code reason.Code) {
	c.client.Write([]byte{21, 3, 3, 0, 2, 2, alertFor(code)}) // the client is gone
}

// sniffTime is how long a refused client may take to show what it speaks.
const sniffTime = time.Second

// refuseInItsWords records the refusal and tells the client in the protocol that it speaks: an alert for TLS,
// a 403 for HTTP, a RST for everything else. seen is what was read of it so far.
func (c *conn) refuseInItsWords(x refusal, seen []byte) {
	c.recordRefused(x)
	if c.pending {
		c.answer(x, c.client)
		c.hangUp()
		return
	}
	if len(seen) == 0 {
		buf := make([]byte, 16)
		c.client.SetReadDeadline(time.Now().Add(sniffTime)) // closed: the read says so
		n, err := c.client.Read(buf)
		if err != nil && n == 0 {
			reset(c.client)
			return
		}
		seen = buf[:n]
	}
	c.client.SetWriteDeadline(time.Now().Add(sniffTime)) // closed: the write says so
	switch {
	case seen[0] == recordHandshake, x.code == reason.SSLv2 && speaksTLS(seen):
		c.sendAlert(x.code)
	case couldBeMethod(seen) && 'A' <= seen[0] && seen[0] <= 'Z':
		c.answer(x, c.client)
	default:
		reset(c.client)
		return
	}
	c.hangUp()
}
