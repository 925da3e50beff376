package verify

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"tagout/internal/audit"
)

// Heads of proof files. The first is C2SP's tlog-proof; the second is the same for two checkpoints.
const (
	inclusionHead   = "c2sp.org/tlog-proof@v1"
	consistencyHead = "tagout-consistency-proof@v1"
)

// hashes reads a tree as tlog does.
func hashes(f *audit.TreeFile) tlog.HashReader {
	return tlog.HashReaderFunc(func(at []int64) ([]tlog.Hash, error) {
		out := make([]tlog.Hash, len(at))
		for i, index := range at {
			h, err := f.At(uint64(index))
			if err != nil {
				return nil, err
			}
			out[i] = tlog.Hash(h)
		}
		return out, nil
	})
}

// newest reads a log's newest checkpoint and its tree. The caller closes the tree.
func newest(dir, daemon string) (signed []byte, c audit.Checkpoint, f *audit.TreeFile, err error) {
	signed, err = os.ReadFile(filepath.Join(dir, daemon, audit.CheckpointFile))
	if err != nil {
		return nil, c, nil, fmt.Errorf("reading the newest checkpoint: %w", err)
	}
	if c, err = audit.ParseCheckpoint(string(signed)); err != nil {
		return nil, c, nil, err
	}
	f, err = audit.OpenTree(dir, daemon)
	return signed, c, f, err
}

// ProveRecord writes a proof that a record is in the tree of the log's newest checkpoint.
func ProveRecord(dir, daemon string, record uint64) ([]byte, error) {
	signed, c, f, err := newest(dir, daemon)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	if record >= c.Size {
		return nil, fmt.Errorf("proving record %d: the newest checkpoint covers %d: try again in some seconds", record, c.Size)
	}
	proof, err := tlog.ProveRecord(int64(c.Size), int64(record), hashes(f))
	if err != nil {
		return nil, fmt.Errorf("proving record %d: %w", record, err)
	}
	return proofText(fmt.Sprintf("%s\nindex %d\n", inclusionHead, record), proof, signed), nil
}

// ProveTree writes a proof that the tree of the log's newest checkpoint begins with that of so many records.
func ProveTree(dir, daemon string, old uint64) ([]byte, error) {
	signed, c, f, err := newest(dir, daemon)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	proof, err := Consistency(f, old, c.Size)
	if err != nil {
		return nil, err
	}
	return proofText(fmt.Sprintf("%s\nold %d\n", consistencyHead, old), proof, signed), nil
}

// Consistency proves that the tree of size begins with that of old.
func Consistency(f *audit.TreeFile, old, size uint64) ([]tlog.Hash, error) {
	if old == 0 || old > size {
		return nil, fmt.Errorf("proving that %d records begin with %d: there is no such proof", size, old)
	}
	proof, err := tlog.ProveTree(int64(size), int64(old), hashes(f))
	if err != nil {
		return nil, fmt.Errorf("proving that %d records begin with %d: %w", size, old, err)
	}
	return proof, nil
}

func proofText(head string, proof []tlog.Hash, signed []byte) []byte {
	var b bytes.Buffer
	b.WriteString(head)
	for _, h := range proof {
		b.WriteString(base64.StdEncoding.EncodeToString(h[:]) + "\n")
	}
	b.WriteByte('\n')
	b.Write(signed)
	return b.Bytes()
}

// CheckRecord checks a proof of ProveRecord for the bytes of a record, without its line's end.
func CheckRecord(proof, record []byte, key note.Verifier) (index, size uint64, err error) {
	index, hs, c, err := parseProof(proof, inclusionHead, "index ", key)
	if err != nil {
		return 0, 0, err
	}
	if index >= c.Size {
		return 0, 0, fmt.Errorf("checking a proof: there is no record %d among %d", index, c.Size)
	}
	if err := tlog.CheckRecord(hs, int64(c.Size), tlog.Hash(c.Root), int64(index), tlog.RecordHash(record)); err != nil {
		return 0, 0, errors.New("checking a proof: the record is not the one that was signed")
	}
	return index, c.Size, nil
}

// CheckTree checks a proof of ProveTree against an older checkpoint that somebody kept.
func CheckTree(proof, older []byte, key note.Verifier) (from, size uint64, err error) {
	from, hs, c, err := parseProof(proof, consistencyHead, "old ", key)
	if err != nil {
		return 0, 0, err
	}
	old, err := audit.OpenCheckpoint(older, key)
	if err != nil {
		return 0, 0, err
	}
	if old.Size != from {
		return 0, 0, fmt.Errorf("checking a proof: it is for a checkpoint of %d records, this one is of %d", from, old.Size)
	}
	if old.Size > c.Size {
		return 0, 0, errors.New("checking a proof: the older checkpoint covers more records")
	}
	if err := tlog.CheckTree(tlog.TreeProof(hs), int64(c.Size), tlog.Hash(c.Root), int64(old.Size), tlog.Hash(old.Root)); err != nil {
		return 0, 0, errors.New("checking a proof: the log was rewritten since the older checkpoint")
	}
	return from, c.Size, nil
}

func parseProof(proof []byte, head, word string, key note.Verifier) (n uint64, hs []tlog.Hash, c audit.Checkpoint, err error) {
	top, signed, ok := bytes.Cut(proof, []byte("\n\n"))
	lines := strings.Split(string(top), "\n")
	if !ok || len(lines) < 2 || lines[0] != head || !strings.HasPrefix(lines[1], word) {
		return 0, nil, c, fmt.Errorf("reading a proof: it does not begin with %s and %s", head, word)
	}
	if len(lines) > 2+64 {
		return 0, nil, c, errors.New("reading a proof: it has more hashes than a tree has levels")
	}
	if n, err = strconv.ParseUint(strings.TrimPrefix(lines[1], word), 10, 63); err != nil {
		return 0, nil, c, fmt.Errorf("reading a proof: %w", err)
	}
	for _, line := range lines[2:] {
		h, err := tlog.ParseHash(line)
		if err != nil {
			return 0, nil, c, fmt.Errorf("reading a proof: %w", err)
		}
		hs = append(hs, h)
	}
	c, err = audit.OpenCheckpoint(signed, key)
	return n, hs, c, err
}
