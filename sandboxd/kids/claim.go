package kids

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"github.com/oklog/ulid/v2"

	"tagout/internal/bootclock"
	"tagout/internal/instance"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/lifecycle"
)

// nameAttempts is how many made-up names are tried.
const nameAttempts = 20

// claim takes the name, an index and a mark, and makes the kid's directory. From here on the name is taken;
// of two claims for one name, one wins. A made-up name is none of those on which tags hang.
func (m *Manager) claim(r Request, tags []wire.Tag) (*kid, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name, err := m.freeName(r.Name, tags)
	if err != nil {
		return nil, err
	}
	if err := m.withinBudget(r.Plan); err != nil {
		return nil, err
	}
	index, err := m.freeIndex()
	if err != nil {
		return nil, err
	}
	seq, err := m.seq.take()
	if err != nil {
		return nil, refuse(Capacity, reason.Capacity, "claiming a mark for kid %s: %w", name, err)
	}
	k := newKid(name, lifecycle.New())
	k.rec = record{
		Version: recordVersion, Plan: r.Plan, Origin: r.Origin, Held: r.Held,
		Session: m.newSession(name, index, seq, r),
	}
	if err := os.Mkdir(m.dir(name), 0o711); err != nil { // runc passes through as the kid's root user
		if errors.Is(err, fs.ErrExist) {
			return nil, refuse(Conflict, reason.Capacity, "the name %s is taken by a kid that was left behind: destroy it, or run `tagout cleanup`", name)
		}
		return nil, fmt.Errorf("claiming kid %s: %w", name, err)
	}
	err = os.Chmod(m.dir(name), 0o711) // as above, whatever the umask is
	if err == nil {
		err = errors.Join(m.save(k), m.saveCard(name, r.Plan.CardText))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("claiming kid %s: %w", name, err), os.RemoveAll(m.dir(name)))
	}
	k.life.Lock()
	k.twins = m.twins(r.Plan.Card)
	m.kids[name] = k
	m.countKids()
	return k, nil
}

// freeName checks a wanted name or makes one up. Call it with mu held.
func (m *Manager) freeName(wanted string, tags []wire.Tag) (string, error) {
	if wanted != "" {
		if k := m.kids[wanted]; k != nil {
			return "", refuse(Conflict, reason.OK, "the name %s is taken by a kid that is %s: choose another name, or destroy that kid first", wanted, k.state.Now())
		}
		return wanted, nil
	}
	for attempt := range nameAttempts {
		name := makeUpName(attempt)
		if m.kids[name] != nil || slices.ContainsFunc(tags, func(t wire.Tag) bool { return t.Released.IsZero() && t.Scope.Kid == name }) {
			continue
		}
		if _, err := os.Lstat(m.dir(name)); errors.Is(err, fs.ErrNotExist) {
			return name, nil
		}
	}
	return "", refuse(Capacity, reason.Capacity, "no name could be made up: give the kid one")
}

// freeIndex returns the index that was free for the longest time, so that an address is not given to
// another kid sooner than need be. Call it with mu held.
func (m *Manager) freeIndex() (int, error) {
	taken := map[int]bool{}
	for _, k := range m.kids {
		taken[k.rec.Session.Index] = true
	}
	for i := range instance.MaxKids {
		index := (m.last+i)%instance.MaxKids + 1
		if !taken[index] {
			m.last = index
			return index, nil
		}
	}
	return 0, refuse(Capacity, reason.Capacity, "all %d places for kids are taken: destroy one", instance.MaxKids)
}

// newSession describes the session as far as it is known before anything was made for it.
func (m *Manager) newSession(name string, index int, seq uint32, r Request) session.Session {
	inst := m.cfg.Inst
	host, addr := inst.KidAddrs(index)
	link, netNS := inst.KidLink(index), m.pins(name).Net
	if r.Plan.Network != "" {
		link = ""
	}
	if r.Plan.Network == session.NetworkHost {
		netNS = ""
	}
	return session.Session{
		Version: session.Version, ID: ulid.Make().String(), Kid: name, Purpose: r.Purpose,
		Card: r.Plan.Card, CardHash: r.Plan.CardHash, Index: index, Mark: inst.SessionMark(seq),
		Addr: addr, HostAddr: host, Network: r.Plan.Network, Reach: r.Plan.Reach, Approval: r.approved.view(), Link: link, NetNS: netNS,
		Cgroup: m.cfg.Cgroups.V2(m.cgroupRel(name)), Freezer: m.cfg.Cgroups.Freezer(m.cgroupRel(name)),
		Generation: 1, Egress: m.withCanaries(r.Plan.Egress, r.Plan.Stop), Names: r.Plan.Hosts, Secrets: r.Plan.Secrets, Mints: r.Plan.Mints, Stop: r.Plan.Stop, Created: time.Now().UTC(), Boot: bootclock.Now(),
	}
}
