package verify

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
)

// checkpoint is one whose signature counts.
type checkpoint struct {
	audit.Checkpoint
	from string // who has it
	ours bool   // the box itself
}

// Witnessed are signed checkpoints that somebody else kept, with where.
type Witnessed struct {
	From string
	Note []byte
}

// signedNote finds checkpoints in a text: an origin of ours, a size, a hash, and signatures.
var signedNote = regexp.MustCompile(`tagout/[^\n]+\n[0-9]+\n[A-Za-z0-9+/]{43}=\n(?:[^\n]+\n)*\n(?:— [^\n]+\n)+`)

// inSyslog finds them in what a syslog receiver wrote.
var inSyslog = regexp.MustCompile(`note="([A-Za-z0-9+/]+=*)"`)

// ReadWitness reads a witness's file: signed checkpoints as they are, as JSON documents a line with a field note, or
// as lines of syslog.
func ReadWitness(path string) ([]Witnessed, error) {
	raw, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading a witness's checkpoints: %w", err)
	}
	var out []Witnessed
	for line := range bytes.Lines(raw) {
		var doc struct {
			Note string `json:"note"`
		}
		if bytes.HasPrefix(line, []byte{'{'}) && json.Unmarshal(line, &doc) == nil && doc.Note != "" {
			out = append(out, Witnessed{path, []byte(doc.Note)})
			continue
		}
		for _, m := range inSyslog.FindAllSubmatch(line, -1) {
			if n, err := base64.StdEncoding.DecodeString(string(m[1])); err == nil {
				out = append(out, Witnessed{path, n})
			}
		}
	}
	for _, n := range signedNote.FindAll(raw, -1) {
		out = append(out, Witnessed{path, n})
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("reading a witness's checkpoints: %s holds none", path)
	}
	return out, nil
}

// KeyDir is where the daemons' public keys lie for others to read, below inst.AuditDir(); root's, so that a daemon
// cannot replace its own.
const KeyDir = "keys"

// key returns the key that a log's checkpoints are checked with.
func (v *run) key() (note.Verifier, error) {
	if k, ok := v.opt.Keys[v.log.Daemon]; ok {
		return k, nil
	}
	own := filepath.Join(v.dir, v.log.Daemon, audit.PublicKeyFile)
	exported := filepath.Join(v.dir, KeyDir, v.log.Daemon+".pub")
	raw, err := os.ReadFile(exported)
	from := exported
	if errors.Is(err, fs.ErrNotExist) {
		raw, err = os.ReadFile(own)
		from = own
		v.log.Notes = append(v.log.Notes, "the key is the one that lies with the log: whoever can write there can replace both")
	} else if other, ownErr := os.ReadFile(own); err == nil && ownErr == nil && !bytes.Equal(bytes.TrimSpace(raw), bytes.TrimSpace(other)) {
		v.log.find(Finding{Kind: NewKey, Detail: "the key that lies with the log is not the one that was exported to " + exported})
	}
	if err != nil {
		return nil, err
	}
	k, err := note.NewVerifier(string(bytes.TrimSpace(raw)))
	if err != nil {
		return nil, fmt.Errorf("%s is no key: %w", from, err)
	}
	return k, nil
}

// checkpoints loads all that there are, sorted by size. The box's own are read before the records are.
func (v *run) checkpoints() {
	key, err := v.key()
	if err != nil {
		v.log.find(Finding{Kind: NoKey, Detail: err.Error()})
		return
	}
	v.log.Origin, v.log.Key = key.Name(), string(keyText(v, key))
	older := v.ownCheckpoints(key)
	newest, err := os.ReadFile(filepath.Join(v.dir, v.log.Daemon, audit.CheckpointFile))
	if err == nil {
		c, err := audit.OpenCheckpoint(newest, key)
		if err != nil {
			v.log.find(Finding{Kind: Forged, Shard: audit.CheckpointFile, Detail: err.Error()})
		} else {
			v.log.Signed, v.log.Root = c.Size, base64.StdEncoding.EncodeToString(c.Root[:])
			v.points = append(v.points, checkpoint{c, audit.CheckpointFile, true})
		}
		if c.Size < older && err == nil {
			v.log.find(Finding{Kind: RolledBack, Shard: audit.CheckpointFile, Record: ptr(c.Size), To: ptr(older),
				Detail: fmt.Sprintf("it covers %d records, an older one %d", c.Size, older)})
		}
	} else if errors.Is(err, fs.ErrNotExist) && older == 0 && v.writing() {
		v.log.Notes = append(v.log.Notes, "the log has just begun: its first checkpoint is made within seconds")
	} else {
		v.log.find(Finding{Kind: RolledBack, Shard: audit.CheckpointFile, Detail: "there is no checkpoint: " + err.Error()})
	}
	v.witnesses(key)
	slices.SortStableFunc(v.points, func(a, b checkpoint) int { return int(int64(a.Size) - int64(b.Size)) })
}

