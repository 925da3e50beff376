// Package reason is the one table of reason codes: the same word in a DNS answer, an HTTP refusal, an audit
// record, an alert, a metric label and the documentation. Numbers are the ones that the BPF programs emit
// (bpf/verdict.h carries the same list; a test compares the two).
package reason

// Code is a reason code. The zero value means that nothing was refused.
type Code uint8

// Codes. Never renumber: the numbers are in pinned maps and in logs.
const (
	OK              Code = 0
	UnknownSession  Code = 1  // no session entry: kid, mark or link unknown
	Stopped         Code = 2  // the session or the whole box is stopped
	LeaseExpired    Code = 3  // the session's lease has run out
	RawAddress      Code = 4  // TCP to an address that no name stands for
	PortNotAllowed  Code = 5  // the port is on no rule of the session
	DNSBypass       Code = 6  // DNS to anything but the gateway
	DoT             Code = 7  // DNS over TLS (port 853)
	QUIC            Code = 8  // UDP to port 443
	UDPNotAllowed   Code = 9  // any other UDP
	Metadata        Code = 10 // a cloud metadata address
	IPv6            Code = 11 // any IPv6 destination
	RawSocket       Code = 12 // raw, packet or other socket types
	Protocol        Code = 13 // an IP protocol other than TCP and UDP
	Fragment        Code = 14 // a non-first IP fragment
	SpoofedSource   Code = 15 // a source address that is not the kid's
	HostAddress     Code = 16 // the gateway's other ports, the host, a neighbour
	Multicast       Code = 17 // multicast or broadcast
	Malformed       Code = 18 // bytes that are not what they claim to be
	ConnectRate     Code = 19 // new connections come faster than one kid may open them
	NotInReach      Code = 20 // an address that the reach of a card on the machine's network does not name
	HostPort        Code = 21 // a port of the machine's own
	NameNotAllowed  Code = 32 // no rule names this host
	NameInvalid     Code = 33 // not a host name
	DenyRule        Code = 34 // a deny rule matched
	VirtualUnknown  Code = 35 // a virtual address that was never given out to this session
	SNIMissing      Code = 36
	SNIMismatch     Code = 37
	ECH             Code = 38 // encrypted client hello
	NotTLS          Code = 39
	TLSVersion      Code = 40
	HostMismatch    Code = 41 // HTTP Host or :authority differs from the name
	NotHTTP         Code = 42
	AmbiguousHTTP   Code = 43
	MethodDenied    Code = 44
	PathDenied      Code = 45
	PrivateAnswer   Code = 46 // the upstream name resolved to a private, loopback or metadata address
	ResolveFailed   Code = 47
	DialFailed      Code = 48
	UpstreamTLS     Code = 49
	TokenUnknown    Code = 50 // token not known, expired or revoked
	TokenScope      Code = 51 // token presented towards a host it is not bound to
	CreddDown       Code = 52
	QueryType       Code = 53
	RateLimit       Code = 54
	Capacity        Code = 55 // a cap or a queue is full
	PolicyNotLoaded Code = 56
	Tagged          Code = 57 // a tag hangs on this scope
	Idle            Code = 58
	Internal        Code = 59
	SecretDenied    Code = 60 // payment_* and what the box's configuration denies
	SecretUnknown   Code = 61 // the vault holds no such secret
	ByteLimit       Code = 62 // the rule's max_bytes is used up
	Expired         Code = 63 // the rule or grant has run out
	WildcardLimit   Code = 64 // too many names, or too odd ones, under one wildcard
	SSLv2           Code = 65 // an SSLv2 hello
	PolicyChanged   Code = 66 // a newer policy no longer allows the connection
	OrderInvalid    Code = 67 // an order that cannot be read
	OrderKey        Code = 68 // an order without a signature that counts here
	OrderBox        Code = 69 // an order for another box
	OrderExpired    Code = 70 // an order whose time is over, or has not come
	OrderReplayed   Code = 71 // an order that was used before
	OrderRole       Code = 72 // an order from somebody without the role
	OrderUnsigned   Code = 73 // an order that needs a signature and has none
	OrderNotKept    Code = 74 // an order whose use cannot be noted on disk
	Canary          Code = 75 // a canary name or a canary credential
	Tripped         Code = 76 // a trip rule stopped the kid
	PublicSuffix    Code = 77 // a name under a public suffix below the pattern that would allow it

	KeyReused       Code = 90 // an Idempotency-Key that was used for another request
	KeyBusy         Code = 91 // the request that has this Idempotency-Key is still under way
	KeyUnknown      Code = 92 // nobody knows what became of the request that had this Idempotency-Key
	Unauthenticated Code = 93 // a caller without a key or certificate that counts here
	RoleMissing     Code = 94 // a caller without the role that a route needs
	PathRefused     Code = 95 // a path that leads out of a kid's writable places, or through a link
	FileKind        Code = 96 // neither a regular file nor a directory
	TooLarge        Code = 97 // more bytes, files or levels than are carried
	DigestMismatch  Code = 98 // bytes that are not those that a digest or a signature vouches for
	SourceFailed    Code = 99 // the source of an image cannot be read, or holds none
	ImageInUse      Code = 100
	OutOfMemory     Code = 101 // the kid ran out of memory, and all of it was killed
	CrossOrigin     Code = 103 // a web page of another address asks
	LooksLikeKey    Code = 111 // what a kid is given looks like a long-lived key
	VaultSealed     Code = 110 // nobody has opened the vault
	AuditSpace      Code = 120 // the disk of the audit logs is nearly full
	LeaseFailed     Code = 112 // a provider gave no lease, or the lease is over
)

