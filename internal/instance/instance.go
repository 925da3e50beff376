// Package instance derives every name, path, address and id that one Tagout instance may use.
//
// Several instances live on one machine without meeting: each owns a slot (0-15), and the slot fixes its
// subnets, marks, uids and interface names; the instance name fixes its directories, cgroups, pins and
// chains. Everything here is pure except the slot registry (slot.go).
package instance

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
)

// Slots is how many instances one machine can hold at once.
const Slots = 16

// MaxKids is how many kids one instance can hold at once: one uid range and one /31 each.
const MaxKids = 255

// Ports on the gateway address. Each instance has a gateway address of its own, so the ports never clash.
const (
	PortDNS         = 53
	PortExplicit    = 3128 // CONNECT and absolute-form HTTP
	PortTransparent = 3129 // where the firewall sends a kid's other TCP connections
)

// markPrefix is the top byte of every mark, so that a Tagout mark is told apart from other users' marks.
const markPrefix = 0x54

var nameRE = regexp.MustCompile(`^[a-z][a-z0-9]{0,11}$`)

// Instance is a validated instance name with its slot. Its methods are pure and safe for concurrent use.
type Instance struct {
	name string
	slot int
}

// New returns the instance called name in the given slot.
func New(name string, slot int) (Instance, error) {
	if err := CheckName(name); err != nil {
		return Instance{}, err
	}
	if slot < 0 || slot >= Slots {
		return Instance{}, fmt.Errorf("instance %s: slot %d is outside 0-%d", name, slot, Slots-1)
	}
	return Instance{name: name, slot: slot}, nil
}

// CheckName says whether name can name an instance: 1-12 lower-case letters and digits, a letter first.
func CheckName(name string) error {
	if !nameRE.MatchString(name) {
		return fmt.Errorf("instance name %q: use 1 to 12 lower-case letters and digits, starting with a letter", name)
	}
	return nil
}

// Name returns the instance's name.
func (i Instance) Name() string { return i.name }

// Slot returns the instance's slot, 0-15.
func (i Instance) Slot() int { return i.slot }

// Directories. Run is volatile (tmpfs on most machines), State survives a reboot.
func (i Instance) RunDir() string   { return filepath.Join(runRoot, i.name) }
func (i Instance) StateDir() string { return filepath.Join(stateRoot, i.name) }

// DrillDir holds what became of the drills of this machine, and the key that signs their reports. No instance can
// have its name.
func DrillDir() string { return filepath.Join(stateRoot, "drill-history") }

// AuditDir holds one JSON-lines file a daemon.
func (i Instance) AuditDir() string { return filepath.Join(i.StateDir(), "audit") }

// AuditFile is the log that the daemon appends to.
func (i Instance) AuditFile(daemon string) string {
	return filepath.Join(i.AuditDir(), daemon, daemon+".jsonl")
}

// AuditIndexDir holds the index of the audit logs. It can be made again from them at any time; only root reads it.
func (i Instance) AuditIndexDir() string { return filepath.Join(i.StateDir(), "audit-index") }

// SessionDir holds one JSON document a living session (package session).
func (i Instance) SessionDir() string { return filepath.Join(i.RunDir(), "sessions") }

// TagDir holds one JSON document a hanging tag; only killswitchd writes there.
func (i Instance) TagDir() string { return filepath.Join(i.StateDir(), "tags") }

// StopDir holds a note of each stop under way whose tag is not on disk yet; volatile, killswitchd's own.
func (i Instance) StopDir() string { return filepath.Join(i.RunDir(), "stops") }

// BoxIDFile holds the ULID that `tagout setup` gave the box; orders name it.
func (i Instance) BoxIDFile() string { return filepath.Join(i.StateDir(), "box.id") }

// AuthorityFile is the list of those who may give orders, as `tagout setup` compiled it; only root writes it.
func (i Instance) AuthorityFile() string { return filepath.Join(i.StateDir(), "authorities.json") }

// OrderDir remembers which signed orders were used; only killswitchd writes there.
func (i Instance) OrderDir() string { return filepath.Join(i.StateDir(), "orders") }

// KidDir holds what sandboxd keeps of one kid: its bundle, scratch mounts and etc files.
func (i Instance) KidDir(kid string) string { return filepath.Join(i.RunDir(), "kids", kid) }

// KidCard is the text of the card whose egress rules are in force for a kid; the instance's group may read it.
func (i Instance) KidCard(kid string) string { return filepath.Join(i.KidDir(kid), "card.yaml") }

// CardDir keeps the text of every card that a kid was spawned with, by its sha256: records name it, and evidence needs it
// when the kid is long gone.
func (i Instance) CardDir() string { return filepath.Join(i.StateDir(), "cards") }

