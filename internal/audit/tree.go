package audit

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"math/bits"
)

// Hash is a node of the Merkle tree (RFC 6962).
type Hash [sha256.Size]byte

// tree is the Merkle tree over a log's lines, as far as appending needs it: the roots of its full subtrees. The hashes
// of all nodes that are complete lie in a file, in the order of golang.org/x/mod/sumdb/tlog's StoredHashIndex. This is
// not that package because the watchdog appends too, and pulls in as little as it can.
type tree struct {
	n      uint64 // leaves
	peaks  []Hash // roots of the full subtrees, from the left, one for each bit set in n
	unkept []byte // hashes that are not in the file yet; they begin at storedHashes(n) less their number
	sum    hash.Hash
}

// storedHashes is how many hashes the file has for n leaves.
func storedHashes(n uint64) uint64 { return 2*n - uint64(bits.OnesCount64(n)) }

// storedIndex is the place in the file of the i-th node, from the left, of a level; leaves are level 0.
func storedIndex(level int, i uint64) uint64 {
	return storedHashes((i+1)<<level-1) + uint64(level) // it was stored with its last leaf
}

// leavesOf is how many leaves are whole in a file of that many hashes.
func leavesOf(hashes uint64) uint64 {
	n := hashes / 2
	for storedHashes(n+1) <= hashes {
		n++
	}
	return n
}

func (t *tree) hash(prefix byte, parts ...[]byte) (out Hash) {
	if t.sum == nil {
		t.sum = sha256.New()
	}
	t.sum.Reset()
	t.sum.Write([]byte{prefix}) // a hash takes everything
	for _, p := range parts {
		t.sum.Write(p)
	}
	t.sum.Sum(out[:0])
	return out
}

// addLine adds one line, without its end.
func (t *tree) addLine(line []byte) { t.add(t.hash(0, line)) }

func (t *tree) add(h Hash) {
	t.unkept = append(t.unkept, h[:]...)
	for m := t.n; m&1 == 1; m >>= 1 {
		last := len(t.peaks) - 1
		h = t.hash(1, t.peaks[last][:], h[:])
		t.peaks = t.peaks[:last]
		t.unkept = append(t.unkept, h[:]...)
	}
	t.peaks = append(t.peaks, h)
	t.n++
}

// root is the tree's hash.
func (t *tree) root() Hash {
	if len(t.peaks) == 0 {
		return sha256.Sum256(nil)
	}
	h := t.peaks[len(t.peaks)-1]
	for i := len(t.peaks) - 2; i >= 0; i-- {
		h = t.hash(1, t.peaks[i][:], h[:])
	}
	return h
}

// readTree loads the tree of n leaves from the file.
func readTree(f io.ReaderAt, n uint64) (tree, error) {
	t := tree{n: n}
	left := uint64(0) // leaves before the next subtree
	for level := 63; level >= 0; level-- {
		if n>>level&1 == 0 {
			continue
		}
		h, err := readHash(f, storedIndex(level, left>>level))
		if err != nil {
			return tree{}, err
		}
		t.peaks = append(t.peaks, h)
		left += 1 << level
	}
	return t, nil
}

func readHash(f io.ReaderAt, index uint64) (h Hash, err error) {
	if n, err := f.ReadAt(h[:], int64(index)*int64(len(h))); err != nil && (n < len(h) || !errors.Is(err, io.EOF)) {
		return h, fmt.Errorf("reading hash %d of the audit log's tree: %w", index, err)
	}
	return h, nil
}

// keep writes the hashes that the file does not have yet.
func (t *tree) keep(f io.WriterAt) error {
	if len(t.unkept) == 0 {
		return nil
	}
	at := int64(storedHashes(t.n))*int64(len(Hash{})) - int64(len(t.unkept))
	if _, err := f.WriteAt(t.unkept, at); err != nil {
		return fmt.Errorf("writing the audit log's tree: %w", err)
	}
	t.unkept = t.unkept[:0]
	return nil
}
