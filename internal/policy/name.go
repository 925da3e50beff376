package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"tagout/internal/reason"
)

// Limits of RFC 1035, section 2.3.4, for the presentation form without the trailing dot.
const (
	maxName  = 253
	maxLabel = 63
	maxRaw   = 1024 // bytes of input that are looked at; U-labels may be longer than their A-labels
)

// NameError says why something is not a host name. Raw is quoted and cut, so that it can stand in a record.
type NameError struct {
	Raw     string      // what was asked for, at most 80 bytes
	Problem string      // what is wrong with it
	Addr    netip.Addr  // set where the name is an address in disguise: which one, unmapped
	Reason  reason.Code // NameInvalid; RawAddress or Metadata for an address
}

func (e *NameError) Error() string { return fmt.Sprintf("host name %q: %s", e.Raw, e.Problem) }

func nameError(raw, problem string) *NameError {
	return &NameError{Raw: cut(raw, 80), Problem: problem, Reason: reason.NameInvalid}
}

func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// idnaProfile maps as UTS #46 does for a lookup, non-transitionally. Which ASCII characters may stand in a
// label is not its business: checkASCII decides that for every name in the same way.
var idnaProfile = idna.New(
	idna.MapForLookup(), idna.Transitional(false), idna.BidiRule(), idna.CheckJoiners(true),
	idna.CheckHyphens(false), idna.StrictDomainName(false), idna.VerifyDNSLength(false),
)

// Name returns the one spelling under which a host name is matched, looked up and recorded: lower case,
// A-labels, no trailing dot, labels of 1-63 bytes out of a-z 0-9 - _, at most 253 bytes. It is the only
// normaliser: whatever came from a kid goes through it before it is compared with anything. The error is a
// *NameError. An address in any spelling (RFC 3986 and WHATWG: 0x7f.1, 2130706433, [::1]) is not a name.
// Name(Name(x)) == Name(x). A name that is canonical already costs no allocation.
func Name(raw string) (string, error) {
	switch {
	case raw == "" || raw == ".":
		return "", nameError(raw, "it is empty")
	case len(raw) > maxRaw:
		return "", nameError(raw, "it is too long")
	}
	name, plain, err := foldASCII(raw)
	if err != nil {
		return "", err
	}
	if !plain {
		if name, err = mapIDNA(raw, name); err != nil {
			return "", err
		}
	}
	name = strings.TrimSuffix(name, ".")
	if err := checkASCII(raw, name); err != nil {
		return "", err
	}
	if endsInNumber(name) {
		return "", addressError(raw, parseLooseIPv4(name))
	}
	return name, nil
}

// foldASCII lower-cases raw and refuses what no spelling of a name contains. plain is false where IDNA has a
// say: a byte outside ASCII or an A-label.
func foldASCII(raw string) (name string, plain bool, err error) {
	plain = true
	upper := false
	for i := range len(raw) {
		c := raw[i]
		switch {
		case c < 0x20 || c == 0x7f:
			return "", false, nameError(raw, "it contains a control byte")
		case c >= 0x80:
			plain = false
		case 'A' <= c && c <= 'Z':
			upper = true
		case c == ':' || c == '[' || c == ']' || c == '%' || c == '/':
			return "", false, literalError(raw)
		}
	}
	name = raw
	if upper {
		name = strings.ToLower(raw)
	}
	if plain && strings.Contains(name, "xn--") {
		plain = false
	}
	return name, plain, nil
}

func mapIDNA(raw, folded string) (string, error) {
	if !utf8.ValidString(raw) {
		return "", nameError(raw, "it is not valid UTF-8")
	}
	name, err := idnaProfile.ToASCII(folded)
	if err != nil {
		return "", nameError(raw, "it is not a valid internationalised name")
	}
	// Mapping may bring forth what foldASCII refuses (a full-width colon, say): look again.
	name, _, err = foldASCII(name)
	return name, err
}

