package verify

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
)

// bed is a directory with one real log, "x", that several lives of its daemon wrote into pieces.
type bed struct {
	t   testing.TB
	dir string
}

func newBed(t testing.TB, records int, shardBytes int64) *bed {
	t.Helper()
	b := &bed{t, t.TempDir()}
	b.write("x", records, shardBytes)
	return b
}

func (b *bed) write(daemon string, records int, shardBytes int64) {
	b.t.Helper()
	must(b.t, os.MkdirAll(filepath.Join(b.dir, daemon), 0o700))
	for done := 0; done < records; {
		l, err := audit.OpenWith(filepath.Join(b.dir, daemon, daemon+".jsonl"), "test", daemon, audit.Options{ShardBytes: shardBytes})
		must(b.t, err)
		for i := 0; i < 40 && done < records; i++ {
			l.Log(audit.Record{Event: audit.EventLookup, Kid: "k", Detail: fmt.Sprint("record ", done)})
			if done%7 == 0 {
				must(b.t, l.Sync(b.t.Context()))
			}
			done++
		}
		must(b.t, l.Close())
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bed) path(name string) string { return filepath.Join(b.dir, "x", name) }

func (b *bed) verify(opt Options) *Report {
	b.t.Helper()
	r, err := Run(b.dir, opt)
	must(b.t, err)
	return r
}

// clone copies the log, so that it can be harmed.
func (b *bed) clone(t testing.TB) *bed {
	t.Helper()
	c := &bed{t, t.TempDir()}
	must(t, os.CopyFS(c.dir, os.DirFS(b.dir)))
	return c
}

// pieces returns the log's files, oldest first, with their lines.
func (b *bed) pieces() (names []string, lines [][]string, first []uint64) {
	b.t.Helper()
	shards, err := audit.ShardsOf(b.dir, "x")
	must(b.t, err)
	for _, s := range shards {
		raw, err := os.ReadFile(s.Path)
		must(b.t, err)
		names = append(names, s.Path)
		lines = append(lines, strings.SplitAfter(strings.TrimSuffix(string(raw), "\n"), "\n"))
		lines[len(lines)-1][len(lines[len(lines)-1])-1] += "\n"
		first = append(first, s.First)
	}
	return names, lines, first
}

func (b *bed) put(name string, lines []string) {
	b.t.Helper()
	must(b.t, os.WriteFile(name, []byte(strings.Join(lines, "")), 0o600))
}

// has says whether a finding of that kind is about the record.
func has(r *Report, kind string, record uint64) bool {
	for _, f := range r.Findings() {
		if f.Kind == kind && f.Record != nil && *f.Record <= record && (f.To == nil && *f.Record == record || f.To != nil && record < *f.To) {
			return true
		}
	}
	return false
}

func texts(r *Report) string {
	var out []string
	for _, f := range r.Findings() {
		out = append(out, f.String())
	}
	return strings.Join(out, "\n")
}

func TestAnUntouchedLogVerifies(t *testing.T) {
	t.Parallel()
	b := newBed(t, 300, 8000)
	b.write("y", 5, 0)
	r := b.verify(Options{})
	if !r.OK || len(r.Logs) != 2 {
		t.Fatalf("%s\n%+v", texts(r), r)
	}
	x := r.Logs[0]
	if x.Records < 300 || x.Read != x.Records || x.Signed != x.Records || x.Shards < 4 || x.Origin != "tagout/test/x" || !strings.HasPrefix(x.Key, "tagout/test/x+") {
		t.Errorf("%+v", x)
	}
}

// TestEachHarmIsFoundAndLocated does one thing after the other to copies of a log.
func TestEachHarmIsFoundAndLocated(t *testing.T) {
	t.Parallel()
	whole := newBed(t, 300, 8000)
	_, _, first := whole.pieces()
	total := whole.verify(Options{}).Logs[0].Records
	last := len(first) - 1
	for name, c := range map[string]struct {
		harm   func(b *bed, names []string, lines [][]string)
		kind   string
		record uint64
		only   int // findings; 0: any number
	}{
		"a byte in the middle": {func(b *bed, n []string, l [][]string) {
			l[1][3] = strings.Replace(l[1][3], "record", "recerd", 1)
			b.put(n[1], l[1])
		}, Changed, first[1] + 3, 1},
		"a byte in the newest record": {func(b *bed, n []string, l [][]string) {
			i := len(l[last]) - 1
			l[last][i] = strings.Replace(l[last][i], `"v":1`, `"v":2`, 1)
			b.put(n[last], l[last])
		}, Changed, total - 1, 1},
		"a record taken out":   {func(b *bed, n []string, l [][]string) { b.put(n[2], slices.Delete(l[2], 4, 5)) }, Vanished, first[2] + 4, 1},
		"the first of a piece": {func(b *bed, n []string, l [][]string) { b.put(n[2], l[2][1:]) }, Vanished, first[2], 1},
		"the tail":             {func(b *bed, n []string, l [][]string) { b.put(n[last], l[last][:len(l[last])-2]) }, TailCut, total - 2, 1},
		"the tail of a piece":  {func(b *bed, n []string, l [][]string) { b.put(n[1], l[1][:len(l[1])-2]) }, Vanished, first[2] - 2, 1},
		"the newest file":      {func(b *bed, n []string, _ [][]string) { must(b.t, os.Remove(n[last])) }, TailCut, first[last], 1},
		"a whole piece":        {func(b *bed, n []string, _ [][]string) { must(b.t, os.Remove(n[1])) }, ShardGone, first[1], 1},
		"the oldest piece":     {func(b *bed, n []string, _ [][]string) { must(b.t, os.Remove(n[0])) }, ShardGone, 0, 1},
		"two pieces swapped": {func(b *bed, n []string, l [][]string) {
			b.put(n[1], l[2])
			b.put(n[2], l[1])
		}, Swapped, first[1], 2},
		"a piece replaced": {func(b *bed, n []string, l [][]string) {
			for i := range l[1] {
				l[1][i] = strings.Replace(l[1][i], "k", "K", 1)
			}
			b.put(n[1], l[1])
		}, Replaced, first[1] + 2, 1},
		"a record twice":                 {func(b *bed, n []string, l [][]string) { b.put(n[1], slices.Insert(l[1], 5, l[1][4])) }, Duplicate, first[1] + 4, 1},
		"an old record again at the end": {func(b *bed, n []string, l [][]string) { b.put(n[last], append(l[last], l[0][2])) }, Duplicate, first[0] + 2, 1},
		"two records swapped": {func(b *bed, n []string, l [][]string) {
			l[1][2], l[1][3] = l[1][3], l[1][2]
			b.put(n[1], l[1])
		}, Moved, first[1] + 3, 1},
		"a foreign record": {func(b *bed, n []string, l [][]string) {
			b.put(n[1], slices.Insert(l[1], 5, `{"v":1,"event":"dns.lookup"}`+"\n"))
		}, Foreign, first[1] + 5, 1},
		"a foreign record at the end": {func(b *bed, n []string, l [][]string) {
			b.put(n[last], append(l[last], `{"v":1,"instance":"test","daemon":"other","event":"dns.lookup"}`+"\n"))
		}, Foreign, total, 1},
		"a made-up record at the end": {func(b *bed, n []string, l [][]string) {
			b.put(n[last], append(l[last], `{"v":1,"instance":"test","daemon":"x","event":"dns.lookup"}`+"\n"))
		}, Unproven, total, 1},
		"half a record at the end": {func(b *bed, n []string, l [][]string) { b.put(n[last], append(l[last], `{"v":1`)) }, Unproven, total, 1},
		"a kept hash":              {func(b *bed, _ []string, _ [][]string) { b.flip(audit.HashFile, 32*(2*40-2)+5) }, TreeChanged, 40, 1},
		"a kept hash above others": {func(b *bed, _ []string, _ [][]string) { b.flip(audit.HashFile, 32*2+5) }, TreeChanged, 1, 1},
		"record and kept hash":     {func(b *bed, n []string, l [][]string) { b.rewrite(n, l, 1, 3) }, Rewritten, first[1] + 3, 0},
		"the tail, and its hashes": {func(b *bed, n []string, l [][]string) {
			b.put(n[last], l[last][:len(l[last])-2])
			must(b.t, os.Truncate(b.path(audit.HashFile), int64(32*(2*(total-2)-ones(total-2)))))
		}, TailCut, total - 2, 1},
		"an old checkpoint": {func(b *bed, _ []string, _ [][]string) {
			must(b.t, os.WriteFile(b.path(audit.CheckpointFile), []byte(b.kept(3)), 0o600))
		}, RolledBack, total - 1, 1},
		"a checkpoint's size": {func(b *bed, _ []string, _ [][]string) {
			raw, err := os.ReadFile(b.path(audit.CheckpointFile))
			must(b.t, err)
			must(b.t, os.WriteFile(b.path(audit.CheckpointFile), bytes.Replace(raw, []byte(fmt.Sprintf("\n%d\n", total)), []byte("\n7\n"), 1), 0o600))
		}, Forged, 0, 1},
		"no tree":       {func(b *bed, _ []string, _ [][]string) { must(b.t, os.Remove(b.path(audit.HashFile))) }, NoTree, 0, 1},
		"no key":        {func(b *bed, _ []string, _ [][]string) { must(b.t, os.Remove(b.path(audit.PublicKeyFile))) }, NoKey, 0, 1},
		"no checkpoint": {func(b *bed, _ []string, _ [][]string) { must(b.t, os.Remove(b.path(audit.CheckpointFile))) }, RolledBack, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := whole.clone(t)
			names, lines, _ := b.pieces()
			c.harm(b, names, lines)
			r := b.verify(Options{})
			located := has(r, c.kind, c.record)
			switch c.kind {
			case Forged, NoTree, NoKey:
				located = strings.Contains(texts(r), c.kind)
			case RolledBack:
				located = strings.Contains(texts(r), c.kind)
			}
			if r.OK || !located || c.only > 0 && len(r.Findings()) != c.only {
				t.Errorf("want %s of record %d, got:\n%s", c.kind, c.record, texts(r))
			}
		})
	}
}

