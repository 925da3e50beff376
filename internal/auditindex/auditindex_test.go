package auditindex

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/reason"
)

var noon = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

// record is the n-th record of a log with a few of everything.
func record(n int) audit.Record {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	pick := func(list ...string) string { return list[rng.IntN(len(list))] }
	r := audit.Record{
		Version: 1, ID: fmt.Sprintf("%026d", n), Time: noon.Add(time.Duration(n) * time.Millisecond), Boot: time.Duration(n) * time.Millisecond, BootID: "b", Instance: "t",
		Event: pick(audit.EventLookup, audit.EventConnOpened, audit.EventConnClosed, audit.EventToolCalled, audit.EventStopProgress),
		Kid:   pick("a", "b", "c", ""), Outcome: pick("allow", "deny"), Actor: pick("Ada", "uid:0", "Zoë", ""), Card: pick("c1", "c2"),
		Reason: []reason.Code{0, reason.NameNotAllowed, reason.QUIC}[rng.IntN(3)], Detail: pick("", "plain", `with "quotes" and \ and <&>`),
	}
	if r.Kid != "" {
		r.Session = "S-" + r.Kid
	}
	if rng.IntN(2) == 0 {
		r.Dst = &audit.Dst{Name: pick("API.vendor.test", "x.test", ""), Addr: netip.MustParseAddr(pick("198.18.0.1", "2001:db8::1", "198.18.0.2")), Port: 443}
	}
	if rng.IntN(3) == 0 {
		r.Process = &audit.Process{PID: n, Exe: pick("/usr/bin/curl", "/bin/sh")}
	}
	if r.Event == audit.EventStopProgress {
		r.Fields = map[string]string{"stop": pick("STOP1", "STOP2"), "state": "fired"}
	} else if rng.IntN(4) == 0 {
		r.Fields = map[string]string{"path": pick("/etc/passwd", "/workspace/é"), "tool": "x"}
	}
	return r
}

func line(n int) []byte {
	r := record(n)
	r.Daemon = "d"
	raw, err := json.Marshal(r)
	if err != nil {
		panic(err) // no field of it can fail
	}
	return append(raw, '\n')
}

type place struct {
	t         testing.TB
	logs, dir string
	troubles  []error
}

func newPlace(t testing.TB) *place {
	dir := t.TempDir()
	p := &place{t: t, logs: filepath.Join(dir, "audit"), dir: filepath.Join(dir, "audit-index")}
	if err := os.MkdirAll(filepath.Join(p.logs, "d", "shards"), 0o755); err != nil {
		t.Fatal(err)
	}
	return p
}

func (p *place) live() string { return filepath.Join(p.logs, "d", "d.jsonl") }

