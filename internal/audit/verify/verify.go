package verify

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
)

// Options say what is verified with. All may be left out.
type Options struct {
	Daemons   []string                 // whose logs; none: all there are
	Keys      map[string]note.Verifier // by daemon; without one the exported key counts, then the one beside the log
	Witnesses []Witnessed
	Unseal    []audit.Unseal // for encrypted pieces; without, their hashes alone are verified
}

// run is the verification of one log.
type run struct {
	dir    string
	opt    Options
	log    *Log
	file   *audit.TreeFile
	pieces []*piece
	points []checkpoint // by size
	told   []span       // records that gap records say are gone
	word   *word        // of sandboxd, about removed and encrypted pieces
	keep   bool         // diagnosing: leaves are kept
}

type span struct{ from, to uint64 }

// Run verifies the logs below dir (inst.AuditDir()). An error means that it could not be done.
func Run(dir string, opt Options) (*Report, error) {
	daemons, err := logsIn(dir)
	if err != nil {
		return nil, err
	}
	w := &word{expired: map[string]uint64{}, sealed: map[string]sealedPiece{}}
	r := &Report{OK: true}
	for _, daemon := range daemons {
		if len(opt.Daemons) > 0 && !slices.Contains(opt.Daemons, daemon) && daemon != keeper {
			continue
		}
		log, err := verifyLog(dir, daemon, opt, w)
		if err != nil {
			return nil, fmt.Errorf("verifying the log of %s: %w", daemon, err)
		}
		if len(opt.Daemons) > 0 && !slices.Contains(opt.Daemons, daemon) {
			continue
		}
		r.Logs = append(r.Logs, *log)
		r.OK = r.OK && len(log.Findings) == 0
	}
	if len(r.Logs) == 0 {
		return nil, fmt.Errorf("verifying the audit logs: there are none in %s: is this the right instance?", dir)
	}
	return r, nil
}

// logsIn lists the daemons with logs, the one whose log tells of the others first.
func logsIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("listing the audit logs: %w", err)
	}
	var out []string
	for _, e := range entries {
		if !e.IsDir() || e.Name() == KeyDir {
			continue
		}
		shards, err := audit.ShardsOf(dir, e.Name())
		if err != nil {
			return nil, err
		}
		_, err = os.Stat(filepath.Join(dir, e.Name(), audit.HashFile))
		if len(shards) > 0 || err == nil {
			out = append(out, e.Name())
		}
	}
	slices.SortStableFunc(out, func(a, b string) int { return strings.Compare(rank(a), rank(b)) })
	return out, nil
}

func rank(daemon string) string {
	if daemon == keeper {
		return ""
	}
	return daemon
}

func verifyLog(dir, daemon string, opt Options, w *word) (*Log, error) {
	for try := 0; ; try++ {
		v := &run{dir: dir, opt: opt, log: &Log{Daemon: daemon}, word: w}
		err := v.verify()
		if errors.Is(err, fs.ErrNotExist) && try < 3 {
			continue // a piece was encrypted or removed meanwhile
		}
		if v.file != nil {
			v.file.Close() // only read
		}
		return v.log, err
	}
}

func (v *run) verify() (err error) {
	v.checkpoints() // before the records: what is written meanwhile is newer than they are
	if err := v.list(); err != nil {
		return err
	}
	if v.file, err = audit.OpenTree(v.dir, v.log.Daemon); err != nil {
		v.log.find(Finding{Kind: NoTree, Shard: audit.HashFile, Detail: "nothing of this log can be proven: " + err.Error()})
		return nil
	}
	clean, err := v.fast()
	if err != nil || clean {
		return err
	}
	v.log.Read, v.log.Hashed, v.log.Records, v.told = 0, 0, 0, nil
	return v.diagnose()
}

// list lists the pieces.
func (v *run) list() error {
	shards, err := audit.ShardsOf(v.dir, v.log.Daemon)
	if err != nil {
		return err
	}
	v.pieces = nil
	for _, s := range shards {
		name, err := filepath.Rel(filepath.Join(v.dir, v.log.Daemon), s.Path)
		if err != nil {
			return err
		}
		v.pieces = append(v.pieces, &piece{Shard: s, name: name})
	}
	slices.SortStableFunc(v.pieces, func(a, b *piece) int { return int(int64(a.First) - int64(b.First)) })
	v.log.Shards, v.log.Expired = len(v.pieces), v.word.expired[v.log.Daemon]
	return nil
}

// next is the sequence number behind a piece, as far as the next one, or the tree, says.
func (v *run) next(i int) (uint64, error) {
	if i+1 < len(v.pieces) {
		return v.pieces[i+1].First, nil
	}
	return v.file.Size()
}

// fast goes through everything once, without keeping anything. It says whether all is as it should be; where it is not,
// diagnose says what.
func (v *run) fast() (clean bool, err error) {
	g := &grower{v: v, kept: bufio.NewReaderSize(v.file.From(0), 1<<20)}
	for i, p := range v.pieces {
		if p.First < g.tree.Size() {
			return false, nil
		}
		if p.First > max(g.tree.Size(), v.log.Expired) {
			return false, nil
		}
		if err := g.fill(p.First); err != nil {
			return false, err
		}
		if err := v.grow(g, i); err != nil {
			return false, err
		}
		if g.wrong {
			return false, nil
		}
		v.log.Read += p.count
	}
	have, err := v.file.Size()
	if err != nil {
		return false, err
	}
	v.log.Records = g.tree.Size()
	most := uint64(0)
	if n := len(v.points); n > 0 {
		most = v.points[n-1].Size
	}
	return g.tree.Size() >= most && (g.tree.Size() >= have || v.writing()), nil
}

