package card

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"tagout/internal/policy"
	"tagout/internal/trip"
	"tagout/internal/wire"
	"tagout/internal/yamlx"
)

// Bounds of trip rules. The published schema repeats the counts.
const (
	maxTrips     = 64
	maxTripWords = 64 // entries of paths, names and except
	maxTripCount = 1_000_000_000
	maxTripBytes = 1 << 50
	minTripTime  = time.Second
	maxTripTime  = 10 * 365 * 24 * time.Hour
	minWindow    = time.Second
	maxWindow    = 24 * time.Hour
)

var tripKeys = []yamlx.Key{
	{Name: "on", Example: "denied"},
	{Name: "over", Example: "20"},
	{Name: "within", Example: "1m"},
	{Name: "paths", Example: "[/usr/bin/nmap]"},
	{Name: "names", Example: "[vault.corp.example]"},
	{Name: "except", Example: "[/dev/shm]"},
	{Name: "fires", Example: "[session, network, credential]"},
}

// tripNeeds says which keys belong to a kind of rule beside on and fires, the needed ones first.
var tripNeeds = map[string]struct{ need, may []string }{
	trip.Denied:       {need: []string{"over", "within"}},
	trip.BytesOut:     {need: []string{"over"}},
	trip.WallTime:     {need: []string{"over"}},
	trip.CPUTime:      {need: []string{"over"}},
	trip.Processes:    {need: []string{"over"}},
	trip.Canary:       {may: []string{"names"}},
	trip.TokenMisuse:  {},
	trip.Exec:         {need: []string{"paths"}},
	trip.WriteOutside: {may: []string{"except"}},
	trip.AuditGap:     {},
}

// ReadTrips reads a list of trip rules, of a card or of the box's configuration.
func ReadTrips(v yamlx.Value) []trip.Rule {
	rules, _ := readTrips(v)
	return rules
}

// readTrips also returns where each canary name stands, in its canonical form.
func readTrips(v yamlx.Value) (out []trip.Rule, canaries []yamlx.TextAt) {
	for i, entry := range v.List() {
		if i == maxTrips {
			entry.Refuse(fmt.Sprintf("keep the first %d", maxTrips), "there are more than %d trip rules", maxTrips)
			break
		}
		m, ok := entry.Map(tripKeys...)
		if !ok {
			continue
		}
		r, names := readTrip(m)
		canaries = append(canaries, names...)
		if r.On == "" {
			continue
		}
		if slices.ContainsFunc(out, func(o trip.Rule) bool { return o.Key() == r.Key() }) {
			m.Refuse("remove it", "this trip rule is in the list already")
		}
		out = append(out, r)
	}
	return out, canaries
}

func readTrip(m yamlx.Map) (r trip.Rule, canaries []yamlx.TextAt) {
	on, _ := m.Need("on").Text()
	keys, known := tripNeeds[on]
	if !known {
		if on != "" {
			fix := "write one of " + strings.Join(trip.Kinds(), ", ") + " instead"
			if near := yamlx.Nearest(on, trip.Kinds()); near != "" {
				fix = "write `" + near + "` instead"
			}
			m.Get("on").Refuse(fix, "no trip rule is about %s", yamlx.Quote(on))
		}
		return trip.Rule{}, nil
	}
	for _, k := range []string{"over", "within", "paths", "names", "except"} {
		switch {
		case slices.Contains(keys.need, k):
			m.Need(k)
		case m.Has(k) && !slices.Contains(keys.may, k):
			m.Get(k).Refuse("remove it", "a rule on %s has no %s", on, k)
		}
	}
	r = trip.Rule{On: on, Fires: readFires(m.Get("fires"))}
	if slices.Contains(keys.need, "over") {
		r.Over = readOver(m.Get("over"), on)
	}
	switch on {
	case trip.Denied:
		r.Within = readTime(m.Get("within"), "1m", minWindow, maxWindow)
	case trip.Exec:
		r.Paths = readPaths(m.Get("paths"))
	case trip.Canary:
		canaries = readCanaries(m.Get("names"))
		for _, at := range canaries {
			r.Names = append(r.Names, at.Text)
		}
	case trip.WriteOutside:
		r.Except = readPaths(m.Get("except"))
	}
	return r, canaries
}

