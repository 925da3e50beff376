package policy

import (
	"errors"
	"fmt"

	"tagout/internal/reason"
)

// Verdict is allow or deny. The zero value is deny.
type Verdict uint8

// Verdicts.
const (
	Deny Verdict = iota
	Allow
)

func (v Verdict) String() string {
	if v == Allow {
		return "allow"
	}
	return "deny"
}

// Decision is the one form in which every question is answered. Reason is reason.OK if and only if Verdict
// is Allow. Rule is the allow rule that decided, nil where none did; for reason expired it is the one that
// has run out.
type Decision struct {
	Verdict  Verdict
	Rule     *Rule
	DenyLine int // the card's line of the deny rule that decided; 0 where none did or its line is not known
	Reason   reason.Code
	Detail   string // for the record: names, both of them where they disagree; never a secret
}

func deny(code reason.Code, detail string) Decision {
	return Decision{Verdict: Deny, Reason: code, Detail: detail}
}

func denyBy(rule *Rule, code reason.Code, detail string) Decision {
	return Decision{Verdict: Deny, Rule: rule, Reason: code, Detail: detail}
}

func denyRule(what string, line int) Decision {
	if line == 0 {
		return deny(reason.DenyRule, what)
	}
	return Decision{Verdict: Deny, DenyLine: line, Reason: reason.DenyRule, Detail: fmt.Sprintf("%s: deny rule in line %d", what, line)}
}

func denyName(err error) Decision {
	var ne *NameError
	if errors.As(err, &ne) {
		return deny(ne.Reason, ne.Error())
	}
	return deny(reason.NameInvalid, err.Error())
}

func hostPort(name string, port uint16) string { return fmt.Sprintf("%s port %d", name, port) }
