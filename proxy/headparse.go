package proxy

import (
	"fmt"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"tagout/internal/reason"
)

// framing says where a request ends.
type framing struct {
	length  int64
	chunked bool
	tunnel  bool // CONNECT or a WebSocket: no further request is read
}

// headError says why a head is refused.
type headError struct {
	code   reason.Code
	detail string
}

func (e *headError) Error() string { return e.code.String() + ": " + e.detail }

func ambiguousHead(format string, args ...any) *headError {
	return &headError{reason.AmbiguousHTTP, fmt.Sprintf(format, args...)}
}

// parseHead reads a request head without its last two line ends. It refuses whatever two readers could take
// for different requests: RFC 9112, sections 2.2, 3.2, 5.1, 6.1 and 6.3.
func parseHead(text string) (head, framing, *headError) {
	line, rest, _ := strings.Cut(text, "\r\n")
	f, version, err := parseRequestLine(line)
	if err != nil {
		return f, framing{}, err
	}
	fields, err := parseFields(rest)
	if err != nil {
		return f, framing{}, err
	}
	if err := f.parseHost(fields, version); err != nil {
		return f, framing{}, err
	}
	if err := f.checkTarget(); err != nil {
		return f, framing{}, err
	}
	fr, err := parseFraming(fields, version)
	if err != nil {
		return f, fr, err
	}
	if expect := fields["expect"]; len(expect) > 1 || len(expect) == 1 && lowerASCII(expect[0]) != "100-continue" {
		return f, fr, ambiguousHead("Expect %q", clip(strings.Join(expect, ", "), 80))
	}
	f.tunnel = f.method == "CONNECT" || isWebSocket(fields)
	fr.tunnel = f.tunnel
	if fr.tunnel && (fr.chunked || fr.length > 0) {
		return f, fr, ambiguousHead("a body on a request for a tunnel")
	}
	return f, fr, nil
}

// isWebSocket says whether the request asks for a WebSocket (RFC 6455). Any other upgrade is one that a
// server may ignore (RFC 9110, 7.8), and the judge takes the wish out of the request.
func isWebSocket(fields map[string][]string) bool {
	upgrade := fields["upgrade"]
	if len(upgrade) != 1 || lowerASCII(upgrade[0]) != "websocket" {
		return false
	}
	for option := range strings.SplitSeq(strings.Join(fields["connection"], ","), ",") {
		if lowerASCII(strings.TrimSpace(option)) == "upgrade" {
			return true
		}
	}
	return false
}

// parseRequestLine reads "METHOD target HTTP/1.x".
func parseRequestLine(line string) (head, string, *headError) {
	parts := strings.Split(line, " ")
	if len(parts) != 3 || !isToken(parts[0]) {
		return head{}, "", &headError{reason.NotHTTP, "no request line"}
	}
	f, version := head{method: parts[0], target: parts[1]}, parts[2]
	if version != "HTTP/1.1" && version != "HTTP/1.0" {
		return f, "", &headError{reason.NotHTTP, fmt.Sprintf("version %q: use HTTP/1.1", clip(version, 20))}
	}
	for i := range len(f.target) {
		if c := f.target[i]; c <= 0x20 || c >= 0x7f || c == '#' {
			return f, "", ambiguousHead("a byte in the request target that belongs in no target")
		}
	}
	switch {
	case f.target == "":
		return f, "", ambiguousHead("an empty request target")
	case f.method == "CONNECT":
		f.authority = f.target
	case strings.HasPrefix(f.target, "/") || f.target == "*":
	default:
		scheme, after, found := strings.Cut(f.target, "://")
		if !found || lowerASCII(scheme) != "http" {
			return f, "", ambiguousHead("a request target that is neither a path nor an http URI; use CONNECT for https")
		}
		end := strings.IndexAny(after, "/?")
		if end < 0 {
			end = len(after)
		}
		f.authority = after[:end]
		if f.authority == "" {
			return f, "", ambiguousHead("a request target without a host")
		}
	}
	return f, version, nil
}