func keyText(v *run, key note.Verifier) []byte {
	for _, path := range []string{filepath.Join(v.dir, KeyDir, v.log.Daemon+".pub"), filepath.Join(v.dir, v.log.Daemon, audit.PublicKeyFile)} {
		if raw, err := os.ReadFile(path); err == nil {
			if k, err := note.NewVerifier(string(bytes.TrimSpace(raw))); err == nil && k.Name() == key.Name() && k.KeyHash() == key.KeyHash() {
				return bytes.TrimSpace(raw)
			}
		}
	}
	return nil
}

// ownCheckpoints reads the older ones, and returns the greatest size.
func (v *run) ownCheckpoints(key note.Verifier) (most uint64) {
	raw, err := os.ReadFile(filepath.Join(v.dir, v.log.Daemon, audit.CheckpointsFile))
	if err != nil {
		return 0 // the newest one counts
	}
	n := 0
	for line := range bytes.Lines(raw) {
		n++
		if !bytes.HasSuffix(line, []byte{'\n'}) {
			break // it is just being written, or a crash cut it off
		}
		var k audit.KeptCheckpoint
		err := json.Unmarshal(line, &k)
		var c audit.Checkpoint
		if err == nil {
			c, err = audit.OpenCheckpoint([]byte(k.Note), key)
		}
		if err != nil {
			v.log.find(Finding{Kind: Forged, Shard: audit.CheckpointsFile, Detail: fmt.Sprintf("line %d: %v", n, err)})
			continue
		}
		most = max(most, c.Size)
		v.points = append(v.points, checkpoint{c, fmt.Sprintf("%s line %d", audit.CheckpointsFile, n), true})
	}
	return most
}

func (v *run) witnesses(key note.Verifier) {
	bad := map[string]bool{}
	for _, w := range v.opt.Witnesses {
		if !strings.HasPrefix(string(w.Note), key.Name()+"\n") {
			continue // of another log
		}
		c, err := audit.OpenCheckpoint(w.Note, key)
		if err != nil {
			if !bad[w.From] {
				v.log.find(Finding{Kind: NewKey, Shard: w.From, Detail: "the witness has a checkpoint of this log that this key did not sign: " + err.Error()})
			}
			bad[w.From] = true
			continue
		}
		v.log.Witnessed = max(v.log.Witnessed, c.Size)
		v.points = append(v.points, checkpoint{c, w.From, false})
	}
	if v.log.Witnessed > v.log.Signed {
		v.log.find(Finding{Kind: RolledBack, Shard: audit.CheckpointFile, Record: ptr(v.log.Signed), To: ptr(v.log.Witnessed),
			Detail: fmt.Sprintf("the box's newest covers %d records, a witness has one of %d", v.log.Signed, v.log.Witnessed)})
	}
}

// PublicKey is the key of one log.
type PublicKey struct {
	Daemon string `json:"daemon"`
	Key    string `json:"key"`
}

// PublicKeys returns the keys of all logs below dir: the exported one where there is one.
func PublicKeys(dir string) ([]PublicKey, error) {
	daemons, err := logsIn(dir)
	if err != nil {
		return nil, err
	}
	out := []PublicKey{}
	for _, d := range daemons {
		raw, err := os.ReadFile(filepath.Join(dir, KeyDir, d+".pub"))
		if errors.Is(err, fs.ErrNotExist) {
			raw, err = os.ReadFile(filepath.Join(dir, d, audit.PublicKeyFile))
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue // an older version wrote it
		}
		if err != nil {
			return nil, fmt.Errorf("reading the key of %s: %w", d, err)
		}
		out = append(out, PublicKey{d, string(bytes.TrimSpace(raw))})
	}
	return out, nil
}