func ones(n uint64) (k uint64) {
	for ; n > 0; n &= n - 1 {
		k++
	}
	return k
}

// flip changes one byte.
func (b *bed) flip(name string, at int64) {
	b.t.Helper()
	raw, err := os.ReadFile(b.path(name))
	must(b.t, err)
	raw[at] ^= 1
	must(b.t, os.WriteFile(b.path(name), raw, 0o600))
}

// kept returns the n-th of the older checkpoints.
func (b *bed) kept(n int) string {
	b.t.Helper()
	raw, err := os.ReadFile(b.path(audit.CheckpointsFile))
	must(b.t, err)
	var k audit.KeptCheckpoint
	must(b.t, json.Unmarshal(bytes.Split(raw, []byte{'\n'})[n], &k))
	return k.Note
}

// rewrite changes a record and recomputes all hashes, as somebody without the key would.
func (b *bed) rewrite(names []string, lines [][]string, piece, line int) []byte {
	b.t.Helper()
	lines[piece][line] = strings.Replace(lines[piece][line], "record", "recerd", 1)
	b.put(names[piece], lines[piece])
	var h audit.LeafHasher
	var tree audit.Tree
	var hashes []byte
	for _, piece := range lines {
		for _, l := range piece {
			hashes = append(hashes, tree.Add(h.Line([]byte(strings.TrimSuffix(l, "\n"))))...)
		}
	}
	must(b.t, os.WriteFile(b.path(audit.HashFile), hashes, 0o600))
	root := tree.Root()
	return root[:]
}

