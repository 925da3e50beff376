package verify

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"strconv"

	"tagout/internal/audit"
)

// diagnosis finds out what is wrong with a log that is not as it should be. It holds all of the log's hashes in memory.
type diagnosis struct {
	*run
	kept    []audit.Hash // leaves as the daemon kept them
	index   map[audit.Hash]uint64
	entries []entry
	covered map[uint64]bool // records that are there, in the wrong place
	right   uint64          // records before this one whose kept leaves a checkpoint vouches for
	read    uint64          // the same of the lines, at their nominal places
}

// entry is one line.
type entry struct {
	p    *piece
	line int
	at   int64 // the record it is, by its leaf; -1: none
	out  bool  // it stands where it does not belong
}

func (e entry) leaf() audit.Hash { return e.p.leaves[e.line] }

func (e entry) nominal() uint64 { return e.p.First + uint64(e.line) }

func (v *run) diagnose() error {
	if err := v.list(); err != nil {
		return err
	}
	v.keep = true
	d := &diagnosis{run: v, covered: map[uint64]bool{}}
	if err := d.load(); err != nil {
		return err
	}
	d.vouch()
	d.compareKept()
	d.swapped()
	d.align()
	d.walk()
	d.ends()
	if len(v.log.Findings) == 0 && !v.writing() { // nothing was recognised, and not all was right
		v.log.find(Finding{Kind: TreeChanged, Shard: audit.HashFile, Detail: "the kept hashes are not those of the records"})
	}
	return nil
}

// load reads everything.
func (d *diagnosis) load() error {
	n, err := d.file.Size()
	if err != nil {
		return err
	}
	d.log.Findings = withoutReading(d.log.Findings)
	g := &grower{v: d.run, kept: bufio.NewReader(d.file.From(0)), wrong: true}
	for i, p := range d.pieces {
		if err := d.grow(g, i); err != nil {
			return err
		}
		for line := range p.leaves {
			d.entries = append(d.entries, entry{p: p, line: line, at: -1})
		}
		d.log.Read += p.count
		d.log.Records = max(d.log.Records, p.First+p.count)
	}
	if now, err := d.file.Size(); err == nil {
		n = max(n, now) // the lines' hashes are there by now
	}
	d.kept, d.index = make([]audit.Hash, 0, n), make(map[audit.Hash]uint64, n)
	kept := bufio.NewReaderSize(d.file.From(0), 1<<20)
	var nodes [64 * 32]byte
	for i := range n {
		// The nodes of a leaf follow it: one for each subtree that it completes.
		size := 32
		for m := i; m&1 == 1; m >>= 1 {
			size += 32
		}
		if _, err := io.ReadFull(kept, nodes[:size]); err != nil {
			return fmt.Errorf("reading the audit log's tree: %w", err)
		}
		leaf := audit.Hash(nodes[:32])
		d.kept = append(d.kept, leaf)
		if _, twice := d.index[leaf]; !twice && leaf != (audit.Hash{}) {
			d.index[leaf] = i
		}
	}
	d.log.Records = max(d.log.Records, n)
	for i := range d.entries {
		if at, ok := d.index[d.entries[i].leaf()]; ok {
			d.entries[i].at = int64(at)
		}
	}
	return nil
}

// withoutReading drops what reading finds again.
func withoutReading(all []Finding) []Finding {
	var out []Finding
	for _, f := range all {
		if f.Kind != Ciphertext && f.Kind != Unreadable {
			out = append(out, f)
		}
	}
	return out
}

// vouch finds out as far as which record checkpoints vouch for the kept leaves, and for the lines.
func (d *diagnosis) vouch() {
	lines := append([]audit.Hash(nil), d.kept...)
	for _, e := range d.entries {
		if n := e.nominal(); n < uint64(len(lines)) {
			lines[n] = e.leaf()
		}
	}
	keptOK, linesOK := d.matching(d.kept), d.matching(lines)
	for i, p := range d.points {
		if keptOK[i] {
			d.right = max(d.right, p.Size)
		}
		if linesOK[i] {
			d.read = max(d.read, p.Size)
		}
	}
	told := map[bool]bool{}
	vouched := map[bool]uint64{} // by whether it is the box's own word
	for i, p := range d.points {
		good := vouched[p.ours]
		switch {
		case keptOK[i] || linesOK[i]:
			vouched[p.ours] = p.Size
		case p.Size > uint64(len(d.kept)):
			// told of at the end
		case !told[p.ours]:
			told[p.ours] = true
			d.log.find(Finding{Kind: Rewritten, Record: ptr(good), To: ptr(p.Size), Detail: fmt.Sprintf(
				"records and kept hashes are not what a checkpoint of %d records says (%s): something before number %d was changed, and not before number %d", p.Size, p.from, p.Size, good)})
		}
	}
}