// KeyDir holds what sandboxd remembers of requests with an Idempotency-Key; volatile.
func (i Instance) KeyDir() string { return filepath.Join(i.RunDir(), "idempotency") }

// ImageDir holds the images that were imported; only root reaches it.
func (i Instance) ImageDir() string { return filepath.Join(i.StateDir(), "images") }

// APIKeyFile holds the names, roles and hashes of the API's keys; only root reads it.
func (i Instance) APIKeyFile() string { return filepath.Join(i.StateDir(), "apikeys.json") }

// RuncRoot is runc's own state directory.
func (i Instance) RuncRoot() string { return filepath.Join(i.RunDir(), "runc") }

// BoxConfig is the box's configuration as `tagout setup` installed it.
func (i Instance) BoxConfig() string { return filepath.Join(i.StateDir(), "box.yaml") }

// ProofFile is the file in the state directory that tells killswitchd how often to prove the stop layers.
const ProofFile = "proof.json"

// TripFile is the file in the state directory that holds the trip rules of the box's configuration.
const TripFile = "trips.json"

// TripDir holds what killswitchd remembers of the living sessions' trip rules; volatile, killswitchd's own.
func (i Instance) TripDir() string { return filepath.Join(i.RunDir(), "trips") }

// WatchFile is where sandboxd says which kids' files and programs it watches; volatile.
func (i Instance) WatchFile() string { return filepath.Join(i.RunDir(), "watched.json") }

// CADir holds the inspection CA: ca.pem is world-readable, the rest belongs to the proxy alone.
func (i Instance) CADir() string { return filepath.Join(i.StateDir(), "ca") }

// CreddDir holds the vault, its identity and the revocation ledger; only credd can read it.
func (i Instance) CreddDir() string { return filepath.Join(i.StateDir(), "credd") }

// DNSStateDir holds the virtual addresses that dnsfilter gave to wildcard names.
func (i Instance) DNSStateDir() string { return filepath.Join(i.RunDir(), "vaddr") }

// UnlockEnv is the environment variable that tells credd which of its open files holds what opens the vault's identity:
// a number, 3 or more. UnlockCredential is the name under which systemd keeps it (systemd.exec(5), LoadCredential=).
const (
	UnlockEnv        = "TAGOUT_UNLOCK_FD"
	UnlockCredential = "tagout-credd"
)

// Forgetful is what GODEBUG holds for a process that secrets pass through: its garbage collector overwrites what it frees.
const Forgetful = "clobberfree=1"

// Socket is the unix socket on which the daemon listens for HTTP. Each lies in a directory of its own that
// belongs to the daemon, so that a daemon can replace its own socket and no other's.
func (i Instance) Socket(daemon string) string {
	return filepath.Join(i.RunDir(), "sock", daemon, "http.sock")
}

// PrintsFile is where credd says what recognises the values that it keeps, so that the other daemons leave them out of
// their records; volatile, credd's own, for the instance's group to read.
func (i Instance) PrintsFile() string {
	return filepath.Join(filepath.Dir(i.Socket(Credd)), "redact.json")
}

// PidFile is where the supervisor notes the daemon's pid.
func (i Instance) PidFile(daemon string) string {
	return filepath.Join(i.RunDir(), "pid", daemon+".pid")
}

// PinDir is the instance's directory on the BPF filesystem.
func (i Instance) PinDir() string { return filepath.Join("/sys/fs/bpf/tagout", i.name) }

// CgroupRel is the instance's cgroup relative to a hierarchy's root; see package cgroup for the rest.
func (i Instance) CgroupRel() string { return "/tagout." + i.name }

// KidsCgroupRel is the parent of every kid's cgroup; each kid's is a child with the kid's name.
func (i Instance) KidsCgroupRel() string { return i.CgroupRel() + "/kids" }

// KidCgroupLevel is the ancestor level of a kid's own cgroup in the v2 hierarchy, the root being level 0.
const KidCgroupLevel = 3

// DaemonCgroupRel is the cgroup that holds one daemon's processes and nothing else.
func (i Instance) DaemonCgroupRel(daemon string) string {
	return i.CgroupRel() + "/daemons/" + daemon
}

// StoreCgroupRel is the cgroup of the store of descriptors that outlive sandboxd.
func (i Instance) StoreCgroupRel() string { return i.CgroupRel() + "/store" }

// StoreSocket is that store's unix socket.
func (i Instance) StoreSocket() string { return filepath.Join(i.RunDir(), "store.sock") }

