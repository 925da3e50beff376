package card

import (
	"slices"
	"time"

	"tagout/internal/policy"
	"tagout/internal/session"
	"tagout/internal/yamlx"
)

// Bounds of what a rule may limit itself to. The published schema repeats the rate's.
const (
	minRuleBytes = kib
	maxRuleBytes = 1024 * gib
	minRate      = 1
	maxRate      = 100_000
	minExpiry    = time.Second
	maxExpiry    = 10 * 365 * 24 * time.Hour
)

// Expiry is when an allow rule runs out: at a time of the wall clock, or a while after the kid was spawned.
// The zero Expiry is never.
type Expiry struct {
	At    time.Time
	After time.Duration
}

// unconverted stands in Rule.Expires of a card until EgressAt knows the clocks: a deadline long past, so that
// a rule whose conversion somebody forgot is gone and not for ever.
const unconverted = 1

// EgressAt returns the card's policy for a kid that is spawned at wall, when the boot clock shows boot; the names
// that are canaries are among its deny rules. It is
// the one place where wall time becomes boot time: setting the wall clock later moves no deadline.
func (c *Card) EgressAt(wall time.Time, boot time.Duration) policy.Spec {
	spec := policy.Spec{Deny: append(slices.Clip(c.Egress.Deny), session.Canaries(c.Stop.Trip)...)}
	for i, r := range c.Egress.Allow {
		switch e := c.Expiries[i]; {
		case !e.At.IsZero():
			r.Expires = max(int64(boot+e.At.Sub(wall)), unconverted)
		case e.After != 0:
			r.Expires = int64(boot + e.After)
		}
		spec.Allow = append(spec.Allow, r)
	}
	return spec
}

// readMaxBytes reads how much a rule may move in the whole session; 0 is no limit.
func readMaxBytes(v yamlx.Value) (up, down int64) {
	m, ok := v.Map(bytesKeys...)
	if ok && !m.Has("up") && !m.Has("down") {
		v.Refuse("write `max_bytes: {up: 10MiB, down: 1GiB}`, one of the two or both, or remove the key", "max_bytes says neither up nor down")
	}
	return readSize(m.Get("up"), 0, minRuleBytes, maxRuleBytes), readSize(m.Get("down"), 0, minRuleBytes, maxRuleBytes)
}

// readRate reads a number a second; 0 is no limit.
func readRate(v yamlx.Value) int {
	n, ok := v.Int()
	switch {
	case !ok:
		return 0
	case n < minRate:
		v.Refuse("write how many a second, from 1, or remove the key for no limit", "a rate of %d would let nothing pass", n)
		return 0
	case n > maxRate:
		v.Refuse("write a smaller number, or remove the key for no limit", "a rate of %d is more than the %d that can be counted", n, maxRate)
		return 0
	}
	return int(n)
}

// readExpiry reads a time with its zone, or a duration.
func readExpiry(v yamlx.Value, now time.Time) Expiry {
	s, ok := v.Text()
	if !ok {
		return Expiry{}
	}
	if d, err := time.ParseDuration(s); err == nil {
		if d < minExpiry || d > maxExpiry {
			v.Refuse("write a duration from 1s to 87600h, such as `2h`, or remove the key", "%s is out of range", yamlx.Quote(s))
			return Expiry{}
		}
		return Expiry{After: d}
	}
	at, err := time.Parse(time.RFC3339, s)
	switch {
	case err != nil:
		v.Refuse("write a time with its zone, such as `2027-01-31T12:00:00Z`, or a duration after the spawn, such as `2h`",
			"%s is neither a time nor a duration", yamlx.Quote(s))
	case !at.After(now):
		v.Refuse("write a later time, or remove the rule", "%s is past: the rule would open nothing", s)
	case at.Sub(now) > maxExpiry:
		v.Refuse("write a nearer time, or remove the key", "%s is more than ten years away", s)
	default:
		return Expiry{At: at}
	}
	return Expiry{}
}