// checkASCII checks lengths and characters of a folded name without its trailing dot.
func checkASCII(raw, name string) error {
	if name == "" {
		return nameError(raw, "it is empty")
	}
	if len(name) > maxName {
		return nameError(raw, "it is longer than 253 bytes")
	}
	start := 0
	for i := 0; i <= len(name); i++ {
		if i < len(name) && name[i] != '.' {
			if c := name[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
				return nameError(raw, "it contains a character that no host name has")
			}
			continue
		}
		label := name[start:i]
		switch {
		case label == "":
			return nameError(raw, "it has an empty label")
		case len(label) > maxLabel:
			return nameError(raw, "it has a label longer than 63 bytes")
		case label[0] == '-' || label[len(label)-1] == '-':
			return nameError(raw, "a label begins or ends with a hyphen")
		}
		start = i + 1
	}
	return nil
}

// literalError refuses what carries the punctuation of an address literal, and says which address it is.
func literalError(raw string) *NameError {
	host := strings.TrimSuffix(strings.TrimPrefix(raw, "["), "]")
	if addr, err := netip.ParseAddr(host); err == nil {
		return addressError(raw, addr)
	}
	return nameError(raw, "it contains a character that no host name has")
}

// addressError refuses an address that stands where a name belongs. addr may be invalid where the number is
// too big to be one.
func addressError(raw string, addr netip.Addr) *NameError {
	e := nameError(raw, "it is a number, not a name")
	e.Reason = reason.RawAddress
	if !addr.IsValid() {
		return e
	}
	e.Addr = effective(addr)
	e.Problem = "it is the address " + e.Addr.String() + ", not a name"
	if IsMetadata(addr) {
		e.Reason = reason.Metadata
	}
	return e
}

// endsInNumber is the "ends in a number" checker of the WHATWG URL standard: such a host is an IPv4 address
// or an error, never a name.
func endsInNumber(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	if strings.Trim(last, "0123456789") == "" {
		return true
	}
	hex, ok := strings.CutPrefix(last, "0x")
	return ok && strings.Trim(hex, "0123456789abcdef") == ""
}

// parseLooseIPv4 reads the spellings of inet_aton(3): one to four decimal, octal or hexadecimal parts, the
// last filling what is left. It returns the zero Addr where the parts do not make an address.
func parseLooseIPv4(name string) netip.Addr {
	parts := strings.Split(name, ".")
	if len(parts) > 4 {
		return netip.Addr{}
	}
	var value uint64
	for i, part := range parts {
		n, err := parseLooseNumber(part)
		bits := 8
		if i == len(parts)-1 {
			bits = 8 * (5 - len(parts))
		}
		if err != nil || n >= 1<<bits {
			return netip.Addr{}
		}
		value = value<<bits | n
	}
	return netip.AddrFrom4([4]byte{byte(value >> 24), byte(value >> 16), byte(value >> 8), byte(value)})
}

func parseLooseNumber(part string) (uint64, error) {
	switch {
	case part == "0x":
		return 0, nil
	case strings.HasPrefix(part, "0x"):
		return strconv.ParseUint(part[2:], 16, 64)
	case len(part) > 1 && part[0] == '0':
		return strconv.ParseUint(part[1:], 8, 64)
	}
	return strconv.ParseUint(part, 10, 64)
}

// Authority splits an HTTP authority (a Host field, a CONNECT target, :authority) into its canonical name and
// its port, 0 where it has none. The error is a *NameError. Userinfo is refused.
func Authority(raw string) (name string, port uint16, err error) {
	host, rest, found := raw, "", false
	if end := strings.LastIndexByte(raw, ']'); strings.HasPrefix(raw, "[") && end > 0 {
		host, rest = raw[:end+1], raw[end+1:]
		rest, found = strings.CutPrefix(rest, ":")
		if rest != "" && !found {
			return "", 0, nameError(raw, "it is not a host with a port")
		}
	} else if i := strings.IndexByte(raw, ':'); i >= 0 && strings.Count(raw, ":") == 1 {
		host, rest, found = raw[:i], raw[i+1:], true
	}
	if found {
		if port, err = parsePort(rest); err != nil {
			return "", 0, nameError(raw, "its port is not a number from 1 to 65535")
		}
	}
	name, err = Name(host)
	if err != nil {
		return "", 0, err
	}
	return name, port, nil
}

// parsePort is strict where strconv is not: digits only, no sign, no leading zero, never 0.
func parsePort(s string) (uint16, error) {
	if s == "" || s[0] < '1' || s[0] > '9' {
		return 0, strconv.ErrSyntax
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err // ParseUint was told 16 bits
}