// Info describes a code for people.
type Info struct {
	Word string // the stable word that stands in records
	Text string // what happened, one plain sentence
	Hint string // what would have to change
}

const hintCard = "add a rule for it to the job card's egress section"

var table = map[Code]Info{
	OK:              {"ok", "allowed", ""},
	UnknownSession:  {"unknown-session", "no session is known for the sender", "spawn the kid again"},
	Stopped:         {"stopped", "the session is stopped", "release the tag; a stopped kid is not restarted"},
	LeaseExpired:    {"lease-expired", "the session's lease has run out", "killswitchd does not renew it: see `tagout status` and its log"},
	RawAddress:      {"raw-address", "the destination is an address that no allowed name stands for", "use a host name that the card allows"},
	PortNotAllowed:  {"port-not-allowed", "no rule of the card allows this port", hintCard},
	DNSBypass:       {"dns-bypass", "DNS to another resolver than the gateway", "use the resolver in /etc/resolv.conf"},
	DoT:             {"dot", "DNS over TLS is not allowed", "use the resolver in /etc/resolv.conf"},
	QUIC:            {"quic", "QUIC and HTTP/3 are not allowed", "use HTTPS over TCP"},
	UDPNotAllowed:   {"udp-not-allowed", "UDP is not allowed", "use TCP to an allowed name"},
	Metadata:        {"metadata-address", "cloud metadata addresses are never reachable", ""},
	IPv6:            {"ipv6", "IPv6 is not available to kids", "use the name's IPv4 address"},
	RawSocket:       {"raw-socket", "this socket type is not allowed", "use TCP"},
	Protocol:        {"ip-protocol", "this IP protocol is not allowed", "use TCP"},
	Fragment:        {"fragment", "IP fragments are not allowed", ""},
	SpoofedSource:   {"spoofed-source", "the source address is not the kid's", ""},
	HostAddress:     {"host-address", "the box's own and other kids' addresses are not reachable", ""},
	Multicast:       {"multicast", "multicast and broadcast are not allowed", ""},
	Malformed:       {"malformed", "the message cannot be parsed", ""},
	ConnectRate:     {"connect-rate", "the kid opens connections faster than it may", "open fewer a second, or keep them open"},
	NotInReach:      {"not-in-reach", "the card's reach does not name this address and port", "add it to the card's reach, and have the new card approved"},
	HostPort:        {"host-port", "a kid on the machine's network takes none of the machine's ports", "use a kid with a network of its own to serve something"},
	NameNotAllowed:  {"name-not-allowed", "no rule of the card names this host", hintCard},
	NameInvalid:     {"name-invalid", "this is not a valid host name", ""},
	DenyRule:        {"deny-rule", "a deny rule of the card matches", "a deny rule always wins: change the rule"},
	VirtualUnknown:  {"virtual-unknown", "this virtual address was not given out to this session", "look the name up again"},
	SNIMissing:      {"sni-missing", "the TLS hello names no server", "use a client that sends SNI"},
	SNIMismatch:     {"sni-mismatch", "the TLS hello names another server than the one looked up", ""},
	ECH:             {"ech", "encrypted client hello hides the server name", "turn ECH off in the client"},
	NotTLS:          {"not-tls", "the rule says TLS and this is not TLS", "use TLS, or change the rule's protocol"},
	TLSVersion:      {"tls-version", "TLS older than 1.2 is not allowed", "use TLS 1.2 or newer"},
	HostMismatch:    {"host-mismatch", "the HTTP host differs from the name looked up", ""},
	NotHTTP:         {"not-http", "the rule says HTTP and this is not HTTP", "use HTTP, or change the rule's protocol"},
	AmbiguousHTTP:   {"ambiguous-http", "the HTTP request can be read in two ways", ""},
	MethodDenied:    {"method-not-allowed", "no rule of the card allows this method here", hintCard},
	PathDenied:      {"path-not-allowed", "no rule of the card allows this path", hintCard},
	PrivateAnswer:   {"private-answer", "the name resolves to a private or metadata address", "grant the address in the rule, if it is meant"},
	ResolveFailed:   {"resolve-failed", "the name could not be resolved upstream", ""},
	DialFailed:      {"dial-failed", "the upstream server could not be reached", ""},
	UpstreamTLS:     {"upstream-tls", "the upstream server's certificate is not trusted", ""},
	TokenUnknown:    {"token-unknown", "the token is unknown, expired or revoked", ""},
	TokenScope:      {"token-scope", "the token is not for this host, place, method or path", ""},
	CreddDown:       {"credd-down", "the credential daemon does not answer", "start credd"},
	QueryType:       {"query-type", "this DNS query type is not answered", ""},
	RateLimit:       {"rate-limit", "too many requests in a short time", ""},
	Capacity:        {"capacity", "a limit of the box is reached", ""},
	PolicyNotLoaded: {"policy-not-loaded", "the session's policy is not loaded", "spawn the kid again"},
	Tagged:          {"tagged", "a tag hangs here: somebody stopped this", "ask whoever placed the tag to release it"},
	Idle:            {"idle", "the connection was idle for too long", ""},
	SecretDenied:    {"secret-denied", "this secret can never be granted to a kid", "take it off the card"},
	SecretUnknown:   {"secret-unknown", "the vault holds no secret of this name", "put it into the vault, or take it off the card"},
	ByteLimit:       {"byte-limit", "the rule's byte limit is used up", "raise max_bytes in the card's rule"},
	Expired:         {"expired", "the rule or grant has run out", "ask for a grant, or change the rule's expiry"},
	WildcardLimit:   {"wildcard-limit", "too many or too unusual names were asked for under a wildcard", "name the hosts in the card one by one"},
	SSLv2:           {"sslv2", "this is an SSLv2 hello", "use TLS 1.2 or newer"},
	PolicyChanged:   {"policy-changed", "a newer policy no longer allows this connection", ""},
	OrderInvalid:    {"order-invalid", "the order cannot be read", "sign it with --key"},
	OrderKey:        {"order-key", "no key of the box's authority list signed the order for the person whom it names", "sign it with that person's key"},
	OrderBox:        {"order-box", "the order is for another box", "sign one for this box"},
	OrderExpired:    {"order-expired", "the order is out of date, or from the future", "sign a new one; compare the clocks"},
	OrderReplayed:   {"order-replayed", "the order was used before", "sign a new one"},
	OrderRole:       {"order-role", "whoever signed the order does not hold the role", "ask somebody who does"},
	OrderUnsigned:   {"order-unsigned", "the order needs a signature", "sign it with --key"},
	OrderNotKept:    {"order-not-kept", "that the order was used cannot be noted on disk", "make room on the disk"},
	Canary:          {"canary", "this name or credential is a canary: nobody has a reason to use it", "find out how the kid came to it"},
	Tripped:         {"tripped", "a trip rule stopped the kid", "see the tag: it names the rule, what was measured and the limit"},
	PublicSuffix:    {"public-suffix", "anybody can have names there, so no pattern of the card stands for this one", "name the host in the card, without stars"},
	KeyReused:       {"key-reused", "the Idempotency-Key was used for another request", "use a new key for a new request"},
	KeyBusy:         {"key-busy", "the request with this Idempotency-Key is still under way", "ask again in a while, with the same key"},
	KeyUnknown:      {"key-unknown", "what became of the request with this Idempotency-Key is not known", "look what is there, then use a new key"},
	Unauthenticated: {"unauthenticated", "no API key or client certificate that counts here", "make a key with `tagout apikey add`"},
	RoleMissing:     {"role-missing", "the caller does not hold the role that this needs", "use a key that has it"},
	PathRefused:     {"path-refused", "the path leads out of the kid's writable places, or through a link", "name a file below /workspace or /tmp, without links"},
	FileKind:        {"file-kind", "this is neither a regular file nor a directory", "leave it out"},
	TooLarge:        {"too-large", "there are more bytes, files or levels than are carried", "take it in smaller parts"},
	DigestMismatch:  {"digest-mismatch", "the bytes are not those that their digest or signature vouches for", "find out who changed them; fetch them again from elsewhere"},
	SourceFailed:    {"source-failed", "the source of the image cannot be read, or holds no image", "see the detail; the source may be down"},
	ImageInUse:      {"image-in-use", "a kid uses the image", "destroy the kid first"},
	OutOfMemory:     {"out-of-memory", "the kid used all the memory of its card, and all of it was killed", "spawn another, with a larger limits.memory"},
	LooksLikeKey:    {"looks-like-key", "what the kid would be given looks like a long-lived key", "put it into the vault; where it is none, say so in the card's identity.notKeys"},
	LeaseFailed:     {"lease-failed", "a secret that is leased from a provider is not to be had, or its lease is over", "see the detail and `tagout leases ls`: the provider may be down"},
	CrossOrigin:     {"cross-origin", "a web page of another address asks", "call from a program, or from a page of the same address"},
	VaultSealed:     {"vault-sealed", "the vault is sealed, and nobody has opened it", "open it with `tagout vault unlock`"},
	AuditSpace:      {"audit-space", "the disk of the audit logs is nearly full, and nothing runs that cannot be recorded", "make room on the disk, or remove what else lies there"},
	Internal:        {"internal", "Tagout could not decide and refused", "see the daemon's log"},
}

// Info returns the code's description; an unknown number gets that of Internal.
func (c Code) Info() Info {
	if info, ok := table[c]; ok {
		return info
	}
	return table[Internal]
}

// String returns the code's stable word.
func (c Code) String() string { return c.Info().Word }

// MarshalText writes the stable word, so that JSON carries words and never numbers.
func (c Code) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// UnmarshalText reads a stable word; an unknown word becomes Internal.
func (c *Code) UnmarshalText(text []byte) error {
	*c = Internal
	for code, info := range table {
		if info.Word == string(text) {
			*c = code
		}
	}
	return nil
}

// All returns every code with its description, for documentation and tests.
func All() map[Code]Info {
	out := make(map[Code]Info, len(table))
	for code, info := range table {
		out[code] = info
	}
	return out
}