// parseFields reads header fields into a map with lower-case names.
func parseFields(text string) (map[string][]string, *headError) {
	fields := map[string][]string{}
	for text != "" {
		var line string
		line, text, _ = strings.Cut(text, "\r\n")
		name, value, err := parseField(line)
		if err != nil {
			return nil, err
		}
		fields[name] = append(fields[name], value)
	}
	return fields, nil
}

func parseField(line string) (name, value string, err *headError) {
	if line == "" || line[0] == ' ' || line[0] == '\t' {
		return "", "", ambiguousHead("a folded header line")
	}
	name, value, found := strings.Cut(line, ":")
	if !found || !isToken(name) {
		return "", "", ambiguousHead("a header line without a proper name")
	}
	for i := range len(value) {
		if c := value[i]; c < 0x20 && c != '\t' || c == 0x7f {
			return "", "", ambiguousHead("a control byte in header %s", clip(name, 40))
		}
	}
	return lowerASCII(name), strings.Trim(value, " \t"), nil
}

// parseHost wants exactly one Host (none will do for HTTP/1.0 with an absolute target), equal to the
// authority of an absolute target.
func (f *head) parseHost(fields map[string][]string, version string) *headError {
	hosts := fields["host"]
	switch {
	case len(hosts) > 1:
		return ambiguousHead("Host %d times", len(hosts))
	case len(hosts) == 1:
		f.host = hosts[0]
	case version == "HTTP/1.1" || f.authority == "":
		return &headError{reason.HostMismatch, "no Host"}
	default:
		f.host = f.authority
	}
	if f.host == "" {
		return &headError{reason.HostMismatch, "an empty Host"}
	}
	if f.authority != "" && f.method != "CONNECT" && plainHost(f.host) != plainHost(f.authority) {
		return ambiguousHead("the target says %q, Host says %q", clip(f.authority, 255), clip(f.host, 255))
	}
	return nil
}

// checkTarget refuses what the HTTP server would refuse by itself, without telling the judge.
func (f *head) checkTarget() *headError {
	if f.method == "CONNECT" {
		if _, err := url.ParseRequestURI("http://" + f.target); err != nil {
			return &headError{reason.NameInvalid, fmt.Sprintf("CONNECT to %q", clip(f.target, 255))}
		}
	} else if _, err := url.ParseRequestURI(f.target); err != nil {
		return ambiguousHead("a request target that cannot be parsed")
	}
	if !httpguts.ValidHostHeader(f.host) {
		return &headError{reason.NameInvalid, fmt.Sprintf("Host %q", clip(f.host, 255))}
	}
	return nil
}

// plainHost is an authority without the port that http implies.
func plainHost(authority string) string {
	return strings.TrimSuffix(lowerASCII(authority), ":80")
}

func parseFraming(fields map[string][]string, version string) (framing, *headError) {
	lengths, codings := fields["content-length"], fields["transfer-encoding"]
	switch {
	case len(lengths) > 0 && len(codings) > 0:
		return framing{}, ambiguousHead("Transfer-Encoding and Content-Length both")
	case len(lengths) > 1:
		return framing{}, ambiguousHead("Content-Length %d times", len(lengths))
	case len(codings) > 1:
		return framing{}, ambiguousHead("Transfer-Encoding %d times", len(codings))
	case len(codings) == 1:
		if lowerASCII(codings[0]) != "chunked" || version != "HTTP/1.1" {
			return framing{}, ambiguousHead("Transfer-Encoding %q in %s", clip(codings[0], 80), version)
		}
		return framing{chunked: true}, nil
	case len(lengths) == 1:
		digits := lengths[0]
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || strings.Trim(digits, "0123456789") != "" {
			return framing{}, ambiguousHead("Content-Length %q", clip(digits, 80))
		}
		return framing{length: n}, nil
	}
	return framing{}, nil
}

func isToken(s string) bool {
	for i := range len(s) {
		if !tokenByte(s[i]) {
			return false
		}
	}
	return s != ""
}

// tokenByte is RFC 9110's tchar.
func tokenByte(c byte) bool {
	alnum := 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9'
	return alnum || strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
}
