package proxy

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"time"

	"tagout/internal/audit"
	"tagout/internal/policy"
	"tagout/internal/reason"
)

// dial resolves the target's name and connects to the first of its addresses that the policy allows and that
// answers, over a socket with the given mark. The error is a refusal.
func (c *conn) dial(ctx context.Context, t target, rule *policy.Rule, mark uint32) (*upstream, error) {
	start := time.Now()
	addrs, err := c.resolve(ctx, t, rule)
	if err != nil {
		return nil, err
	}
	u, err := c.connect(ctx, t, rule, mark, addrs)
	if err != nil {
		c.sess.known.drop(t.name)
	}
	c.p.cfg.Metrics.Dialed(time.Since(start), err == nil)
	return u, err
}

// resolve returns the addresses of the name that may be dialled. One address that is not public and not granted
// spoils the answer (invariant 2): no honest server mixes them, and whoever rebinds names does. Addresses that a
// deny rule closes are left out; nothing but such ones is a refusal.
func (c *conn) resolve(ctx context.Context, t target, rule *policy.Rule) ([]netip.Addr, error) {
	r := c.sess.current()
	if r == nil {
		return nil, refusal{reason.PolicyNotLoaded, "", rule}
	}
	if why := c.p.claim(ctx, r, c.sess.doc.Mark, t.name); why != nil {
		why.rule = rule
		return nil, *why
	}
	all := c.sess.known.get(t.name, time.Now())
	if all == nil {
		ctx, cancel := context.WithTimeout(ctx, c.p.cfg.Limits.Resolve)
		said, err := c.p.resolver.lookup(ctx, c.sess.doc.Mark, t.name)
		cancel()
		if audit.OutOfRoom(err) { // this side of the road
			return nil, refusal{reason.Capacity, "no socket to resolve " + t.name + ": " + err.Error(), rule}
		}
		if err != nil {
			return nil, refusal{reason.ResolveFailed, err.Error(), rule}
		}
		c.sess.known.put(t.name, said, time.Now())
		all = said.addrs
	}
	if r = c.sess.current(); r == nil { // resolving took time
		return nil, refusal{reason.PolicyNotLoaded, "", rule}
	}
	return c.usable(r.policy, t, rule, all)
}

// usable returns those of the addresses that the name resolves to which may be dialled.
func (c *conn) usable(p *policy.Policy, t target, rule *policy.Rule, all []netip.Addr) ([]netip.Addr, error) {
	var good []netip.Addr
	var bad []string
	var why policy.Decision // the first one, and before all others that of an address that is not public
	for _, a := range all {
		d := p.Upstream(rule, a, t.port)
		switch {
		case d.Verdict == policy.Allow && a.Is4():
			good = append(good, a)
		case d.Verdict == policy.Allow: // never dialled
		default:
			if len(bad) == 0 || d.Reason == reason.PrivateAnswer && why.Reason != reason.PrivateAnswer {
				why = d
			}
			bad = append(bad, a.String())
		}
	}
	switch {
	case len(bad) > 0 && (len(good) == 0 || why.Reason == reason.PrivateAnswer):
		return nil, refusal{why.Reason, fmt.Sprintf("%s resolves to %s: %s", t.name, addresses(all), why.Detail), rule}
	case len(good) == 0:
		return nil, refusal{reason.ResolveFailed, errNoAddress.Error(), rule}
	case len(bad) > 0:
		c.say("left out of the answer for " + t.name + ": " + strings.Join(bad, ", "))
	}
	return good, nil
}

func addresses(all []netip.Addr) string {
	var out []string
	for _, a := range all {
		out = append(out, a.String())
	}
	return strings.Join(out, ", ")
}

// connect races the addresses as RFC 8305, 5 has it: the next one is tried when one before it has failed or has not
// answered for dialStagger, and the first that answers wins. A dead one costs no more than that. Every socket carries
// the mark; those that lose are closed.
func (c *conn) connect(ctx context.Context, t target, rule *policy.Rule, mark uint32, addrs []netip.Addr) (*upstream, error) {
	deadline := time.Now().Add(c.p.cfg.Limits.Connect)
	prepare := func(fd int) error {
		if rule.Protocol != policy.TCP {
			clientSpeaks(fd)
		}
		return c.p.cfg.Mark(uintptr(fd), mark)
	}
	s, a, err := race(ctx, addrs, func(ctx context.Context, a netip.Addr) (*sock, error) {
		early := func(s *sock) (stop func() bool) { return context.AfterFunc(ctx, func() { s.Close() }) }
		return dialSock(netip.AddrPortFrom(a, t.port), deadline, prepare, early)
	})
	if audit.OutOfRoom(err) { // this side of the road
		return nil, refusal{reason.Capacity, "no socket towards " + t.name + ": " + oneLine(err), rule}
	}
	if err != nil {
		return nil, refusal{reason.DialFailed, oneLine(err), rule}
	}
	u := &upstream{tcp: s, target: t, rule: rule, addr: a}
	if err := c.attach(u); err != nil {
		return nil, err
	}
	return u, nil
}

func oneLine(err error) string {
	if err == nil {
		return ""
	}
	return strings.ReplaceAll(err.Error(), "\n", "; ")
}

// countedConn is an upstream socket for the HTTP client. It offers no more than net.Conn on purpose: every
// byte goes through Read and Write, and is counted and held against the rule's limits.
type countedConn struct {
	net.Conn
	c *conn
	u *upstream

	dry bool // owned by whoever reads: nothing is waited for
}

// Read implements net.Conn.
func (k *countedConn) Read(p []byte) (int, error) {
	if k.dry {
		return 0, os.ErrDeadlineExceeded
	}
	n, err := k.Conn.Read(p)
	passed := k.u.meter.take(downward, n)
	k.c.count(0, int64(passed))
	if passed < n {
		return passed, k.c.exceed(k.u, downward)
	}
	return n, err
}

// Write implements net.Conn.
func (k *countedConn) Write(p []byte) (int, error) {
	may := k.u.meter.take(upward, len(p))
	n, err := k.Conn.Write(p[:may])
	k.u.meter.giveBack(upward, may-n)
	k.c.count(int64(n), 0)
	if err == nil && may < len(p) {
		return n, k.c.exceed(k.u, upward)
	}
	return n, err
}

// Close implements net.Conn.
func (k *countedConn) Close() error {
	k.c.detach(k.u)
	return k.Conn.Close()
}

// exceed ends an upstream socket whose rule has no bytes left, once the server has all that was granted.
func (c *conn) exceed(u *upstream, w way) error {
	why := c.spent(u, w)
	settle(u.tcp)
	reset(u.tcp)
	return why
}

// spent says that a rule's limit is reached: in the record of the connection's end, and as a refusal.
func (c *conn) spent(u *upstream, w way) error {
	why := refusal{reason.ByteLimit, "the rule's limit of bytes " + w.String() + " is reached", u.rule}
	c.blame(why.code, why.detail)
	return why
}