// readOver reads the limit in the unit that the kind is measured in.
func readOver(v yamlx.Value, on string) int64 {
	switch on {
	case trip.BytesOut:
		return readSize(v, 0, kib, maxTripBytes)
	case trip.WallTime, trip.CPUTime:
		return int64(readTime(v, "2h", minTripTime, maxTripTime))
	}
	return readCount(v, 0, 0, maxTripCount)
}

// readTime reads a duration of any length.
func readTime(v yamlx.Value, example string, low, high time.Duration) time.Duration {
	s, ok := v.Text()
	if !ok {
		return 0
	}
	d, err := time.ParseDuration(s)
	switch {
	case err != nil:
		v.Refuse("write a number with s, m or h behind it, such as `"+example+"`", "%s is not a duration", yamlx.Quote(s))
	case d < low || d > high:
		v.Refuse(fmt.Sprintf("write a time from %s to %s", trip.Duration(low), trip.Duration(high)), "%s is out of range", s)
	}
	return d
}

// readFires reads which layers fire; all where nothing is said.
func readFires(v yamlx.Value) []wire.Layer {
	if !v.Present() {
		return wire.AllLayers()
	}
	var got []wire.Layer
	texts := v.Texts()
	if v.IsList() && len(texts) == 0 {
		v.Refuse("name at least one layer, or remove the key for all three", "the rule would fire nothing")
	}
	for _, at := range texts {
		switch l := wire.Layer(at.Text); {
		case !slices.Contains(wire.AllLayers(), l):
			at.Refuse("write session, network or credential", "no layer is called %s", yamlx.Quote(at.Text))
		case slices.Contains(got, l):
			at.Refuse("remove it", "%s is in this list already", at.Text)
		default:
			got = append(got, l)
		}
	}
	return slices.DeleteFunc(wire.AllLayers(), func(l wire.Layer) bool { return !slices.Contains(got, l) })
}

// pathRE keeps paths to what a log line and a comma-separated list can carry.
var pathRE = regexp.MustCompile(`^/[^,]*$`)

// readPaths reads absolute paths as they are called inside the kid.
func readPaths(v yamlx.Value) []string {
	var out []string
	for _, at := range tripTexts(v) {
		switch {
		case !pathRE.MatchString(at.Text) || len(at.Text) > 1024 || strings.IndexFunc(at.Text, unicode.IsControl) >= 0:
			at.Refuse("write an absolute path, such as `/usr/bin/nmap`", "%s is not an absolute path", yamlx.Quote(at.Text))
		case path.Clean(at.Text) != at.Text:
			at.Refuse("write `"+path.Clean(at.Text)+"` instead", "%s is not written in the shortest way", yamlx.Quote(at.Text))
		case slices.Contains(out, at.Text):
			at.Refuse("remove it", "%s is in this list already", yamlx.Quote(at.Text))
		default:
			out = append(out, at.Text)
		}
	}
	return out
}

// readCanaries reads the hosts of a canary rule, in their canonical form.
func readCanaries(v yamlx.Value) []yamlx.TextAt {
	var out []yamlx.TextAt
	for _, at := range tripTexts(v) {
		name, span, ok := readPattern(at.Value, at.Text)
		if !ok {
			continue
		}
		host := span.String() + name
		if slices.ContainsFunc(out, func(o yamlx.TextAt) bool { return o.Text == host }) {
			at.Refuse("remove it", "%s is in this list already", host)
			continue
		}
		out = append(out, yamlx.TextAt{Value: at.Value, Text: host})
	}
	return out
}

// tripTexts reads a list that holds something, and not too much.
func tripTexts(v yamlx.Value) []yamlx.TextAt {
	texts := v.Texts()
	switch {
	case v.IsList() && len(texts) == 0:
		v.Refuse("write at least one entry", "the list is empty")
	case len(texts) > maxTripWords:
		v.Refuse(fmt.Sprintf("split it into several rules of at most %d", maxTripWords), "the list has %d entries", len(texts))
		texts = texts[:maxTripWords]
	}
	return texts
}

// checkCanaries refuses canary names that the card itself allows: nothing would ever be let through to them.
func (c *Card) checkCanaries(names []yamlx.TextAt) {
	for _, at := range names {
		for _, allowed := range c.Egress.Allow {
			if allowed.Host != "" && policy.Covers(at.Text, allowed.Host) {
				at.Refuse("keep one of the two", "%s is a canary here%s and allowed in line %d", allowed.Host, byPattern(at.Text, allowed.Host), allowed.Line)
			}
		}
	}
}
