package policy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

// metadataList holds the addresses at which clouds hand out credentials and settings. Nothing grants them. The
// link-local ones would be refused anyway; they are listed so that a record says what was tried.
var metadataList = func() []netip.Addr {
	var list []netip.Addr
	for _, s := range []string{
		"169.254.169.254",    // AWS, Azure, Google, OpenStack, Oracle, DigitalOcean, IBM, Hetzner …
		"169.254.169.253",    // AWS resolver
		"169.254.169.123",    // AWS time
		"169.254.170.2",      // AWS ECS task credentials
		"169.254.170.23",     // AWS EKS pod identity
		"169.254.42.42",      // Scaleway
		"169.254.0.23",       // Tencent
		"100.100.100.200",    // Alibaba
		"192.0.0.192",        // Oracle classic
		"168.63.129.16",      // Azure wire server; the only public one
		"fd00:ec2::254",      // AWS
		"fd00:ec2::253",      // AWS resolver
		"fd00:ec2::123",      // AWS time
		"fd00:ec2::23",       // AWS EKS pod identity
		"fd20:ce::254",       // Google
		"fd00:42::42",        // Scaleway
		"fd00:c1::a9fe:a9fe", // Oracle
		"fe80::a9fe:a9fe",    // OpenStack
	} {
		list = append(list, netip.MustParseAddr(s))
	}
	return list
}()

// metadataNames are the names under which clouds hand out the same things. Whatever else leads to a metadata
// address is refused when it is resolved.
var metadataNames = []string{
	"metadata.google.internal", "metadata.goog", "instance-data.ec2.internal", "metadata.tencentyun.com", "metadata.platformequinix.com",
}

// MetadataName says whether a canonical name hands out a machine's credentials. No rule may name it.
func MetadataName(name string) bool { return slices.Contains(metadataNames, name) }

// MetadataUnder returns a name that MetadataName knows and that a canonical pattern stands for, "" where
// there is none.
func MetadataUnder(pattern string) string {
	for _, name := range metadataNames {
		if Covers(pattern, name) {
			return name
		}
	}
	return ""
}

var metadata = func() map[netip.Addr]bool {
	set := map[netip.Addr]bool{}
	for _, a := range metadataList {
		set[a] = true
	}
	return set
}()

// class says what an upstream address is, as far as a policy cares.
type class uint8

const (
	public    class = iota
	grantable       // private: reachable only where the rule names the address
	never           // no grant helps
	meta            // a metadata address; no grant helps
)

type block struct {
	prefix netip.Prefix
	class  class
	what   string
}

// blocks is the IANA special-purpose registries (RFC 6890 and successors), the first match deciding.
// 203.0.113.0/24 (TEST-NET-3, RFC 5737) is left out on purpose and thus public: practice internets live
// there, and no real network routes it. 198.18.0.0/15 holds Tagout's own virtual and kid addresses.
var blocks = []block{
	{netip.MustParsePrefix("0.0.0.0/8"), never, "this host"},
	{netip.MustParsePrefix("10.0.0.0/8"), grantable, "private"},
	{netip.MustParsePrefix("100.64.0.0/10"), grantable, "carrier-grade NAT"},
	{netip.MustParsePrefix("127.0.0.0/8"), grantable, "loopback"},
	{netip.MustParsePrefix("169.254.0.0/16"), never, "link-local"},
	{netip.MustParsePrefix("172.16.0.0/12"), grantable, "private"},
	{netip.MustParsePrefix("192.0.0.0/24"), never, "protocol assignments"},
	{netip.MustParsePrefix("192.0.2.0/24"), never, "documentation"},
	{netip.MustParsePrefix("192.88.99.0/24"), never, "6to4 relay"},
	{netip.MustParsePrefix("192.168.0.0/16"), grantable, "private"},
	{netip.MustParsePrefix("198.18.0.0/15"), never, "Tagout's own"},
	{netip.MustParsePrefix("198.51.100.0/24"), never, "documentation"},
	{netip.MustParsePrefix("224.0.0.0/4"), never, "multicast"},
	{netip.MustParsePrefix("240.0.0.0/4"), never, "reserved or broadcast"},

	{netip.MustParsePrefix("::1/128"), grantable, "loopback"},
	{netip.MustParsePrefix("fc00::/7"), grantable, "unique local"},
	{netip.MustParsePrefix("fe80::/10"), never, "link-local"},
	{netip.MustParsePrefix("ff00::/8"), never, "multicast"},
	{netip.MustParsePrefix("2001::/23"), never, "protocol assignments or Teredo"},
	{netip.MustParsePrefix("2001:db8::/32"), never, "documentation"},
	{netip.MustParsePrefix("3fff::/20"), never, "documentation"},
	{netip.MustParsePrefix("2000::/3"), public, "public"},
	// Whatever is left of IPv6 (::/96, site-local, local NAT64, unassigned) goes nowhere that a card may want.
	{netip.MustParsePrefix("::/0"), never, "reserved"},
}