// matching says for each checkpoint whether the leaves give its root.
func (d *diagnosis) matching(leaves []audit.Hash) []bool {
	out := make([]bool, len(d.points))
	var t audit.Tree
	next := 0
	for ; next < len(d.points) && d.points[next].Size == 0; next++ {
		out[next] = d.points[next].Root == t.Root()
	}
	for _, leaf := range leaves {
		t.Add(leaf)
		for ; next < len(d.points) && d.points[next].Size <= t.Size(); next++ {
			out[next] = d.points[next].Root == t.Root()
		}
	}
	return out
}

// compareKept tells of kept hashes that are wrong where the lines are right, and of inner nodes.
func (d *diagnosis) compareKept() {
	if d.read > d.right { // checkpoints vouch for the lines and not for what was kept
		for _, e := range d.entries {
			if n := e.nominal(); n < d.read && n < uint64(len(d.kept)) && e.leaf() != d.kept[n] {
				d.log.find(Finding{Kind: TreeChanged, Shard: audit.HashFile, Record: ptr(n), Detail: "the kept hash of this record is wrong; the record is what was signed"})
				d.kept[n] = e.leaf()
				d.index[e.leaf()] = n
			}
		}
		for i := range d.entries {
			if at, ok := d.index[d.entries[i].leaf()]; ok {
				d.entries[i].at = int64(at)
			}
		}
		return
	}
	var t audit.Tree
	kept := bufio.NewReaderSize(d.file.From(0), 1<<20)
	var buf [64 * 32]byte
	for i, leaf := range d.kept {
		want := t.Add(leaf)
		have := buf[:len(want)]
		if _, err := io.ReadFull(kept, have); err != nil {
			return
		}
		if !bytes.Equal(want, have) {
			d.log.find(Finding{Kind: TreeChanged, Shard: audit.HashFile, Record: ptr(uint64(i)), Detail: "a kept hash above this record is not that of the hashes below it"})
			return
		}
	}
}

// swapped tells of pieces that hold records of another place.
func (d *diagnosis) swapped() {
	for begin := 0; begin < len(d.entries); {
		p := d.entries[begin].p
		end := begin + len(p.leaves)
		part := d.entries[begin:end]
		if first, ok := run1(part); ok && first != p.First && d.elsewhere(p, first) {
			d.log.find(Finding{Kind: Swapped, Shard: p.name, Record: ptr(p.First), To: ptr(p.First + p.count), Offset: ptr(int64(0)),
				Detail: fmt.Sprintf("it holds the records %d to %d", first, first+p.count-1)})
			for i := range part {
				part[i].out = true
				d.covered[uint64(part[i].at)] = true
				if n := part[i].nominal(); n < first || n >= first+p.count {
					d.covered[n] = true // told of with the piece
				}
			}
		}
		begin = end
	}
}

// run1 says whether the entries are records in a row, and which is the first.
func run1(part []entry) (uint64, bool) {
	for i, e := range part {
		if e.at < 0 || e.at != part[0].at+int64(i) {
			return 0, false
		}
	}
	return uint64(part[0].at), true
}

// elsewhere says whether a record's nominal place is in another piece.
func (d *diagnosis) elsewhere(p *piece, first uint64) bool {
	for i, q := range d.pieces {
		end := q.First + q.count
		if i+1 < len(d.pieces) {
			end = d.pieces[i+1].First
		}
		if q != p && first >= q.First && first < end {
			return true
		}
	}
	return first < p.First // a place of which no piece is left
}