// TestRootWithTheKeyIsSeenByAWitnessAlone: somebody who may read the key rewrites a record, all hashes and all
// checkpoints. The box alone shows nothing; each form of a witness's copy shows it, and between which records.
func TestRootWithTheKeyIsSeenByAWitnessAlone(t *testing.T) {
	t.Parallel()
	b := newBed(t, 120, 8000)
	honest, err := os.ReadFile(b.path(audit.CheckpointFile))
	must(t, err)
	old := b.kept(1)
	names, lines, first := b.pieces()
	root := b.rewrite(names, lines, 1, 3)
	private, err := os.ReadFile(b.path(audit.KeyFile))
	must(t, err)
	signer, err := note.NewSigner(strings.TrimSpace(string(private)))
	must(t, err)
	var total uint64
	for _, l := range lines {
		total += uint64(len(l))
	}
	forged, err := note.Sign(&note.Note{Text: audit.Checkpoint{Origin: "tagout/test/x", Size: total, Root: audit.Hash(root)}.Text()}, signer)
	must(t, err)
	must(t, errors.Join(os.WriteFile(b.path(audit.CheckpointFile), forged, 0o600), os.Remove(b.path(audit.CheckpointsFile))))
	if r := b.verify(Options{}); !r.OK {
		t.Errorf("the control: without a witness nothing can be seen, and got\n%s", texts(r))
	}
	doc, err := json.Marshal(map[string]string{"time": "now", "note": string(honest)})
	must(t, err)
	for form, text := range map[string]string{
		"as it is":  old + "\n" + string(honest),
		"documents": string(doc) + "\n",
		"syslog":    `<109>1 2026-01-01T00:00:00Z box tagout 1 checkpoint [tagout@32473 note="` + base64.StdEncoding.EncodeToString(honest) + "\"] x\n",
	} {
		file := filepath.Join(t.TempDir(), "witness")
		must(t, os.WriteFile(file, []byte(text), 0o600))
		seen, err := ReadWitness(file)
		must(t, err)
		r := b.verify(Options{Witnesses: seen})
		if r.OK || !has(r, Rewritten, first[1]+3) {
			t.Errorf("%s: %s", form, texts(r))
		}
	}
	// The same with a tail that was cut, hashes and checkpoints with it.
	b = newBed(t, 120, 8000)
	full, err := os.ReadFile(b.path(audit.CheckpointFile))
	must(t, err)
	names, lines, _ = b.pieces()
	end := len(names) - 1
	cut := len(lines[end]) - 3
	b.put(names[end], lines[end][:cut])
	var size uint64
	for i := range lines[:end] {
		size += uint64(len(lines[i]))
	}
	size += uint64(cut)
	must(t, os.Truncate(b.path(audit.HashFile), int64(32*(2*size-ones(size)))))
	must(t, os.Remove(b.path(audit.CheckpointsFile)))
	private, err = os.ReadFile(b.path(audit.KeyFile))
	must(t, err)
	signer, err = note.NewSigner(strings.TrimSpace(string(private)))
	must(t, err)
	var tree audit.Tree
	var h audit.LeafHasher
	for i, piece := range lines {
		if i == end {
			piece = piece[:cut]
		}
		for _, l := range piece {
			tree.Add(h.Line([]byte(strings.TrimSuffix(l, "\n"))))
		}
	}
	forged, err = note.Sign(&note.Note{Text: audit.Checkpoint{Origin: "tagout/test/x", Size: size, Root: tree.Root()}.Text()}, signer)
	must(t, err)
	must(t, os.WriteFile(b.path(audit.CheckpointFile), forged, 0o600))
	if r := b.verify(Options{}); !r.OK {
		t.Errorf("the control, cut: %s", texts(r))
	}
	if r := b.verify(Options{Witnesses: []Witnessed{{"w", full}}}); r.OK || !has(r, TailCut, size) {
		t.Errorf("cut: %s", texts(r))
	}
}

