package trip

import (
	"fmt"
	"slices"
	"time"

	"tagout/internal/wire"
)

// Grace is how long something that a rule is about may be unreadable before the rule trips for that.
const Grace = 10 * time.Second

// Reading is what was read for one rule. Amounts of Denied only ever grow; of events the Value is how many were
// seen so far.
type Reading struct {
	Value   int64
	Detail  string // of the first event, one plain phrase
	Unknown string // why nothing could be read; empty: Value holds
}

// Trip is a rule that tripped.
type Trip struct {
	Rule     Rule
	Measured string // what was seen: an amount with its unit, or the event
	Limit    string // empty for events
	Unknown  bool   // it tripped because what it is about could not be read
}

// Reason is the tag's text.
func (t Trip) Reason() string {
	switch {
	case t.Unknown:
		return fmt.Sprintf("trip rule %s: unknown for more than %s: %s", t.Rule, Duration(Grace), t.Measured)
	case t.Rule.On == Denied:
		return fmt.Sprintf("trip rule %s: %s denied attempts", t.Rule, t.Measured)
	}
	return fmt.Sprintf("trip rule %s: %s", t.Rule, t.Measured)
}

// Kid is what has to be remembered of one session between two Looks. It is plain data, so that it can be kept
// over a restart. The zero Kid is a session that nobody has looked at.
type Kid struct {
	Fired  map[string]bool          `json:"fired,omitempty"`  // keys of the rules that tripped
	Blind  map[string]time.Duration `json:"blind,omitempty"`  // key of a rule -> since when it cannot be evaluated, CLOCK_BOOTTIME
	Window map[string]*Window       `json:"window,omitempty"` // key of a rule -> what counts towards its window
}

// Look evaluates the rules at now (CLOCK_BOOTTIME) of a session that began at born, and returns those that trip,
// each once in the life of k. read returns what a rule measures; it is not called for rules that have tripped.
// alive is false where nothing runs in the kid: then nothing can be missed by not seeing it.
func (k *Kid) Look(now, born time.Duration, alive bool, rules []Rule, read func(Rule) Reading) []Trip {
	var out []Trip
	for _, r := range rules {
		key := r.Key()
		if k.Fired[key] {
			continue
		}
		got := read(r)
		if got.Unknown != "" {
			if k.blind(key, now, alive) {
				out = append(out, k.trip(r, Trip{Rule: r, Measured: got.Unknown, Unknown: true}))
			}
			continue
		}
		delete(k.Blind, key)
		value := got.Value
		if r.On == Denied {
			value = k.window(key).count(now, born, r.Within, value)
		}
		if value <= r.Over {
			continue
		}
		t := Trip{Rule: r, Measured: got.Detail}
		if !Event(r.On) {
			t.Measured, t.Limit = amount(r.On, value), amount(r.On, r.Over)
		}
		out = append(out, k.trip(r, t))
	}
	return out
}

// trip notes that the rule has tripped.
func (k *Kid) trip(r Rule, t Trip) Trip {
	key := r.Key()
	if k.Fired == nil {
		k.Fired = map[string]bool{}
	}
	k.Fired[key] = true
	delete(k.Blind, key)
	delete(k.Window, key)
	return t
}

// blind notes that a rule cannot be evaluated and says whether that has been so for too long.
func (k *Kid) blind(key string, now time.Duration, alive bool) bool {
	if !alive {
		delete(k.Blind, key)
		return false
	}
	since, before := k.Blind[key]
	if !before {
		if k.Blind == nil {
			k.Blind = map[string]time.Duration{}
		}
		k.Blind[key] = now
		return false
	}
	return now-since > Grace
}

func (k *Kid) window(key string) *Window {
	if k.Window[key] == nil {
		if k.Window == nil {
			k.Window = map[string]*Window{}
		}
		k.Window[key] = &Window{}
	}
	return k.Window[key]
}

// slots is into how many parts a window is divided: the more, the closer to what was asked for.
const slots = 64

// Window remembers how a number grew.
type Window struct {
	At    []time.Duration `json:"at,omitempty"`    // CLOCK_BOOTTIME, ascending
	Total []int64         `json:"total,omitempty"` // what the number was then
}

// count takes over that the number is total now and returns how much of it was added within the window. What
// was added between two calls counts as added at the later one.
func (w *Window) count(now, born, within time.Duration, total int64) int64 {
	if len(w.At) == 0 {
		// Nobody looked before. In a session that is younger than the window all of it counts; in an older one
		// (a rule that is new) it is not known what does.
		if now-born <= within {
			w.At, w.Total = []time.Duration{born}, []int64{0}
		} else {
			w.At, w.Total = []time.Duration{now}, []int64{total}
		}
	}
	last := len(w.At) - 1
	if total != w.Total[last] && now-w.At[last] >= within/slots {
		w.At, w.Total = append(w.At, now), append(w.Total, total)
	}
	base := 0
	for base+1 < len(w.At) && w.At[base+1] <= now-within {
		base++
	}
	w.At, w.Total = slices.Delete(w.At, 0, base), slices.Delete(w.Total, 0, base)
	return total - w.Total[0]
}

// Layers returns the layers that any of the trips fires, in the usual order.
func Layers(trips []Trip) []wire.Layer {
	var out []wire.Layer
	for _, l := range wire.AllLayers() {
		if slices.ContainsFunc(trips, func(t Trip) bool { return slices.Contains(t.Rule.Fires, l) }) {
			out = append(out, l)
		}
	}
	return out
}