func (p *place) write(from, to int) {
	p.t.Helper()
	f, err := os.OpenFile(p.live(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		p.t.Fatal(err)
	}
	defer f.Close()
	var text []byte
	for n := from; n < to; n++ {
		text = append(text, line(n)...)
	}
	if _, err := f.Write(text); err != nil {
		p.t.Fatal(err)
	}
}

func (p *place) update() Progress {
	p.t.Helper()
	got, err := Update(context.Background(), p.dir, p.logs)
	if err != nil {
		p.t.Fatal(err)
	}
	return got
}

func (p *place) index() Index {
	return Index{Dir: p.dir, Scanner: auditview.Scanner{Dir: p.logs}, Trouble: func(err error) { p.troubles = append(p.troubles, err) }}
}

// ids returns what a search finds, sorted.
func ids(t testing.TB, f auditview.Finder, q auditview.Query) []string {
	t.Helper()
	out := []string{}
	if _, err := f.Find(context.Background(), q, func(l auditview.Line) error {
		out = append(out, l.ID)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	slices.Sort(out)
	return out
}

var queries = []auditview.Query{
	{}, {Who: "a"}, {Who: "S-b"}, {Who: "STOP1"}, {Who: "nobody"}, {Kid: "c"}, {Session: "S-a", Outcome: "deny"}, {Stop: "STOP2", Kid: "a"}, {Reason: "quic"}, {Reason: "quic", Card: "c1", Outcome: "allow"},
	{Events: []string{"conn.*"}}, {Events: []string{"conn.opened", "tool.called"}, Kid: "a"}, {Events: []string{"co*"}}, {Actor: "Zoë"}, {Actor: "Ada"}, {Host: "api.VENDOR.test"}, {Host: "*.test"}, {Host: "2001:db8::1"},
	{Path: "/etc/passwd"}, {Path: "/workspace/é"}, {Path: "/usr/*"}, {Text: "QUOTES\" and \\"}, {Daemon: "d", Kid: "a"}, {Daemon: "other"},
	{Since: noon.Add(300 * time.Millisecond), Until: noon.Add(400 * time.Millisecond)}, {Kid: "b", Since: noon.Add(time.Second)}, {Kid: "b", Until: noon.Add(time.Second)},
}

// few are searches of each way: by one term, by several, by none.
var few = []auditview.Query{{}, {Who: "a"}, {Reason: "quic", Card: "c1", Outcome: "allow"}, {Path: "/workspace/é"}, {Host: "*.test"}, {Kid: "b", Since: noon.Add(time.Second)}}

// same compares some searches with reading the logs through.
func (p *place) same(what string) {
	p.t.Helper()
	p.compare(what, few)
}

func (p *place) compare(what string, queries []auditview.Query) {
	p.t.Helper()
	found := 0
	for _, q := range queries {
		want := ids(p.t, auditview.Scanner{Dir: p.logs}, q)
		got := ids(p.t, p.index(), q)
		if !slices.Equal(got, want) {
			p.t.Errorf("%s: %+v: %d found through the index, %d in the logs", what, q, len(got), len(want))
		}
		found += len(got)
	}
	if found == 0 {
		p.t.Errorf("%s: nothing was found at all", what)
	}
}

func TestAnIndexFindsWhatIsInTheLogs(t *testing.T) {
	p := newPlace(t)
	p.write(0, 600)
	p.same("without an index")
	if got := p.update(); got.Lines != 600 {
		t.Errorf("%+v", got)
	}
	p.compare("with an index", queries)
	p.write(600, 1100)
	p.compare("behind the log", queries)
	if got := p.update(); got.Lines != 500 {
		t.Errorf("%+v: only what was new should have been read", got)
	}
	closed := filepath.Join(p.logs, "d", "shards", "000000000000-20260504T120000Z.jsonl")
	if err := os.Rename(p.live(), closed); err != nil {
		t.Fatal(err)
	}
	p.write(1100, 1200)
	p.same("after a shard was closed")
	if got := p.update(); got.Lines != 100 || got.Dropped != 0 {
		t.Errorf("%+v: a closed shard is the same shard", got)
	}
	p.same("and indexed")
	if len(p.troubles) != 0 {
		t.Errorf("%v", p.troubles)
	}
	if err := os.Remove(closed); err != nil {
		t.Fatal(err)
	}
	p.same("after a shard has expired")
	if got := p.update(); got.Dropped != 1 || got.Lines != 0 {
		t.Errorf("%+v", got)
	}
}

// The control: what the index says is used. Lines that it does not name are not found, although they are there.
func TestTheIndexIsUsed(t *testing.T) {
	p := newPlace(t)
	p.write(0, 1000)
	p.update()
	info, err := os.Stat(p.live())
	if err != nil {
		t.Fatal(err)
	}
	db, err := open(p.dir, true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec(`DELETE FROM posting WHERE term = ?`, int64(of(fieldKid, "a"))); err != nil {
		t.Fatal(err)
	}
	p.same("with rows missing")
	if len(p.troubles) == 0 || !errors.Is(p.troubles[0], errDamaged) {
		t.Errorf("rows are missing, and nobody was told: %v", p.troubles)
	}
	none := stretch{ends: info.Size()}
	if _, err := db.Exec(`UPDATE stretch SET contents = ?`, none.encode(nil)); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if got := ids(t, p.index(), auditview.Query{Kid: "a"}); len(got) != 0 {
		t.Errorf("%d lines are found without the index: the other tests show nothing", len(got))
	}
	if _, err := Rebuild(t.Context(), p.dir, p.logs); err != nil {
		t.Fatal(err)
	}
	p.same("made again")
}

func TestALogThatWasReplacedIsIndexedAgain(t *testing.T) {
	for what, change := range map[string]func(p *place) error{
		"another log": func(p *place) error {
			return errors.Join(os.Remove(p.live()), os.WriteFile(p.live(), line(5000), 0o644))
		},
		"the same first line, then others": func(p *place) error {
			text := line(0)
			for n := 7000; n < 8000; n++ {
				text = append(text, line(n)...)
			}
			return os.WriteFile(p.live(), text, 0o644)
		},
		"shorter": func(p *place) error {
			info, err := os.Stat(p.live())
			if err != nil {
				return err
			}
			return os.Truncate(p.live(), info.Size()/2)
		},
		"empty": func(p *place) error { return os.Truncate(p.live(), 0) },
		"one line less at the start": func(p *place) error {
			raw, err := os.ReadFile(p.live())
			if err != nil {
				return err
			}
			return os.WriteFile(p.live(), raw[len(line(0)):], 0o644)
		},
	} {
		p := newPlace(t)
		p.write(0, 1000)
		p.update()
		if err := change(p); err != nil {
			t.Fatal(err)
		}
		if what != "empty" {
			p.same(what)
		}
		if got := p.update(); got.Dropped == 0 {
			t.Errorf("%s: the old log was not forgotten: %+v", what, got)
		}
		p.write(9000, 9100)
		p.update()
		p.same(what + ", indexed")
	}
}

// Lines that moved within the indexed part lead the index astray: it notices, and the log is read through.
func TestALogThatWasChangedInTheMiddleIsReadThrough(t *testing.T) {
	p := newPlace(t)
	p.write(0, 1000)
	p.update()
	raw, err := os.ReadFile(p.live())
	if err != nil {
		t.Fatal(err)
	}
	at := len(line(0)) + len(line(1))
	moved := slices.Concat(raw[:at], raw[at+7:len(raw)-tailBytes-500], []byte("1234567"), raw[len(raw)-tailBytes-500:])
	if err := os.WriteFile(p.live(), moved, 0o644); err != nil {
		t.Fatal(err)
	}
	p.same("moved by seven bytes")
	if len(p.troubles) == 0 || !errors.Is(p.troubles[0], errMisled) {
		t.Errorf("nobody was told: %v", p.troubles)
	}
}

func TestADamagedIndexIsDoneWithoutAndMadeAgain(t *testing.T) {
	for what, damage := range map[string]func(p *place) error{
		"not a database": func(p *place) error { return os.WriteFile(File(p.dir), []byte(strings.Repeat("x", 50000)), 0o600) },
		"empty":          func(p *place) error { return os.Truncate(File(p.dir), 0) },
		"cut":            func(p *place) error { return os.Truncate(File(p.dir), 20000) },
		"a bit of a posting": func(p *place) error {
			raw, err := os.ReadFile(File(p.dir))
			if err != nil {
				return err
			}
			for i := 2 * 16384; i < len(raw); i += 97 {
				raw[i] ^= 0x10
			}
			return os.WriteFile(File(p.dir), raw, 0o600)
		},
		"a directory in its place": func(p *place) error { return errors.Join(os.Remove(File(p.dir)), os.Mkdir(File(p.dir), 0o700)) },
	} {
		p := newPlace(t)
		p.write(0, 1000)
		p.update()
		for _, f := range dbFiles(p.dir)[1:] {
			if err := os.RemoveAll(f); err != nil {
				t.Fatal(err)
			}
		}
		if err := damage(p); err != nil {
			t.Fatal(err)
		}
		p.same(what)
		if len(p.troubles) == 0 && what != "empty" {
			t.Errorf("%s: nobody was told", what)
		}
		if _, err := Rebuild(t.Context(), p.dir, p.logs); err != nil {
			t.Errorf("%s: it cannot be made again: %v", what, err)
			continue
		}
		p.troubles = nil
		p.same(what + ", made again")
		if len(p.troubles) != 0 {
			t.Errorf("%s: %v", what, p.troubles)
		}
	}
}

// An index that is killed at any moment is whole or behind, and the next one goes on.
func TestAKilledIndexerLosesNothing(t *testing.T) {
	if logs := os.Getenv("TAGOUT_INDEX_LOGS"); logs != "" {
		for { // until it is killed
			if _, err := Rebuild(context.Background(), os.Getenv("TAGOUT_INDEX_DIR"), logs); err != nil {
				t.Fatal(err)
			}
		}
	}
	p := newPlace(t)
	p.write(0, 4000)
	killed := 0
	for round := range 4 {
		p.write(4000+round*3000, 7000+round*3000)
		cmd := exec.Command(os.Args[0], "-test.run", "^TestAKilledIndexerLosesNothing$")
		cmd.Env = append(os.Environ(), "TAGOUT_INDEX_LOGS="+p.logs, "TAGOUT_INDEX_DIR="+p.dir)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		kill := time.AfterFunc(time.Duration(50+rand.IntN(150))*time.Millisecond, func() { cmd.Process.Kill() })
		err := cmd.Wait()
		kill.Stop()
		var exit *exec.ExitError
		if errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled() {
			killed++
		} else if err != nil {
			t.Fatal(err)
		}
		for _, q := range []auditview.Query{{Who: "a"}, {Stop: "STOP1"}, {Actor: "Zoë"}} {
			if got, want := ids(t, p.index(), q), ids(t, auditview.Scanner{Dir: p.logs}, q); !slices.Equal(got, want) {
				t.Fatalf("round %d: %+v: %d of %d", round, q, len(got), len(want))
			}
		}
	}
	if killed == 0 {
		t.Error("no indexer was killed: this shows nothing")
	}
	p.update()
	p.troubles = nil // one that was killed while it made the file left none that counts
	p.same("after all that")
	if len(p.troubles) != 0 {
		t.Errorf("%v", p.troubles)
	}
}

// Searches go on, and find all, while the log and the index grow; of two writers one waits for the next time.
func TestManyAtOnce(t *testing.T) {
	p := newPlace(t)
	p.write(0, 500)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if _, err := Update(context.Background(), p.dir, p.logs); err != nil && !errors.Is(err, ErrBusy) {
					t.Error(err)
					return
				}
			}
		})
	}
	for n := 500; n < 1100; n += 150 {
		p.write(n, n+150)
		p.same("in the middle of it")
	}
	close(stop)
	wg.Wait()
}

