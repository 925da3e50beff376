// Package audit writes what happened: one append-only JSON-lines file a daemon, one schema for all, secrets
// redacted before the first byte is written. It never makes its caller wait for a disk that hangs: records
// that cannot be kept are counted, and the count is written as a gap record as soon as writing works again.
package audit

import (
	"net/netip"
	"time"

	"tagout/internal/reason"
)

// Version is the schema's version.
const Version = 1

// Event names. Past tense, noun first.
const (
	EventDaemonStarted  = "daemon.started"
	EventDaemonStopped  = "daemon.stopped"
	EventConfigChanged  = "config.changed" // the box's, since sandboxd was last started
	EventDrillEnded     = "drill.ended"    // a drill on this machine, by the command
	EventKeyAdded       = "apikey.added"   // by the command
	EventKeyRemoved     = "apikey.removed"
	EventGap            = "audit.gap"
	EventShardBegan     = "audit.shard"    // first record of a file that goes on with a log
	EventExpired        = "audit.expired"  // by sandboxd: all records before one were removed, their time was over
	EventSealed         = "audit.sealed"   // by sandboxd: a closed piece was encrypted
	EventSpace          = "audit.space"    // by sandboxd: how full the disk of the logs is, when that changes
	EventWitness        = "audit.witness"  // by sandboxd: a witness missed checkpoints, or refused one
	EventStarved        = "daemon.starved" // no descriptor or memory for new connections; outcome ok: there is again
	EventKidSpawned     = "kid.spawned"
	EventKidDestroyed   = "kid.destroyed"
	EventKidRefused     = "kid.refused"
	EventKeyAllowed     = "key.allowed"
	EventKidPaused      = "kid.paused"
	EventKidResumed     = "kid.resumed"
	EventKidOOM         = "kid.oom"         // it ran out of memory
	EventProcessStarted = "process.started" // a program, by anything in a kid
	EventProcessCounts  = "process.counted" // how many there were, when the session has ended
	EventFileCreated    = "file.created"    // these four by anything in a kid, in a place where it may write
	EventFileChanged    = "file.changed"
	EventFileRenamed    = "file.renamed"
	EventFileDeleted    = "file.deleted"
	EventFileManifest   = "file.manifest" // what is in those places at the session's end
	EventLessonKept     = "lesson.kept"
	EventExecStarted    = "exec.started"
	EventExecEnded      = "exec.ended"
	EventExecAdopted    = "exec.adopted"  // it goes on after a restart of sandboxd
	EventExecUnkept     = "exec.unkept"   // it would not
	EventExecAttached   = "exec.attached" // somebody else may give it input
	EventAPICalled      = "api.called"    // over TCP
	EventAPIRefused     = "api.refused"   // a caller whom nobody knows
	EventToolCalled     = "tool.called"   // by an AI agent
	EventFileRead       = "file.read"
	EventFileWritten    = "file.written"
	EventFilesListed    = "files.listed"
	EventImageAdded     = "image.added"   // pulled, imported or built
	EventImageRefused   = "image.refused" // not added, or not removed
	EventImageRemoved   = "image.removed"
	EventPolicyLoaded   = "policy.loaded"
	EventPolicyChanged  = "policy.changed" // a living kid's policy, by somebody's word
	EventGrantPlaced    = "grant.placed"
	EventGrantEnded     = "grant.ended"
	EventPolicyRemoved  = "policy.removed"
	EventConnectDenied  = "connect.denied" // by a BPF program or the firewall
	EventLookup         = "dns.lookup"     // outcome allow or deny
	EventConnOpened     = "conn.opened"    // by the proxy; outcome allow or deny
	EventConnProgress   = "conn.progress"  // interim byte counts of a long connection
	EventConnClosed     = "conn.closed"    // with exact byte counts
	EventRequest        = "http.request"   // one HTTP request on an inspected or plain connection
	EventTokenMinted    = "token.minted"   // a name, not a token
	EventTokenUsed      = "token.used"     // a name, not a token
	EventTokenRefused   = "token.refused"  // a name, not a token
	EventTokenRevoked   = "token.revoked"  // a name, not a token
	EventTokenExpired   = "token.expired"  // a name, not a token
	EventTokenJudged    = "token.judged"   // at a session's end: names that it was granted and did not use
	EventVaultChanged   = "vault.changed"
	EventVaultUnlocked  = "vault.unlocked" // or not, with a wrong key
	EventVaultSealed    = "vault.sealed"   // its identity, in another way
	EventIssuerChanged  = "issuer.changed" // its keys, or its clients
	EventStopReceived   = "stop.received"
	EventStopProgress   = "stop.progress"
	EventStopCompleted  = "stop.completed"
	EventTagReleased    = "tag.released"
	EventReleaseRefused = "tag.release-refused"
	EventTagApproved    = "tag.release-approved" // the first of two people's words
	EventHostApproved   = "network.approved"     // a person's approval of the machine's network was used up
	EventOrderRefused   = "order.refused"        // a signed order that is not carried out
	EventProofPassed    = "proof.passed"         // killswitchd's, of its own layers
	EventProofFailed    = "proof.failed"
	EventTripped        = "trip.fired"          // a trip rule stopped a kid
	EventExecSeen       = "exec.seen"           // a kid started a program that a trip rule forbids
	EventWriteSeen      = "write.seen"          // a kid wrote a file outside its scratch places
	EventAlertDropped   = "alert.dropped"       // attempts that a receiver of alerts will not be told of
	EventStreamDropped  = "stream.dropped"      // records that a receiver of all of them will not get
	EventLeaseWithheld  = "lease.withheld"      // by sandboxd: something is not well
	EventLeaseRenewed   = "lease.renewed"       // after it was withheld, or because it starts anew
	EventLeaseMinted    = "lease.minted"        // a secret, from a provider
	EventLeaseLost      = "lease.lost"          // it could not be renewed
	EventLeaseRevoked   = "lease.revoked"       // the provider says so
	EventRevokeFailed   = "lease.revoke-failed" // the first try, or all of them
	EventLeaseExpired   = "lease.expired"       // and kids were stopped
	EventKidKilled      = "kid.killed"          // by sandboxd itself, because killswitchd stayed away
)