var (
	nat64  = netip.MustParsePrefix("64:ff9b::/96") // RFC 6052
	sixTo4 = netip.MustParsePrefix("2002::/16")    // RFC 3056
	teredo = netip.MustParsePrefix("2001::/32")    // RFC 4380
	compat = netip.MustParsePrefix("::/96")        // RFC 4291, 2.5.5.1, deprecated
)

// embedded returns the IPv4 address that an IPv6 transition address leads to.
func embedded(a netip.Addr) (netip.Addr, bool) {
	b := a.As16()
	v4 := func(from int) netip.Addr { return netip.AddrFrom4([4]byte(b[from : from+4])) }
	switch {
	case !a.Is6():
		return netip.Addr{}, false
	case nat64.Contains(a):
		return v4(12), true
	case sixTo4.Contains(a):
		return v4(2), true
	case teredo.Contains(a): // the client's address, each bit turned over
		return netip.AddrFrom4([4]byte{^b[12], ^b[13], ^b[14], ^b[15]}), true
	case compat.Contains(a) && a != netip.IPv6Loopback() && a != netip.IPv6Unspecified():
		return v4(12), true
	case b[8]&^0x02 == 0 && b[9] == 0 && b[10] == 0x5e && b[11] == 0xfe: // ISATAP, RFC 5214
		return v4(12), true
	}
	return netip.Addr{}, false
}

// effective strips the zone and the disguises (mapped, NAT64, 6to4, Teredo, compatible) from an address.
func effective(a netip.Addr) netip.Addr {
	a = a.Unmap().WithZone("")
	if v4, ok := embedded(a); ok {
		return v4
	}
	return a
}

// classify says what an address is. An address that embeds another is at most as public as the one inside,
// and never grantable in disguise.
func classify(a netip.Addr) (class, string) {
	a = a.Unmap().WithZone("")
	if v4, ok := embedded(a); ok {
		inner, what := classify(v4)
		switch {
		case inner == meta:
			return meta, what
		case inner != public:
			return never, what + " inside a transition address"
		case nat64.Contains(a):
			return public, what
		}
		// 6to4 and the rest go on: the outer address has a class too.
	}
	if metadata[a] {
		return meta, "metadata"
	}
	for _, b := range blocks {
		if b.prefix.Contains(a) {
			return b.class, b.what
		}
	}
	if a.Is4() {
		return public, "public"
	}
	return never, "reserved"
}

// IsMetadata says whether addr, in any disguise, is a cloud metadata address.
func IsMetadata(addr netip.Addr) bool {
	c, _ := classify(addr)
	return c == meta
}

// CheckCall says why Tagout itself, outside of any kid and so without a rule, calls addr for nobody: metadata, link-local and
// whatever else no rule may grant. Private addresses are called only where private is true.
func CheckCall(addr netip.Addr, private bool) error {
	class, what := classify(addr)
	if class == public || class == grantable && private {
		return nil
	}
	return fmt.Errorf("%s is a %s address", addr, what)
}

// CheckGrant says whether a rule's addresses may list prefix: masked, not public (which needs no grant), and
// without a single address that nothing may grant. The error says what is wrong with it.
func CheckGrant(prefix netip.Prefix) error {
	switch {
	case !prefix.IsValid():
		return grantError("it is not an address or a range")
	case prefix.Addr().Is4In6():
		return grantError("it is an IPv4 address in IPv6 clothes")
	case prefix != prefix.Masked():
		return grantError("it has bits behind its length; the range is " + prefix.Masked().String())
	}
	for _, a := range metadataList {
		if prefix.Contains(a) {
			return grantError("it contains " + a.String() + ", a metadata address, which can never be granted")
		}
	}
	for _, b := range blocks {
		switch {
		case b.prefix.Bits() == 0 || !b.prefix.Overlaps(prefix):
		case b.class == never:
			return grantError("it overlaps " + b.prefix.String() + " (" + b.what + "), which can never be granted")
		case b.class == grantable && b.prefix.Bits() <= prefix.Bits():
			return nil
		}
	}
	return ErrNotPrivate
}

// MinReach is the shortest prefix that a card's reach may have.
const MinReach = 16

// CheckReach says whether the reach of a card on the machine's network may name prefix: IPv4, masked, and without a
// single address that nothing may grant. Public, private and loopback addresses may be named. The error says what is
// wrong with it.
func CheckReach(prefix netip.Prefix) error {
	if err := CheckGrant(prefix); err != nil && !errors.Is(err, ErrNotPrivate) {
		return err
	}
	switch {
	case !prefix.Addr().Is4():
		return grantError("it is IPv6, which kids do not have")
	case prefix.Bits() < MinReach:
		return grantError("it is a range of more than 65,536 addresses")
	}
	return nil
}

// ErrNotPrivate is CheckGrant's answer to a range that is refused for no other reason than that it is public.
const ErrNotPrivate = grantError("it is not a private range, so there is nothing to grant")

type grantError string

func (e grantError) Error() string { return string(e) }
