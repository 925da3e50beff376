package alert

import (
	"net"
	"strconv"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

// Severities.
const (
	Critical = "critical" // somebody tries to get around the card
	Warning  = "warning"  // may be an honest mistake
)

// others stands for what there is no room to tell apart.
const others = "*"

// key is what alerts are deduplicated by.
type key struct {
	kid, destination string
	reason           reason.Code
}

// place is where in the logs a record begins.
type place struct {
	log string
	off int64
}

// alert is one or more attempts with the same key. Whoever owns the lane's lock owns it, until it is in flight.
type alert struct {
	key     key
	record  audit.Record // the first of them
	first   time.Time
	last    time.Time
	count   uint64
	summary bool             // an earlier alert with this key was sent
	from    map[string]int64 // log -> offset of the earliest of them: the cursor stays before it
}

func newAlert(k key, r *audit.Record, at place, summary bool) *alert {
	return &alert{
		key: k, record: *r, first: r.Time, last: r.Time, count: attempts(r), summary: summary,
		from: map[string]int64{at.log: at.off},
	}
}

// attempts returns how many attempts a record stands for.
func attempts(r *audit.Record) uint64 { return max(r.Count, 1) }

// add folds one more record into a.
func (a *alert) add(r *audit.Record, at place) {
	a.count += attempts(r)
	a.span(r.Time, r.Time)
	a.reach(at.log, at.off)
}

// merge folds a later alert with the same key into a.
func (a *alert) merge(later *alert) {
	a.count += later.count
	a.span(later.first, later.last)
	for log, off := range later.from {
		a.reach(log, off)
	}
}

func (a *alert) span(first, last time.Time) {
	if first.Before(a.first) {
		a.first = first
	}
	if last.After(a.last) {
		a.last = last
	}
}

func (a *alert) reach(log string, off int64) {
	if there, ok := a.from[log]; !ok || off < there {
		a.from[log] = off
	}
}

// destination names where a record was going: a name where there is one, with its port.
func destination(r *audit.Record) string {
	if r.Dst == nil {
		return "-"
	}
	host := r.Dst.Name
	if host == "" && r.Dst.Addr.IsValid() {
		host = r.Dst.Addr.String()
	}
	switch {
	case host == "":
		return "-"
	case r.Dst.Port == 0:
		return host
	}
	return net.JoinHostPort(host, strconv.Itoa(int(r.Dst.Port)))
}

// severity tells attempts that nobody makes by mistake from those that may be one.
func severity(code reason.Code) string {
	switch code {
	case reason.Metadata, reason.RawSocket, reason.SpoofedSource, reason.Fragment, reason.DenyRule, reason.SNIMismatch,
		reason.HostMismatch, reason.AmbiguousHTTP, reason.PrivateAnswer, reason.TokenScope, reason.SecretDenied, reason.Canary, reason.Tripped, reason.WildcardLimit:
		return Critical
	}
	return Warning
}
