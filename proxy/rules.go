package proxy

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/policy"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/vaddr"
)

// rules is one generation of a session's policy, as it stands until its next deadline. Immutable but for what
// is learned.
type rules struct {
	generation uint64
	spec       policy.Spec // without what has run out
	policy     *policy.Policy
	until      time.Duration // CLOCK_BOOTTIME of the next deadline; 0 where there is none
	exact      *vaddr.Table
	learned    *sync.Map // netip.Addr -> string: what dnsfilter told; at most as many as there are addresses
	claimed    *sync.Map // string -> struct{}: wildcard names that dnsfilter has counted; as many as it lets pass
}

// compile makes a document's policy one that can be asked, as it stands at now.
func compile(s *session.Session, virtual netip.Prefix, now time.Duration) (*rules, error) {
	whole, err := policy.Compile(s.Egress)
	if err != nil {
		return nil, fmt.Errorf("compiling the policy of session %s: %w", s.ID, err)
	}
	s.AddNames(whole.ExactHosts())
	exact, err := vaddr.New(virtual, s.Names)
	if err != nil {
		return nil, fmt.Errorf("giving addresses to the names of session %s: %w", s.ID, err)
	}
	r := &rules{generation: s.Generation, spec: s.Egress, exact: exact, learned: &sync.Map{}, claimed: &sync.Map{}}
	return r.at(now)
}

// at returns the rules without those that have run out by now.
func (r *rules) at(now time.Duration) (*rules, error) {
	next := *r
	next.spec = r.spec.At(int64(now))
	next.until = time.Duration(next.spec.NextExpiry())
	var err error
	if next.policy, err = policy.Compile(next.spec); err != nil {
		return nil, fmt.Errorf("compiling a policy as it stands now: %w", err)
	}
	return &next, nil
}

// connect asks the policy. Nil rules deny.
func (r *rules) connect(t target) policy.Decision {
	if r == nil {
		return policy.Decision{Reason: reason.PolicyNotLoaded}
	}
	return r.policy.Connect(t.name, t.port)
}

// heir returns the rule that stands for old in these rules: the one that says the same, or else the one that
// is said to allow what old allowed.
func (r *rules) heir(old, allows *policy.Rule, port uint16) *policy.Rule {
	key := ruleKey(old)
	for i := range r.spec.Allow {
		if rule := &r.spec.Allow[i]; ruleKey(rule) == key && slices.Contains(rule.Ports, port) {
			return rule
		}
	}
	return allows
}

// ruleKey tells rules apart and finds them again in a newer policy. Limits, ports and lines do not count.
func ruleKey(r *policy.Rule) string {
	if len(r.Methods)+len(r.Paths) == 0 && r.Grant == "" {
		return r.Host + " " + string(r.Protocol) // called for every connection: the usual case is cheap
	}
	return fmt.Sprintf("%s %s %t %q %q %s", r.Host, r.Protocol, r.Inspect, r.Methods, r.Paths, r.Grant)
}

// current returns the policy in force, nil where there is none. A rule is gone from its deadline on, whether
// or not the alarm has rung.
func (e *entry) current() *rules {
	r := e.rules.Load()
	if r == nil || r.until == 0 {
		return r
	}
	now := bootclock.Now()
	if now < r.until {
		return r
	}
	next, err := r.at(now)
	if err != nil {
		next = nil // cannot happen: fewer rules never collide; denying is what is left (invariant 1)
	}
	if !e.rules.CompareAndSwap(r, next) {
		return e.current()
	}
	return next
}

// take puts newer rules in force. An older generation than the one in force is ErrStale.
func (e *entry) take(next *rules) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		old := e.rules.Load()
		switch {
		case e.gone:
			return fmt.Errorf("session %s: taken away meanwhile", e.doc.ID)
		case old != nil && next.generation < old.generation:
			return fmt.Errorf("session %s: generation %d: %w", e.doc.ID, next.generation, ErrStale)
		case e.rules.CompareAndSwap(old, next):
			return nil
		}
	}
}

// alarmStep is how long the alarm sleeps at most: timers stand still while the machine sleeps, deadlines do
// not.
const alarmStep = time.Second

// watch rings at every deadline of the session's rules, and cuts what lived on them.
func (e *entry) watch() {
	r := e.rules.Load()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.alarm != nil {
		e.alarm.Stop()
		e.alarm = nil
	}
	if e.gone || r == nil || r.until == 0 {
		return
	}
	e.alarm = time.AfterFunc(min(max(r.until-bootclock.Now(), 0), alarmStep), func() {
		e.judgeAgain()
		e.watch()
	})
}