// grow adds one piece.
func (v *run) grow(g *grower, i int) error {
	p := v.pieces[i]
	r, err := p.Open(v.opt.Unseal...)
	if p.Sealed {
		if problem := v.word.sealedAs(v.log.Daemon, p); problem != "" {
			v.log.find(Finding{Kind: Ciphertext, Shard: p.name, Record: ptr(p.First), Detail: problem})
		}
	}
	if errors.Is(err, audit.ErrSealed) {
		to, err := v.next(i)
		if err != nil {
			return err
		}
		p.absent, p.count = true, 0
		v.log.Hashed += to - min(to, p.First)
		return g.fill(to)
	}
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return err
		}
		v.log.find(Finding{Kind: Unreadable, Shard: p.name, Record: ptr(p.First), Detail: err.Error()})
		p.absent = true
		to, err := v.next(i)
		return errors.Join(err, g.fill(to))
	}
	defer r.Close() // only read
	p.count, p.leaves, p.ends = 0, nil, nil
	err = hashLines(r, p, func(c *chunk) error {
		v.hear(c.lines)
		if v.keep {
			p.leaves = append(p.leaves, c.leaves...)
			p.ends = append(p.ends, c.ends...)
			return nil
		}
		return g.add(c.leaves)
	})
	if err != nil && p.Sealed { // authenticated encryption tells of a changed byte itself
		v.log.find(Finding{Kind: Unreadable, Shard: p.name, Record: ptr(p.First + p.count), Detail: err.Error()})
		g.wrong, err = true, nil
	}
	if p.tail > 0 && !(p.Live && v.writing()) {
		g.wrong = true
	}
	return err
}

// grower grows the tree and compares it with the hashes that were kept and with the checkpoints.
type grower struct {
	v     *run
	tree  audit.Tree
	kept  *bufio.Reader
	buf   [64 * 32]byte
	point int // the next checkpoint
	wrong bool
}

func (g *grower) add(leaves []audit.Hash) error {
	for i := range leaves {
		if g.wrong {
			return nil
		}
		want := g.tree.Add(leaves[i])
		have := g.buf[:len(want)]
		if n, err := io.ReadFull(g.kept, have); err != nil {
			if !g.wait(have, n) {
				g.wrong = true
				return nil
			}
		}
		if !bytes.Equal(have, want) {
			g.wrong = true
			return nil
		}
		g.compare()
	}
	return nil
}

// wait waits for hashes that are written just behind the lines.
func (g *grower) wait(have []byte, n int) bool {
	for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline) && g.v.writing(); time.Sleep(5 * time.Millisecond) {
		k, err := io.ReadFull(g.kept, have[n:])
		n += k
		if err == nil {
			return true
		}
	}
	return false
}

// compare looks at the checkpoints of the tree as it is.
func (g *grower) compare() {
	for ; g.point < len(g.v.points) && g.v.points[g.point].Size <= g.tree.Size(); g.point++ {
		p := g.v.points[g.point]
		if p.Size == g.tree.Size() && p.Root != g.tree.Root() {
			g.wrong = true
		}
	}
}

// fill adds leaves as they were kept.
func (g *grower) fill(to uint64) error {
	for g.tree.Size() < to && !g.wrong {
		leaf, err := g.v.file.Leaf(g.tree.Size())
		if err != nil {
			g.wrong = true // diagnosed from what there is
			return nil
		}
		if err := g.add([]audit.Hash{leaf}); err != nil {
			return err
		}
	}
	return nil
}

// writing says whether a daemon has the log open (proc_locks(5)).
func (v *run) writing() bool {
	info, err := os.Stat(filepath.Join(v.dir, v.log.Daemon, audit.TreeDir, "lock"))
	if err != nil {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	locks, err := os.ReadFile("/proc/locks")
	return ok && err == nil && bytes.Contains(locks, []byte(":"+strconv.FormatUint(st.Ino, 10)+" "))
}

var (
	gapEvent     = []byte(`"event":"` + audit.EventGap + `"`)
	expiredEvent = []byte(`"event":"` + audit.EventExpired + `"`)
	sealedEvent  = []byte(`"event":"` + audit.EventSealed + `"`)
	auditEvent   = []byte(`"event":"audit.`)
)

// hear notes what the log says about logs.
func (v *run) hear(lines []byte) {
	for rest := lines; ; {
		at := bytes.Index(rest, auditEvent)
		if at < 0 {
			return
		}
		begin := bytes.LastIndexByte(rest[:at], '\n') + 1
		end := at + bytes.IndexByte(rest[at:], '\n')
		v.hearLine(rest[begin:end])
		rest = rest[end:]
	}
}

func (v *run) hearLine(line []byte) {
	gap, expired, sealed := bytes.Contains(line, gapEvent), bytes.Contains(line, expiredEvent), bytes.Contains(line, sealedEvent)
	var r audit.Record
	if !gap && !expired && !sealed || json.Unmarshal(line, &r) != nil {
		return
	}
	switch {
	case r.Event == audit.EventGap:
		from, err := strconv.ParseUint(r.Fields[audit.FieldFrom], 10, 63)
		to, err2 := strconv.ParseUint(r.Fields[audit.FieldTo], 10, 63)
		if errors.Join(err, err2) == nil {
			v.told = append(v.told, span{from, to})
		}
	case v.log.Daemon == keeper:
		v.word.hear(&r)
	}
}