// TestAnyMutationIsFoundAndLocated does random harm to the records of a real log, without its tree and with it.
func TestAnyMutationIsFoundAndLocated(t *testing.T) {
	t.Parallel()
	whole := newBed(t, 150, 6000)
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	for round := range 150 {
		b := whole.clone(t)
		names, lines, first := b.pieces()
		p := rng.IntN(len(names))
		i := rng.IntN(len(lines[p]))
		record := first[p] + uint64(i)
		var kinds []string
		switch rng.IntN(5) {
		case 0: // one bit of one byte, but the line's end
			raw := []byte(lines[p][i])
			at := rng.IntN(len(raw) - 1)
			for raw[at] ^= 1 << rng.IntN(8); raw[at] == '\n'; {
				raw[at] ^= 1 << rng.IntN(8)
			}
			lines[p][i] = string(raw)
			kinds = []string{Changed}
		case 1:
			lines[p] = slices.Delete(lines[p], i, i+1)
			kinds = []string{Vanished, TailCut, ShardGone}
		case 2:
			q := rng.IntN(len(names))
			lines[q] = slices.Insert(lines[q], rng.IntN(len(lines[q])+1), lines[p][i])
			kinds = []string{Duplicate}
		case 3:
			j := rng.IntN(len(lines[p]))
			if j == i {
				continue
			}
			lines[p][i], lines[p][j] = lines[p][j], lines[p][i]
			kinds = []string{Moved}
			if !foundEither(b, names, lines, kinds, record, first[p]+uint64(j)) {
				t.Fatalf("seed %d, round %d: records %d and %d swapped: %s", seed, round, record, first[p]+uint64(j), texts(b.verify(Options{})))
			}
			continue
		case 4:
			b.rewrite(names, lines, p, i)
			if strings.Contains(lines[p][i], "recerd") {
				kinds = []string{Rewritten}
			} else {
				continue // a header: nothing was changed
			}
		}
		for q := range names {
			b.put(names[q], lines[q])
		}
		r := b.verify(Options{})
		found := false
		for _, kind := range kinds {
			found = found || has(r, kind, record)
		}
		if r.OK || !found {
			t.Fatalf("seed %d, round %d: want %v of record %d (%s): got\n%s", seed, round, kinds, record, filepath.Base(names[p]), texts(r))
		}
	}
}

func foundEither(b *bed, names []string, lines [][]string, kinds []string, records ...uint64) bool {
	for q := range names {
		b.put(names[q], lines[q])
	}
	r := b.verify(Options{})
	for _, record := range records {
		for _, kind := range kinds {
			if has(r, kind, record) {
				return !r.OK
			}
		}
	}
	return false
}