// align finds the most lines that are records in the right order; the others are duplicates or stand elsewhere.
func (d *diagnosis) align() {
	var tops []int        // tops[k]: the entry with the smallest record that ends a row of k+1
	prev := map[int]int{} // the one before in its row
	for i, e := range d.entries {
		if e.at < 0 || e.out {
			continue
		}
		lo, hi := 0, len(tops)
		for lo < hi {
			if mid := (lo + hi) / 2; d.entries[tops[mid]].at < e.at {
				lo = mid + 1
			} else {
				hi = mid
			}
		}
		prev[i] = -1
		if lo > 0 {
			prev[i] = tops[lo-1]
		}
		// Of two lines that are the same record the one in its own place counts.
		if lo == len(tops) {
			tops = append(tops, i)
		} else if d.entries[tops[lo]].at != e.at || e.nominal() == uint64(e.at) {
			tops[lo] = i
		}
	}
	in := map[int]bool{}
	have := map[int64]bool{}
	if len(tops) > 0 {
		for i := tops[len(tops)-1]; i >= 0; i = prev[i] {
			in[i] = true
			have[d.entries[i].at] = true
		}
	}
	for i := range d.entries {
		e := &d.entries[i]
		if e.at < 0 || e.out || in[i] {
			continue
		}
		e.out = true
		f := Finding{Kind: Moved, Shard: e.p.name, Record: ptr(uint64(e.at)), Offset: ptr(e.p.offset(e.line)), Detail: fmt.Sprintf("it stands where record %d should be", e.nominal())}
		if have[e.at] {
			f.Kind, f.Detail = Duplicate, fmt.Sprintf("it is there again, as line %d of the piece", e.line+1)
		} else {
			d.covered[uint64(e.at)] = true
		}
		d.log.find(f)
	}
}

// walk goes along the lines that are right, and looks at what is between them.
func (d *diagnosis) walk() {
	next := d.log.Expired // the record that should come
	var strange []entry
	var last *entry
	for i := range d.entries {
		e := &d.entries[i]
		switch {
		case e.out:
		case e.at < 0:
			strange = append(strange, *e)
		default:
			d.between(next, uint64(e.at), strange, last, e)
			strange, last, next = nil, e, max(next, uint64(e.at)+1)
		}
	}
	d.between(next, uint64(len(d.kept)), strange, last, nil)
}

// between tells of what is missing from one record to another, and of the lines that stand there instead.
func (d *diagnosis) between(from, to uint64, strange []entry, before, after *entry) {
	missing := d.missing(from, to)
	n := min(len(missing), len(strange))
	d.changed(strange[:n], missing[:n])
	d.foreign(strange[n:], after == nil)
	for missing = missing[n:]; len(missing) > 0; {
		k := 1
		for k < len(missing) && missing[k] == missing[k-1]+1 {
			k++
		}
		d.vanished(missing[0], missing[0]+uint64(k), before, after)
		missing = missing[k:]
	}
}

// missing lists records that no line is and no encrypted piece has.
func (d *diagnosis) missing(from, to uint64) (out []uint64) {
	for n := from; n < to; n++ {
		if d.covered[n] {
			continue
		}
		hidden := false
		for i, p := range d.pieces {
			end := uint64(len(d.kept))
			if i+1 < len(d.pieces) {
				end = d.pieces[i+1].First
			}
			if p.absent && n >= p.First && n < end {
				hidden = true
				n = end - 1
				break
			}
		}
		if !hidden {
			out = append(out, n)
		}
	}
	return out
}

// changed tells of lines that stand in the place of records, together where they follow each other.
func (d *diagnosis) changed(lines []entry, records []uint64) {
	for begin := 0; begin < len(lines); {
		end := begin + 1
		for end < len(lines) && lines[end].p == lines[begin].p && lines[end].line == lines[end-1].line+1 && records[end] == records[end-1]+1 {
			end++
		}
		e := lines[begin]
		f := Finding{Kind: Changed, Shard: e.p.name, Record: ptr(records[begin]), To: ptr(records[end-1] + 1), Offset: ptr(e.p.offset(e.line)),
			Detail: fmt.Sprintf("line %d: its bytes are not those that were written", e.line+1)}
		if end-begin >= len(e.p.leaves)-1 && end-begin > 2 { // a header may be the same
			f.Kind, f.Detail = Replaced, "none of its records is one that was written there"
		}
		d.log.find(f)
		begin = end
	}
}

