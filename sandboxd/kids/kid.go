package kids

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"tagout/internal/atomicfile"
	"tagout/internal/cgroup"
	"tagout/internal/session"
	"tagout/internal/wire"
	"tagout/sandboxd/files"
	"tagout/sandboxd/image"
	"tagout/sandboxd/lifecycle"
	"tagout/sandboxd/network"
	"tagout/sandboxd/runtime"
)

// kid is one kid in memory. rec and the fields above it are written by the goroutine that holds life, before
// the kid is running, and read-only afterwards; the rest says what guards it.
type kid struct {
	name   string
	rec    record
	pid    int    // of kid-init, 0 before it was created
	cancel func() // ends a spawn that is under way

	twins []string // other kids of the same card, when it was claimed

	mounts []runtime.Mount // of its root filesystem, from its image

	minted              []files.Text  // JWTs on their way into files; the spawn alone
	renewAt             time.Duration // CLOCK_BOOTTIME, when its JWTs are to be renewed; the spawn, then keepMinted alone
	renewFails          bool          // keepMinted alone: it was logged
	proofToken, noToken string        // of a proof's kid: its token, or why it has none

	life sync.Mutex // held by a spawn and by a teardown, so that they never overlap

	memory *cgroup.OOM // tells when it runs out of memory; nil before its container was made

	listing *listing // of its files at its end; nil before

	gone     chan struct{} // closed when kid-init has ended
	goneOnce sync.Once
	released chan struct{} // closed when nothing is left of the kid

	// Guarded by Manager.mu.
	state      lifecycle.State
	execs      map[string]*execution
	lingering  []*execution // ended, with processes left in their cgroup
	carries    int          // uses of its files that are under way
	time       life
	fresh      bool // no command has run in it since its spawn
	unfinished bool // its teardown failed, and Run goes on with it
	unpushed   bool // some enforcement point has not taken the session document yet
}

// recordVersion is the version of the record that this build writes, and the only one that it adopts.
const recordVersion = 1

// record is what sandboxd must know of a kid to adopt it or to tear it down. It lies in the kid's directory
// on a tmpfs; its tokens are opaque and worthless once credd has forgotten them.
type record struct {
	Version int                      `json:"version"`
	Whole   bool                     `json:"whole"`            // it was made to the end: a successor may adopt it
	Ending  bool                     `json:"ending,omitempty"` // its destroy has begun, and a successor goes on with it
	Session session.Session          `json:"session"`
	Plan    Plan                     `json:"plan"`
	Tokens  map[string]string        `json:"tokens,omitempty"`  // environment variable -> token
	Held    bool                     `json:"held,omitempty"`    // it lives as long as somebody holds it
	Used    time.Duration            `json:"used_ns,omitempty"` // CLOCK_BOOTTIME, when it was seen in use last
	IfIndex int                      `json:"ifindex,omitempty"`
	Origin  string                   `json:"origin,omitempty"` // Request.Origin
	Grants  []grant                  `json:"grants,omitempty"`
	Stages  map[string]time.Duration `json:"stages,omitempty"` // of its spawn; never changed, but replaced
	Steps   map[string]time.Duration `json:"steps,omitempty"`  // the same in detail
}

func newKid(name string, state lifecycle.State) *kid {
	return &kid{name: name, state: state, cancel: func() {}, gone: make(chan struct{}), released: make(chan struct{})}
}

// markGone notes that kid-init has ended. Safe to call more than once.
func (k *kid) markGone() {
	k.goneOnce.Do(func() {
		close(k.gone)
		if k.memory != nil {
			k.memory.Close() // nothing was written
		}
	})
}

// networked says whether the kid has a link.
func (k *kid) networked() bool { return k.rec.Session.Network == "" }

// onHost says whether it lives on the machine's network.
func (k *kid) onHost() bool { return k.rec.Session.Network == session.NetworkHost }

// entry is what the kernel knows, or should forget, of the kid.
func (k *kid) entry() Entry {
	s := &k.rec.Session
	return Entry{Mark: s.Mark, Addr: s.Addr, CgroupID: s.CgroupID, IfIndex: k.rec.IfIndex, Ports: k.rec.Plan.Ports, OnHost: k.onHost(), Reach: s.Reach}
}