// FieldCounted is the field of a gap record whose events are counted in other records all the same; it says in which.
const FieldCounted = "counted"

// FieldCause is the field of a gap record about the log itself; its Count is how many records are known to be missing.
// "crash": the daemon did not end cleanly; "clock": the wall clock was set; "lost", "cut": records were there and are
// gone, see FieldFrom; "removed": the live file was; "foreign": somebody else wrote into it; "disk", "key", "tree".
const FieldCause = "cause"

// FieldFrom and FieldTo are the sequence numbers of the first record that is missing, and of the first that is not.
const (
	FieldFrom = "from"
	FieldTo   = "to"
)

// Fields of EventExpired and EventSealed: whose log, and which file.
const (
	FieldDaemon = "daemon"
	FieldShard  = "shard"
	FieldSHA256 = "sha256" // of the encrypted file
)

// FieldTree is the field of EventShardBegan that has the tree's hash over all records before it, in hex.
const FieldTree = "tree"

// FieldPrevious is the field of EventShardBegan that has the sequence number with which the piece before this one begins.
const FieldPrevious = "previous"

// FieldFirst is the field of EventShardBegan that has the sequence number of this very record.
const FieldFirst = "first"

// FieldBlind is the field of a gap record about one kid whose programs and files could not all be watched.
const FieldBlind = "blind"

// FieldLost is the field of a gap record that is about one kind of event: "file".
const FieldLost = "lost"

// Outcomes.
const (
	OutcomeAllow = "allow"
	OutcomeDeny  = "deny"
	OutcomeOK    = "ok"
	OutcomeFail  = "fail"
)

// Record is one line. The logger fills Version, ID, Time, Boot, Instance and Daemon; everything else is the
// caller's, and empty fields are left out.
type Record struct {
	Version  int           `json:"v"`
	ID       string        `json:"id"`      // ULID, unique and ordered within a daemon
	Time     time.Time     `json:"time"`    // wall clock, UTC, for people
	Boot     time.Duration `json:"boot_ns"` // CLOCK_BOOTTIME, for ordering
	BootID   string        `json:"boot_id"` // tells the boots apart: Boot starts again at each
	Instance string        `json:"instance"`
	Daemon   string        `json:"daemon"`
	Event    string        `json:"event"`

	Session string `json:"session,omitempty"`
	Kid     string `json:"kid,omitempty"`
	Mark    uint32 `json:"mark,omitempty"`
	Card    string `json:"card,omitempty"`

	CardSHA256 string `json:"card_sha256,omitempty"` // of the card's bytes, hex

	Actor      string      `json:"actor,omitempty"` // "uid:0", a person's name, "kid"
	Outcome    string      `json:"outcome,omitempty"`
	Reason     reason.Code `json:"reason,omitempty"`
	Rule       int         `json:"rule,omitempty"` // line in the card
	Generation uint64      `json:"generation,omitempty"`

	Process *Process `json:"process,omitempty"`
	Dst     *Dst     `json:"dst,omitempty"`
	Bytes   *Bytes   `json:"bytes,omitempty"`
	Conn    string   `json:"conn,omitempty"` // ULID that joins a connection's records

	Count  uint64            `json:"count,omitempty"` // how many events this record stands for, or how many were lost
	Detail string            `json:"detail,omitempty"`
	Fields map[string]string `json:"fields,omitempty"` // event-specific, documented in docs/audit.md
}

// Process is who did it, as the kernel saw it.
type Process struct {
	PID    int    `json:"pid"`              // in the host's pid namespace
	Parent int    `json:"parent,omitempty"` // the pid of its parent, there too
	Comm   string `json:"comm,omitempty"`
	Exe    string `json:"exe,omitempty"`
}

// Dst is where a connection, datagram or lookup was going.
type Dst struct {
	Name  string     `json:"name,omitempty"`
	Addr  netip.Addr `json:"addr,omitzero"` // as the kid saw it: often virtual
	Real  netip.Addr `json:"real,omitzero"` // upstream
	Port  uint16     `json:"port,omitempty"`
	Proto string     `json:"proto,omitempty"` // tcp, udp, tls, http, …
}

// Bytes are payload bytes, exact, not counting TCP/IP headers.
type Bytes struct {
	Up   int64 `json:"up"`   // kid to upstream
	Down int64 `json:"down"` // upstream to kid
}