func TestOnlyOneWriterAtATime(t *testing.T) {
	p := newPlace(t)
	p.write(0, 10)
	unlock, err := lock(p.dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Update(t.Context(), p.dir, p.logs); !errors.Is(err, ErrBusy) {
		t.Errorf("%v", err)
	}
	p.same("locked")
	unlock()
	p.update()
}

func TestAFullDiskIsDoneWithout(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: it mounts a small filesystem")
	}
	p := newPlace(t)
	if err := errors.Join(os.Mkdir(p.dir, 0o700), syscall.Mount("tmpfs", p.dir, "tmpfs", 0, "size=96k")); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(p.dir, 0)
	p.write(0, 2500)
	if _, err := Update(t.Context(), p.dir, p.logs); err == nil {
		t.Fatal("the disk was not full: this shows nothing")
	}
	p.same("on a full disk")
	if err := syscall.Mount("tmpfs", p.dir, "tmpfs", syscall.MS_REMOUNT, "size=64m"); err != nil {
		t.Fatal(err)
	}
	p.update()
	p.same("after there was room again")
	if err := syscall.Mount("tmpfs", p.dir, "tmpfs", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=64m"); err != nil {
		t.Fatal(err)
	}
	p.same("on a disk that cannot be written")
}

func TestAnEncryptedPieceLeavesTheIndex(t *testing.T) {
	p := newPlace(t)
	p.write(0, 100)
	p.update()
	if err := errors.Join(os.Remove(p.live()), os.WriteFile(filepath.Join(p.logs, "d", "shards", "000000000000-20260504T120000Z.jsonl.age"), []byte("age"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if got := p.update(); got.Dropped != 1 {
		t.Errorf("%+v", got)
	}
	db, err := open(p.dir, false)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var n int
	if err := db.QueryRow(`SELECT count(*) FROM posting`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d postings are left: %v", n, err)
	}
	stats, err := p.index().Find(t.Context(), auditview.Query{Kid: "a"}, func(auditview.Line) error { return nil })
	if err != nil || stats.Sealed != 1 {
		t.Errorf("%+v %v", stats, err)
	}
}

// FuzzFactsAreAllThere: whatever decoding a line finds, the quick way finds too.
func FuzzFactsAreAllThere(f *testing.F) {
	for n := range 40 {
		f.Add(line(n)[:len(line(n))-1])
	}
	for _, s := range []string{
		`{"time":"2026-05-04T12:00:00Z","event":"a.b","KID":"k"}`, `{"time":"2026-05-04T12:00:00Z","event":"a.b","\u006bid":"k"}`, `{"time":"2026-05-04T12:00:00Z","event":"a.b","kid":"k","kid":"l"}`,
		`{"time":"2026-05-04T12:00:00Z","event":"a.b","dst":{"Name":"x"}}`, `{"time":"2026-05-04T12:00:00Z","event":"a.b","dst":{"addr":"::ffff:1.2.3.4"}}`, `{"time":"2026-05-04T12:00:00Z","event":"a.b","fields":{"stop":null}}`,
		`{"time":"2026-05-04T12:00:00Z","event":"a.b","ſession":"x"}`, ` {"time":"2026-05-04T12:00:00Z","event":"a.b"}`, `{"time":"2026-05-04T12:00:00Z","event":"a.b","process":{"pid":1,"Exe":"/x"}}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		l, ok := auditview.Decode(raw)
		var got facts
		if read := got.read(raw); !read && ok {
			t.Fatal("a record is passed over")
		}
		if !ok {
			return
		}
		if !got.at.Equal(l.Time) {
			t.Errorf("it happened at %v, not %v", l.Time, got.at)
		}
		want := []auditview.Query{{Kid: l.Kid}, {Session: l.Session}, {Stop: l.Fields["stop"]}, {Card: l.Card}, {Outcome: l.Outcome}, {Actor: l.Actor}, {Events: []string{l.Event}}}
		if l.Reason != 0 && l.Reason != reason.Internal { // an unknown word is read as internal
			want = append(want, auditview.Query{Reason: l.Reason.String()})
		}
		if noun, _, dot := strings.Cut(l.Event, "."); dot && noun != "" {
			want = append(want, auditview.Query{Events: []string{noun + ".*"}})
		}
		for _, h := range auditview.Hosts(&l.Record) {
			want = append(want, auditview.Query{Host: h})
		}
		for _, p := range auditview.Paths(&l.Record) {
			want = append(want, auditview.Query{Path: p})
		}
		for _, q := range want {
			for _, g := range termsOf(q) {
				if q.Match(&l) && !slices.ContainsFunc(g, func(x term) bool { return slices.Contains(got.terms, x) }) {
					t.Errorf("the index does not know %+v of it", q)
				}
			}
		}
	})
}