// Where a kid's things are.
func (m *Manager) dir(name string) string       { return m.cfg.Inst.KidDir(name) }
func (m *Manager) rootDir(k *kid) string        { return filepath.Join(m.dir(k.name), "root") }
func (m *Manager) layersDir(k *kid) string      { return filepath.Join(m.dir(k.name), image.LayersDir) }
func (m *Manager) bundleDir(k *kid) string      { return filepath.Join(m.dir(k.name), "bundle") }
func (m *Manager) workspaceDir(k *kid) string   { return filepath.Join(m.dir(k.name), "workspace") }
func (m *Manager) cgroupRel(name string) string { return m.cfg.Inst.KidsCgroupRel() + "/" + name }
func (m *Manager) pins(name string) network.Namespaces {
	return network.Paths(m.cfg.Inst.NetNSDir(), name)
}

const recordName = "kid.json"

// save writes the record whole or not at all.
func (m *Manager) save(k *kid) error {
	raw, err := json.Marshal(&k.rec)
	if err != nil {
		return fmt.Errorf("noting kid %s: %w", k.name, err)
	}
	path := filepath.Join(m.dir(k.name), recordName)
	if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
		return fmt.Errorf("noting kid %s: %w", k.name, err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("noting kid %s: %w", k.name, err)
	}
	return nil
}

// saveCard keeps the text of the card that the kid's rules come from, for whoever wants to explain or extend
// them. A card carries no secrets; the instance's group may read it.
func (m *Manager) saveCard(name, text string) error {
	path := m.cfg.Inst.KidCard(name)
	err := os.WriteFile(path+".new", []byte(text), 0o600)
	if err == nil {
		err = errors.Join(os.Chown(path+".new", -1, m.cfg.Inst.GroupID()), os.Chmod(path+".new", 0o640))
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		err = m.keepCard(text)
	}
	if err != nil {
		return fmt.Errorf("keeping the card of kid %s: %w", name, err)
	}
	return nil
}

// keepCard keeps a card's text for good, once however many kids it has.
func (m *Manager) keepCard(text string) error {
	sum := sha256.Sum256([]byte(text))
	file := filepath.Join(m.cfg.Inst.CardDir(), hex.EncodeToString(sum[:])+".yaml")
	if info, err := os.Stat(file); err == nil && info.Size() == int64(len(text)) {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o750); err != nil {
		return err
	}
	return atomicfile.Write(file, []byte(text), 0o640, -1, m.cfg.Inst.GroupID())
}

// load reads the record of the kid called name.
func (m *Manager) load(name string) (record, error) {
	var rec record
	raw, err := os.ReadFile(filepath.Join(m.dir(name), recordName))
	if err != nil {
		return rec, fmt.Errorf("reading what is known of kid %s: %w", name, err)
	}
	if err := json.Unmarshal(raw, &rec); err != nil {
		return rec, fmt.Errorf("reading what is known of kid %s: %w", name, err)
	}
	if rec.Version != recordVersion || rec.Session.Kid != name {
		return rec, errors.New("what is known of kid " + name + " is not for this version of Tagout")
	}
	return rec, nil
}

// view is what people see of the kid. Call it with Manager.mu held.
func (k *kid) view() wire.Kid {
	s := &k.rec.Session
	var ends time.Time
	if k.time.end != 0 {
		ends = s.Created.Add(k.rec.Plan.Lifetime)
	}
	addr := s.Addr
	if !k.networked() {
		addr = netip.Addr{} // kept free for it, and never used
	}
	return wire.Kid{
		Owner: k.rec.Plan.Owner, Held: k.rec.Held, Ends: ends, Idle: k.rec.Plan.Idle,
		Name: k.name, Session: s.ID, State: k.state.Now(), Cause: k.state.Cause(), Purpose: s.Purpose, Card: s.Card, Mark: s.Mark,
		Network: s.Network, Approval: s.Approval, Addr: addr, Cgroup: s.Cgroup, Created: s.Created, Timings: k.rec.Stages, Steps: k.rec.Steps, Proof: wire.IsProofKid(k.name),
	}
}
