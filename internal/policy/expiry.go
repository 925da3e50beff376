package policy

import "slices"

// expired says whether the rule is gone at bootNow (CLOCK_BOOTTIME in ns).
func (r *Rule) expired(bootNow int64) bool { return r.Expires != 0 && r.Expires <= bootNow }

// At returns the policy as it stands at bootNow (CLOCK_BOOTTIME in ns): the allow rules whose time has come
// are moved to Lapsed. It changes nothing in s. Whoever enforces a policy compiles s.At(now), not s, and asks
// NextExpiry when to do so again.
func (s Spec) At(bootNow int64) Spec {
	out := Spec{Deny: s.Deny, Lapsed: slices.Clip(s.Lapsed)}
	for _, r := range s.Allow {
		if r.expired(bootNow) {
			out.Lapsed = append(out.Lapsed, r)
			continue
		}
		out.Allow = append(out.Allow, r)
	}
	return out
}

// NextExpiry returns the earliest time (CLOCK_BOOTTIME in ns) at which an allow rule runs out, 0 where none
// does. Of a Spec that At made, it is in that At's future.
func (s Spec) NextExpiry() int64 {
	var next int64
	for _, r := range s.Allow {
		if r.Expires != 0 && (next == 0 || r.Expires < next) {
			next = r.Expires
		}
	}
	return next
}
