// Package verify proves that the audit logs are what their daemons wrote, or says where they are not. It recomputes
// each log's Merkle tree from the lines and compares it with the hashes that the daemon kept, with every checkpoint that
// it signed and with those that witnesses have. Without a witness it cannot see what somebody with the daemon's key, root
// on the box, rewrote whole and signed again.
package verify

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Kinds of findings.
const (
	Changed     = "record-changed"    // its bytes are not those that were written
	Vanished    = "record-vanished"   // it was written and is not there
	TailCut     = "tail-cut"          // the last ones were
	ShardGone   = "shard-missing"     // a whole closed piece was
	Replaced    = "shard-replaced"    // a piece holds nothing that was written there
	Swapped     = "shard-swapped"     // a piece holds records that belong elsewhere
	Moved       = "record-moved"      // it stands somewhere else
	Duplicate   = "record-duplicated" // it is there twice
	Foreign     = "foreign-record"    // the daemon did not write it
	Unproven    = "record-unproven"   // the tree does not have it yet: written just before a crash, or by somebody else
	TreeChanged = "tree-changed"      // the kept hashes are wrong, the records are right
	Rewritten   = "log-rewritten"     // records and hashes agree, and not with a checkpoint
	Forged      = "checkpoint-forged"
	RolledBack  = "checkpoint-rolled-back"
	NoKey       = "key-missing"
	NewKey      = "key-replaced"
	NoTree      = "tree-missing"
	Ciphertext  = "sealed-shard-changed"
	Unreadable  = "unreadable"
)

// Finding is one thing that is wrong.
type Finding struct {
	Kind   string  `json:"kind"`
	Daemon string  `json:"daemon"`
	Shard  string  `json:"shard,omitempty"`  // file, below the daemon's directory
	Record *uint64 `json:"record,omitempty"` // sequence number, of the first where it is about several
	To     *uint64 `json:"to,omitempty"`     // of the one behind the last
	Offset *int64  `json:"offset,omitempty"` // of the record's first byte in the file
	Detail string  `json:"detail"`
	Told   bool    `json:"told,omitempty"` // a gap record of the log says so itself
}

// String is a line for people.
func (f Finding) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %s", f.Daemon, f.Kind)
	switch {
	case f.Record != nil && f.To != nil && *f.To > *f.Record+1:
		fmt.Fprintf(&b, " %d to %d", *f.Record, *f.To-1)
	case f.Record != nil:
		fmt.Fprintf(&b, " %d", *f.Record)
	}
	if f.Shard != "" {
		fmt.Fprintf(&b, " in %s", f.Shard)
	}
	if f.Offset != nil {
		fmt.Fprintf(&b, " at byte %d", *f.Offset)
	}
	if f.Detail != "" {
		b.WriteString(": " + f.Detail)
	}
	if f.Told {
		b.WriteString(" (a gap record says so)")
	}
	return b.String()
}

// Log is what was found out about one daemon's log.
type Log struct {
	Daemon    string    `json:"daemon"`
	Origin    string    `json:"origin,omitempty"` // of its checkpoints
	Key       string    `json:"key,omitempty"`    // public
	Shards    int       `json:"shards"`
	Records   uint64    `json:"records"`         // sequence numbers in use
	Read      uint64    `json:"read"`            // records whose bytes were read
	Hashed    uint64    `json:"hashed"`          // records of encrypted pieces, known by their hashes
	Expired   uint64    `json:"expired"`         // records before this one were removed when their time was over
	Signed    uint64    `json:"signed"`          // records that the newest checkpoint covers
	Root      string    `json:"root,omitempty"`  // of the newest checkpoint, base64
	Witnessed uint64    `json:"witnessed"`       // records that the witnesses' newest checkpoint covers
	Notes     []string  `json:"notes,omitempty"` // nothing wrong
	Findings  []Finding `json:"findings,omitempty"`
}

func (l *Log) find(f Finding) {
	f.Daemon = l.Daemon
	l.Findings = append(l.Findings, f)
}

// Report is of all logs.
type Report struct {
	OK   bool  `json:"ok"`
	Logs []Log `json:"logs"`
}

// Findings returns all of them.
func (r *Report) Findings() []Finding {
	var out []Finding
	for _, l := range r.Logs {
		out = append(out, l.Findings...)
	}
	return out
}

// JSON is the report for programs.
func (r *Report) JSON() ([]byte, error) { return json.MarshalIndent(r, "", "  ") }

func ptr[T any](v T) *T { return &v }
