package dnsfilter

import (
	"errors"
	"fmt"
	"strings"

	"tagout/internal/policy"
	"tagout/internal/reason"
)

// A name under a wildcard is the one thing that a kid may make up and that still leaves the box, because the
// proxy resolves it when the kid connects: what is written into the name has left by then. So the names are
// limited in number, which bounds what can leave, and in shape, which makes each of them hold little. The
// number is the wall; the shape only raises the price, since data can be written in letters that look like
// words. Names that a rule spells out are not limited.
const (
	maxWildcardNames  = 256 // distinct names a session, over all of its wildcards and its whole life
	maxWildcardLabel  = 40  // bytes of one label under a wildcard
	maxWildcardLabels = 4   // labels under "**."
	maxWildcardBytes  = 80  // of everything under a wildcard, dots included
	maxHexRun         = 15  // hexadecimal digits in one label that holds nothing else, dashes apart
	maxMixedRun       = 24  // letters and digits in one label that changes between the two more than maxChanges times
	maxChanges        = 3
)

var errManyNames = fmt.Errorf("more than %d names under wildcards in one session", maxWildcardNames)

// checkWildcard returns why name may not be looked up although pattern, a rule's host, allows it; nil where it
// may. Both are canonical.
func checkWildcard(name, pattern string) error {
	stars, parent, _ := strings.Cut(pattern, ".")
	if strings.Trim(stars, "*") != "" {
		return nil // the rule spells the name out
	}
	under := strings.TrimSuffix(name, "."+parent)
	labels := strings.Split(under, ".")
	switch {
	case len(labels) > maxWildcardLabels:
		return fmt.Errorf("%d labels under %s, more than %d", len(labels), pattern, maxWildcardLabels)
	case len(under) > maxWildcardBytes:
		return fmt.Errorf("%d bytes under %s, more than %d", len(under), pattern, maxWildcardBytes)
	}
	for _, label := range labels {
		if err := checkLabel(label); err != nil {
			return fmt.Errorf("under %s: %w", pattern, err)
		}
	}
	return nil
}

// checkLabel refuses a label that holds more than a name needs to, or looks as if it were data: hexadecimal,
// or letters and digits mixed as base32 and random ids mix them. Dashes change nothing.
func checkLabel(label string) error {
	if len(label) > maxWildcardLabel {
		return fmt.Errorf("a label of %d bytes, more than %d", len(label), maxWildcardLabel)
	}
	plain := strings.NewReplacer("-", "", "_", "").Replace(label)
	digits, changes, hex := 0, 0, true
	for i := range len(plain) {
		if isDigit(plain[i]) {
			digits++
		}
		if i > 0 && isDigit(plain[i]) != isDigit(plain[i-1]) {
			changes++
		}
		hex = hex && (isDigit(plain[i]) || plain[i] >= 'a' && plain[i] <= 'f')
	}
	switch {
	case hex && len(plain) > maxHexRun:
		return errors.New("a label that looks like hexadecimal data")
	case len(plain) > maxMixedRun && changes > maxChanges || len(plain) > maxMixedRun && digits > len(plain)/3:
		return errors.New("a label that looks like encoded data")
	}
	return nil
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// claim counts name, in any spelling, among the session's wildcard names, as a lookup of it does: the explicit
// proxy resolves names that were never looked up here. An error comes with the reason to refuse it with.
func (k *kid) claim(raw string) (name string, code reason.Code, err error) {
	name, d := k.policy.Lookup(raw)
	if d.Verdict != policy.Allow {
		return name, d.Reason, errors.New(d.Detail)
	}
	if err := checkWildcard(name, d.Rule.Host); err != nil {
		return name, reason.WildcardLimit, err
	}
	_, code, err = k.address(name)
	return name, code, err
}
