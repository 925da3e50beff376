package audit

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
)

// Files of a log's tree, in its daemon's directory.
const (
	TreeDir         = "tree"
	HashFile        = TreeDir + "/hashes"      // every complete node of the tree, 32 bytes each
	CheckpointFile  = TreeDir + "/checkpoint"  // the newest signed checkpoint
	CheckpointsFile = TreeDir + "/checkpoints" // older ones too, a JSON document a line
	KeyFile         = TreeDir + "/key"         // signs checkpoints; its owner's alone
	PublicKeyFile   = TreeDir + "/key.pub"
	lockFile        = TreeDir + "/lock"
)

// Origin is the first line of a log's checkpoints, and the name of the key that signs them.
func Origin(instance, daemon string) string { return "tagout/" + instance + "/" + daemon }

// Checkpoint says what a log's tree is: a C2SP tlog-checkpoint.
type Checkpoint struct {
	Origin string
	Size   uint64 // records
	Root   Hash
}

// Text is the part that is signed.
func (c Checkpoint) Text() string {
	return fmt.Sprintf("%s\n%d\n%s\n", c.Origin, c.Size, base64.StdEncoding.EncodeToString(c.Root[:]))
}

// ParseCheckpoint reads the text of a checkpoint; lines after the third are extensions that mean nothing here.
func ParseCheckpoint(text string) (Checkpoint, error) {
	lines := strings.SplitN(text, "\n", 4)
	if len(lines) < 4 || lines[0] == "" {
		return Checkpoint{}, errors.New("reading a checkpoint: it needs an origin, a size and a hash, a line each")
	}
	size, err := strconv.ParseUint(lines[1], 10, 63)
	if err != nil || strconv.FormatUint(size, 10) != lines[1] {
		return Checkpoint{}, fmt.Errorf("reading a checkpoint: %.40q is no size", lines[1])
	}
	root, err := base64.StdEncoding.DecodeString(lines[2])
	if err != nil || len(root) != len(Hash{}) {
		return Checkpoint{}, fmt.Errorf("reading a checkpoint: %.60q is no hash", lines[2])
	}
	return Checkpoint{Origin: lines[0], Size: size, Root: Hash(root)}, nil
}

// OpenCheckpoint checks a signed checkpoint with the key of its log.
func OpenCheckpoint(signed []byte, key note.Verifier) (Checkpoint, error) {
	n, err := note.Open(signed, note.VerifierList(key))
	if err != nil {
		return Checkpoint{}, fmt.Errorf("checking a checkpoint's signature: %w", err)
	}
	c, err := ParseCheckpoint(n.Text)
	if err == nil && c.Origin != key.Name() {
		err = fmt.Errorf("checking a checkpoint: it is of %.80q", c.Origin)
	}
	return c, err
}

// KeptCheckpoint is a line of CheckpointsFile.
type KeptCheckpoint struct {
	Time time.Time `json:"time"`          // wall clock, UTC, of the signature
	End  bool      `json:"end,omitempty"` // made when a shard was closed; kept for good
	Note string    `json:"note"`
}

// checkpointEvery is how long records may be without a checkpoint, in time and in number.
const (
	checkpointEvery   = 5 * time.Second
	checkpointRecords = 1 << 17
)

// keptBytes is how long CheckpointsFile may get before those amid a shard go.
const keptBytes = 1 << 20

// openKey loads the log's key, or makes one. A key that cannot be used is put aside, and the log goes on with a new
// one: who verifies has the old public half and sees it.
func (s *store) openKey() error {
	origin := Origin(s.instance, s.daemon)
	raw, err := s.root.ReadFile(KeyFile)
	if err == nil {
		s.signer, err = note.NewSigner(string(bytes.TrimSpace(raw)))
		if err == nil && s.signer.Name() == origin {
			return nil
		}
		if err := s.root.Rename(KeyFile, KeyFile+".bad-"+time.Now().UTC().Format(shardTime)); err != nil {
			return err
		}
		s.note(gapOf("key", 0, "the key that signed this log's checkpoints could not be used: a new one signs from now on"))
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	private, public, err := note.GenerateKey(rand.Reader, origin)
	if err != nil {
		return err
	}
	if err := s.replace(PublicKeyFile, []byte(public+"\n"), 0o640); err != nil {
		return err
	}
	if err := s.replace(KeyFile, []byte(private+"\n"), 0o600); err != nil {
		return err
	}
	s.signer, err = note.NewSigner(private)
	return err
}

// replace writes a file whole, on disk when it returns.
func (s *store) replace(name string, content []byte, mode fs.FileMode) error {
	f, err := s.root.OpenFile(name+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return s.root.Rename(name+".new", name)
}

// signed reads the newest checkpoint; ok is false where there is none that counts.
func (s *store) lastSigned() (c Checkpoint, ok bool) {
	raw, err := s.root.ReadFile(CheckpointFile)
	if err != nil {
		return c, false
	}
	public, err := s.root.ReadFile(PublicKeyFile)
	if err != nil {
		return c, false
	}
	key, err := note.NewVerifier(string(bytes.TrimSpace(public)))
	if err != nil {
		return c, false
	}
	c, err = OpenCheckpoint(raw, key)
	return c, err == nil
}

// sign makes a checkpoint. What it covers is on disk already.
func (s *store) sign(c Checkpoint, end bool) error {
	signed, err := note.Sign(&note.Note{Text: c.Text()}, s.signer)
	if err != nil {
		return fmt.Errorf("signing a checkpoint of the audit log: %w", err)
	}
	line, err := json.Marshal(KeptCheckpoint{Time: time.Now().UTC(), End: end, Note: string(signed)})
	if err != nil {
		return err
	}
	// This one first: who reads the older ones and then the newest never finds it older.
	if err := s.replace(CheckpointFile, signed, 0o640); err != nil {
		return fmt.Errorf("keeping a checkpoint of the audit log: %w", err)
	}
	f, err := s.root.OpenFile(CheckpointsFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o640)
	if err != nil {
		return fmt.Errorf("keeping a checkpoint of the audit log: %w", err)
	}
	_, err = f.Write(append(line, '\n'))
	size := int64(0)
	if info, statErr := f.Stat(); statErr == nil {
		size = info.Size()
	}
	if err = errors.Join(err, f.Close()); err == nil && size > keptBytes {
		err = s.thin()
	}
	if err != nil {
		return fmt.Errorf("keeping a checkpoint of the audit log: %w", err)
	}
	return nil
}

// thin drops old checkpoints but those of shards' ends, and keeps the newest 500.
func (s *store) thin() error {
	raw, err := s.root.ReadFile(CheckpointsFile)
	if err != nil {
		return err
	}
	lines := bytes.SplitAfter(raw, []byte{'\n'})
	var out bytes.Buffer
	for i, line := range lines {
		if i >= len(lines)-500 || bytes.Contains(line, []byte(`"end":true`)) {
			out.Write(line)
		}
	}
	return s.replace(CheckpointsFile, out.Bytes(), 0o640)
}
