package verify

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
)

func (b *bed) verifier() note.Verifier {
	b.t.Helper()
	raw, err := os.ReadFile(b.path(audit.PublicKeyFile))
	must(b.t, err)
	key, err := note.NewVerifier(strings.TrimSpace(string(raw)))
	must(b.t, err)
	return key
}

func TestProofsProveWhatTheySay(t *testing.T) {
	t.Parallel()
	b := newBed(t, 60, 4000)
	key := b.verifier()
	older := b.kept(0)
	old, err := audit.ParseCheckpoint(older)
	must(t, err)
	_, lines, first := b.pieces()
	for p := range lines {
		for i, line := range lines[p] {
			proof, err := ProveRecord(b.dir, "x", first[p]+uint64(i))
			must(t, err)
			record := []byte(strings.TrimSuffix(line, "\n"))
			if index, _, err := CheckRecord(proof, record, key); err != nil || index != first[p]+uint64(i) {
				t.Fatalf("record %d: %v", index, err)
			}
			record[3] ^= 1
			if _, _, err := CheckRecord(proof, record, key); err == nil {
				t.Fatal("another record is proven too")
			}
		}
	}
	proof, err := ProveTree(b.dir, "x", old.Size)
	must(t, err)
	if from, size, err := CheckTree(proof, []byte(older), key); err != nil || from != old.Size || size <= from {
		t.Errorf("%d %d %v", from, size, err)
	}
	if _, _, err := CheckTree(proof, []byte(b.kept(1)), key); err == nil {
		t.Error("a proof for one checkpoint proves another")
	}
	if _, err := ProveRecord(b.dir, "x", 1<<40); err == nil {
		t.Error("a record that is not there was proven")
	}
}

func FuzzProof(f *testing.F) {
	b := newBed(f, 5, 0)
	key := b.verifier()
	proof, err := ProveRecord(b.dir, "x", 2)
	must(f, err)
	_, lines, _ := b.pieces()
	record := []byte(strings.TrimSuffix(lines[0][2], "\n"))
	f.Add(proof)
	f.Add([]byte("c2sp.org/tlog-proof@v1\nindex 9\n\n"))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if index, _, err := CheckRecord(raw, record, key); err == nil && (index != 2 || !bytes.Contains(raw, []byte("index 2\n"))) {
			t.Errorf("it proves record %d", index)
		}
		CheckTree(raw, raw, key) // must not panic
	})
}
