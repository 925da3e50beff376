package card

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"tagout/internal/policy"
	"tagout/internal/yamlx"
)

// RenderAllow writes an allow rule as the lines of a card's list entry, without indentation. Reading them gives
// the rule again, but for its line.
func RenderAllow(r policy.Rule, e Expiry) []string {
	lines := []string{"- host: " + plain(r.Host), "  ports: " + ports(r.Ports), "  protocol: " + string(r.Protocol)}
	add := func(present bool, format string, args ...any) {
		if present {
			lines = append(lines, "  "+fmt.Sprintf(format, args...))
		}
	}
	add(r.Inspect, "inspect: true")
	add(r.Credential != "", "credential: %s", plain(r.Credential))
	add(len(r.Methods) > 0, "methods: %s", flow(r.Methods, plain))
	add(len(r.Paths) > 0, "paths: %s", flow(r.Paths, strconv.Quote))
	add(len(r.Addresses) > 0, "addresses: %s", flow(r.Addresses, func(p netip.Prefix) string { return strconv.Quote(address(p)) }))
	var limits []string
	for _, l := range []struct {
		way string
		n   int64
	}{{"up", r.MaxUp}, {"down", r.MaxDown}} {
		if l.n > 0 {
			limits = append(limits, l.way+": "+yamlx.FormatSize(l.n))
		}
	}
	add(len(limits) > 0, "max_bytes: {%s}", strings.Join(limits, ", "))
	add(r.Rate > 0, "rate: %d", r.Rate)
	add(e.After != 0, "expires: %s", e.After)
	add(!e.At.IsZero(), "expires: %s", e.At.Format(time.RFC3339Nano))
	return lines
}

// RenderDeny does for a deny rule what RenderAllow does for an allow rule.
func RenderDeny(r policy.DenyRule) []string {
	lines := []string{"- host: " + plain(r.Host)}
	if r.Address.IsValid() {
		lines = []string{"- address: " + strconv.Quote(address(r.Address))}
	}
	if len(r.Ports) > 0 {
		lines = append(lines, "  ports: "+ports(r.Ports))
	}
	return lines
}

func ports(list []uint16) string {
	return flow(list, func(p uint16) string { return strconv.Itoa(int(p)) })
}

func address(p netip.Prefix) string {
	if p.IsSingleIP() {
		return p.Addr().String()
	}
	return p.String()
}

func flow[T any](list []T, word func(T) string) string {
	words := make([]string, len(list))
	for i, v := range list {
		words[i] = word(v)
	}
	return "[" + strings.Join(words, ", ") + "]"
}

// plainRE is what no YAML reader takes for anything but a text: a host with a dot and a letter in front, or a
// word that is none of YAML's own.
var plainRE = regexp.MustCompile(`^[a-z][a-z0-9-]*(\.[a-z0-9-]+)*\.[a-z][a-z-]+$|^[a-z][a-z0-9]*_[a-z0-9_]*$`)

func plain(s string) string {
	if plainRE.MatchString(s) || slices.Contains([]string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}, s) {
		return s
	}
	return strconv.Quote(s)
}