// foreign tells of lines that are no records of the tree.
func (d *diagnosis) foreign(lines []entry, atEnd bool) {
	for _, e := range lines {
		f := Finding{Kind: Foreign, Shard: e.p.name, Record: ptr(e.nominal()), Offset: ptr(e.p.offset(e.line)), Detail: fmt.Sprintf("line %d was not written by the daemon", e.line+1)}
		if atEnd && e.p.Live && d.plausible(e) {
			f.Kind, f.Detail = Unproven, "it is not in the tree: it was written just before the daemon died, or by somebody else"
		}
		d.log.find(f)
	}
}

// plausible says whether a line claims to be a record of this log.
func (d *diagnosis) plausible(e entry) bool {
	line, err := d.text(e)
	var r audit.Record
	if err != nil {
		return false
	}
	return json.Unmarshal(line, &r) == nil && r.Daemon == d.log.Daemon && (d.log.Origin == "" || audit.Origin(r.Instance, r.Daemon) == d.log.Origin)
}

// vanished tells of records that are in the tree and nowhere else.
func (d *diagnosis) vanished(from, to uint64, before, after *entry) {
	f := Finding{Kind: Vanished, Record: ptr(from), To: ptr(to), Detail: fmt.Sprintf("%d that were written are not there", to-from)}
	switch {
	case after == nil:
		f.Kind = TailCut
		f.Detail = fmt.Sprintf("the last %d that were written are not there", to-from)
		if before != nil {
			f.Shard, f.Offset = before.p.name, ptr(before.p.ends[before.line])
		}
	case before == nil || before.p != after.p:
		if d.pieceGone(before, after) {
			f.Kind, f.Detail = ShardGone, fmt.Sprintf("the piece with %d records before this one is not there", to-from)
		}
		f.Shard, f.Offset = after.p.name, ptr(after.p.offset(after.line))
	default:
		f.Shard, f.Offset = after.p.name, ptr(after.p.offset(after.line))
	}
	for _, t := range d.told {
		f.Told = f.Told || t.from <= from && t.to >= to
	}
	if from < d.log.Expired {
		return
	}
	d.log.find(f)
}

// pieceGone says whether a whole piece is missing before a record, and not the end of the one before or the beginning of
// the record's own: a piece says which one was before it.
func (d *diagnosis) pieceGone(before, after *entry) bool {
	if uint64(after.at) != after.p.First || before != nil && before.p.tail > 0 {
		return false
	}
	line, err := d.text(*after)
	var r audit.Record
	if err != nil || json.Unmarshal(line, &r) != nil {
		return true
	}
	previous, err := strconv.ParseUint(r.Fields[audit.FieldPrevious], 10, 63)
	return err != nil || before == nil || previous != before.p.First
}

// text reads a line again.
func (d *diagnosis) text(e entry) ([]byte, error) {
	f, err := e.p.Open(d.opt.Unseal...)
	if err != nil {
		return nil, err
	}
	defer f.Close() // only read
	if _, err := io.CopyN(io.Discard, f, e.p.offset(e.line)); err != nil {
		return nil, err
	}
	line := make([]byte, e.p.ends[e.line]-e.p.offset(e.line))
	_, err = io.ReadFull(f, line)
	return line, err
}

// ends tells of checkpoints of more records than there are, and of half records.
func (d *diagnosis) ends() {
	have := uint64(len(d.kept))
	if n := len(d.points); n > 0 && d.points[n-1].Size > have {
		p := d.points[n-1]
		d.log.find(Finding{Kind: TailCut, Record: ptr(have), To: ptr(p.Size), Detail: fmt.Sprintf("a checkpoint (%s) is of %d records: those from here on are gone, and their hashes", p.from, p.Size)})
	}
	for _, p := range d.pieces {
		if p.tail > 0 && !(p.Live && d.writing()) {
			end := int64(0)
			if k := len(p.ends); k > 0 {
				end = p.ends[k-1]
			}
			d.log.find(Finding{Kind: Unproven, Shard: p.name, Record: ptr(p.First + p.count), Offset: ptr(end), Detail: fmt.Sprintf("%d bytes of half a record", p.tail)})
		}
	}
	if len(d.pieces) == 0 && have > 0 {
		d.log.find(Finding{Kind: TailCut, Record: ptr(uint64(0)), To: ptr(have), Shard: filepath.Base(d.log.Daemon), Detail: "there is no file of this log"})
	}
}