// NetNSDir holds the kids' pinned network namespaces, named after the kid.
func (i Instance) NetNSDir() string { return filepath.Join(i.RunDir(), "netns") }

// Network names and addresses.

// GatewayLink is the dummy interface that carries the gateway address.
func (i Instance) GatewayLink() string { return fmt.Sprintf("tgo%x", i.slot) }

// LinkPrefix begins the name of every kid-side interface; iptables matches it with a trailing +.
func (i Instance) LinkPrefix() string { return fmt.Sprintf("kid%x-", i.slot) }

// KidLink is the host-side interface of the kid with the given index.
func (i Instance) KidLink(index int) string { return fmt.Sprintf("%s%d", i.LinkPrefix(), index) }

// ChainPrefix begins the name of every iptables chain of this instance.
func (i Instance) ChainPrefix() string { return fmt.Sprintf("TGO-%s", i.name) }

// KidNet is the /20 out of 198.19.0.0/16 from which gateway and kids get their addresses.
func (i Instance) KidNet() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 19, byte(i.slot << 4), 0}), 20)
}

// Gateway is the one address a kid can talk to for DNS and the explicit proxy.
func (i Instance) Gateway() netip.Addr {
	return netip.AddrFrom4([4]byte{198, 19, byte(i.slot << 4), 1})
}

// VirtualNet is the /20 out of 198.18.0.0/16 whose addresses stand for (session, name).
func (i Instance) VirtualNet() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{198, 18, byte(i.slot << 4), 0}), 20)
}

// KidAddrs returns the host and kid ends of the /31 of the kid with the given index (1 to MaxKids).
func (i Instance) KidAddrs(index int) (host, kid netip.Addr) {
	n := index * 2
	third := byte(i.slot<<4) + byte(n>>8)
	return netip.AddrFrom4([4]byte{198, 19, third, byte(n)}), netip.AddrFrom4([4]byte{198, 19, third, byte(n) + 1}) // n is below 512
}

// PracticeNet is the /28 out of 203.0.113.0/24 (RFC 5737) that this instance's practice internet uses.
func (i Instance) PracticeNet() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte{203, 0, 113, byte(i.slot << 4)}), 28)
}

// Marks.

// BoxMark marks the daemons' own upstream traffic (alerts), as opposed to a session's.
func (i Instance) BoxMark() uint32 { return markPrefix<<24 | uint32(i.slot)<<20 } // slot < 16

// SessionMark returns the mark of the session with sequence number seq (1 to 1<<20-1). Sequence numbers are
// never used again while the box is up, so a mark names one session.
func (i Instance) SessionMark(seq uint32) uint32 { return i.BoxMark() | seq&(1<<20-1) }

// OwnsMark says whether mark belongs to this instance.
func (i Instance) OwnsMark(mark uint32) bool { return mark>>20 == i.BoxMark()>>20 }

// Daemon names, used for users, cgroups, sockets, audit files and metrics.
const (
	Sandboxd    = "sandboxd"
	Proxy       = "proxy"
	DNSFilter   = "dnsfilter"
	Credd       = "credd"
	Killswitchd = "killswitchd"

	CLI = "tagout" // no daemon: what the command records of what it does itself
)

// Daemons lists the daemons in the order in which they start; they stop in the reverse order.
func Daemons() []string { return []string{Killswitchd, Credd, DNSFilter, Proxy, Sandboxd} }

// uidBase begins the daemons' uids: above what distributions and systemd hand out (docs/decisions/0003).
const uidBase = 0x6FFF0000

// UID returns the uid (and gid) of a daemon; sandboxd runs as root. Each instance has uids of its own, so
// that a daemon of one instance cannot touch another instance's files. Unknown names panic.
func (i Instance) UID(daemon string) int {
	roles := map[string]int{Sandboxd: -1, Proxy: 1, DNSFilter: 2, Credd: 3, Killswitchd: 4}
	role, ok := roles[daemon]
	if !ok {
		panic("instance: no daemon is called " + daemon)
	}
	if role < 0 {
		return 0
	}
	return uidBase + i.slot*16 + role
}

// GroupID is the gid that all daemons of the instance share: it may read session documents and connect to
// sockets (each socket still checks who is calling).
func (i Instance) GroupID() int { return uidBase + i.slot*16 }

// kidUIDBase begins the kids' uid ranges; 16 slots x 256 ranges of 65,536 end below 1<<31.
const kidUIDBase = 0x70000000

// KidUIDRange returns the first host uid and the length of the range of the kid with the given index.
func (i Instance) KidUIDRange(index int) (first, length uint32) {
	return kidUIDBase + uint32(i.slot)<<24 + uint32(index)<<16, 1 << 16 // both are bounded
}
