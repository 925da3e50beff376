package audit

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// Tree is a log's tree as readers use it: it is grown from leaves, and compared with what the log kept.
type Tree struct{ t tree }

// LeafHasher hashes lines as the tree's leaves. Only one goroutine may use it.
type LeafHasher struct{ t tree }

// Line returns the leaf of a line, without its end.
func (h *LeafHasher) Line(line []byte) Hash { return h.t.hash(0, line) }

// Size is the number of leaves.
func (t *Tree) Size() uint64 { return t.t.n }

// Root is the tree's hash.
func (t *Tree) Root() Hash { return t.t.root() }

// Add adds a leaf and returns the hashes that the log's file must have of it; they are valid until the next call.
func (t *Tree) Add(leaf Hash) []byte {
	t.t.unkept = t.t.unkept[:0]
	t.t.add(leaf)
	return t.t.unkept
}

// Clone returns a tree that grows on its own.
func (t *Tree) Clone() *Tree {
	return &Tree{tree{n: t.t.n, peaks: append([]Hash(nil), t.t.peaks...)}}
}

// TreeFile is the file of a log's tree.
type TreeFile struct{ f *os.File }

// OpenTree opens the tree of a daemon's log below dir (inst.AuditDir()).
func OpenTree(dir, daemon string) (*TreeFile, error) {
	f, err := os.Open(filepath.Join(dir, daemon, HashFile))
	if err != nil {
		return nil, fmt.Errorf("reading the audit log's tree: %w", err)
	}
	return &TreeFile{f}, nil
}

// Size is how many leaves the file has at the moment.
func (t *TreeFile) Size() (uint64, error) {
	info, err := t.f.Stat()
	if err != nil {
		return 0, fmt.Errorf("reading the audit log's tree: %w", err)
	}
	return leavesOf(uint64(info.Size()) / uint64(len(Hash{}))), nil
}

// Leaf returns one leaf.
func (t *TreeFile) Leaf(i uint64) (Hash, error) { return readHash(t.f, storedIndex(0, i)) }

// At returns the hash at a place of the file (tlog.StoredHashIndex).
func (t *TreeFile) At(index uint64) (Hash, error) { return readHash(t.f, index) }

// From returns the file's bytes from where those of a leaf begin.
func (t *TreeFile) From(leaf uint64) io.Reader {
	return io.NewSectionReader(t.f, int64(storedHashes(leaf))*int64(len(Hash{})), 1<<62)
}

// Close closes the file.
func (t *TreeFile) Close() error { return t.f.Close() }
