package auditkeep

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"filippo.io/age"
	"golang.org/x/mod/sumdb/note"

	"tagout/internal/audit"
	"tagout/internal/audit/seal"
	"tagout/internal/audit/verify"
	"tagout/internal/audit/witness"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// bed is a directory with the logs of sandboxd, which is open, and of x, which has one piece a day.
type bed struct {
	t     *testing.T
	dir   string
	state string
	own   *audit.Logger
	now   time.Time
}

func (b *bed) clock() time.Time { return b.now }

func newBed(t *testing.T, days int) *bed {
	t.Helper()
	b := &bed{t: t, dir: t.TempDir(), state: t.TempDir(), now: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
	must(t, os.Mkdir(filepath.Join(b.dir, "sandboxd"), 0o700))
	must(t, os.Mkdir(filepath.Join(b.dir, "x"), 0o700))
	for range days {
		b.day()
	}
	own, err := audit.OpenWith(filepath.Join(b.dir, "sandboxd", "sandboxd.jsonl"), "test", "sandboxd", audit.Options{Now: b.clock})
	must(t, err)
	b.own = own
	t.Cleanup(func() { must(t, own.Close()) })
	return b
}

// day writes some records of x and lets the night pass.
func (b *bed) day() {
	b.t.Helper()
	l, err := audit.OpenWith(filepath.Join(b.dir, "x", "x.jsonl"), "test", "x", audit.Options{Now: b.clock})
	must(b.t, err)
	for i := range 20 {
		l.Log(audit.Record{Event: audit.EventLookup, Kid: "k", Detail: fmt.Sprint(b.now.Format(time.DateOnly), " ", i)})
		if i == 0 {
			must(b.t, l.Sync(b.t.Context())) // a batch never spans two days
		}
	}
	must(b.t, l.Close())
	must(b.t, os.Chtimes(filepath.Join(b.dir, "x", "x.jsonl"), b.now, b.now))
	b.now = b.now.Add(24 * time.Hour)
}

type counts struct {
	mu   sync.Mutex
	said map[string]int
}

func (*counts) AuditFree(uint64, uint64)          {}
func (*counts) AuditOldest(string, time.Duration) {}
func (c *counts) Witnessed(w, outcome string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.said == nil {
		c.said = map[string]int{}
	}
	c.said[w+" "+outcome]++
}
func (c *counts) of(what string) int { c.mu.Lock(); defer c.mu.Unlock(); return c.said[what] }

func (b *bed) keeper(change func(*Config)) (*Keeper, *counts) {
	b.t.Helper()
	m := &counts{}
	cfg := Config{Dir: b.dir, State: b.state, Retention: 90 * 24 * time.Hour, Audit: b.own, Metrics: m, Log: slog.New(slog.DiscardHandler), Now: b.clock, SealAfter: time.Nanosecond}
	if change != nil {
		change(&cfg)
	}
	k, err := New(cfg)
	must(b.t, err)
	return k, m
}

func (b *bed) verify(opt verify.Options) *verify.Report {
	b.t.Helper()
	must(b.t, b.own.Sync(b.t.Context()))
	r, err := verify.Run(b.dir, opt)
	must(b.t, err)
	return r
}

func words(r *verify.Report) string {
	var out []string
	for _, f := range r.Findings() {
		out = append(out, f.String())
	}
	return strings.Join(out, "\n")
}

func logOf(r *verify.Report, daemon string) verify.Log {
	for _, l := range r.Logs {
		if l.Daemon == daemon {
			return l
		}
	}
	return verify.Log{}
}

func (b *bed) pieces() int {
	b.t.Helper()
	all, err := audit.ShardsOf(b.dir, "x")
	must(b.t, err)
	return len(all)
}

// TestRecordsAreKeptForTheirTimeAndNoLonger: not a day less, with a record that says so, and what is left verifies. A piece
// that somebody else removes is missed all the same.
func TestRecordsAreKeptForTheirTimeAndNoLonger(t *testing.T) {
	t.Parallel()
	for _, days := range []int{90, 183, 7} {
		t.Run(fmt.Sprint(days), func(t *testing.T) {
			t.Parallel()
			b := newBed(t, 2)
			k, _ := b.keeper(func(c *Config) { c.Retention = time.Duration(days) * 24 * time.Hour })
			var closed time.Time // when the second of the pieces was seen closed
			for day := range 4 {
				must(t, k.Tidy(t.Context()))
				if day == 1 {
					closed = b.now
				}
				b.day()
				b.slow(k)
			}
			must(t, k.Tidy(t.Context()))
			before := b.pieces()
			shards, err := audit.ShardsOf(b.dir, "x")
			must(t, err)
			for _, s := range shards[1 : len(shards)-1] { // a daemon that was broken into makes its records look old
				must(t, os.Rename(s.Path, strings.Replace(s.Path, "-2026", "-2020", 1)))
			}
			// The second is a second short of its time.
			b.now = closed.Add(time.Duration(days)*24*time.Hour - time.Second)
			b.slow(k)
			must(t, k.Tidy(t.Context()))
			if n := b.pieces(); n != before-1 {
				t.Fatalf("%d pieces of %d are left, want all but one", n, before)
			}
			r := b.verify(verify.Options{})
			if x := logOf(r, "x"); !r.OK || x.Expired == 0 {
				t.Errorf("%+v\n%s", x, words(r))
			}
			shards, err = audit.ShardsOf(b.dir, "x")
			must(t, err)
			must(t, os.Remove(shards[0].Path))
			if r := b.verify(verify.Options{}); r.OK || !strings.Contains(words(r), verify.ShardGone) {
				t.Errorf("the control, a piece that nobody said was removed: %s", words(r))
			}
		})
	}
}

// TestNoLinkIsFollowed: a daemon that was broken into cannot have sandboxd, which is root, remove or encrypt what is
// elsewhere, or hold it up.
func TestNoLinkIsFollowed(t *testing.T) {
	t.Parallel()
	b := newBed(t, 4)
	id, err := age.GenerateX25519Identity()
	must(t, err)
	k, _ := b.keeper(func(c *Config) { c.Recipients = []string{id.Recipient().String()} })
	shards := filepath.Join(b.dir, "x", "shards")
	elsewhere := filepath.Join(b.dir, "elsewhere")
	must(t, errors.Join(os.Rename(shards, elsewhere), os.Symlink("../elsewhere", shards)))
	before, err := os.ReadDir(elsewhere)
	must(t, err)
	for range 2 {
		if err := k.Tidy(t.Context()); err == nil {
			err = k.Tidy(t.Context())
			if err == nil {
				t.Error("a link was followed")
			}
		}
		b.now = b.now.Add(200 * 24 * time.Hour)
		b.slow(k)
	}
	after, err := os.ReadDir(elsewhere)
	must(t, err)
	if len(before) != len(after) {
		t.Errorf("%d files were elsewhere, %d are", len(before), len(after))
	}
	must(t, errors.Join(os.Remove(shards), os.Rename(elsewhere, shards)))
	pipe := filepath.Join(shards, "000000000001-20260101T000000Z.jsonl")
	must(t, syscall.Mkfifo(pipe, 0o600))
	must(t, syscall.Mkfifo(filepath.Join(b.dir, "x", "y.jsonl"), 0o600))
	ended := make(chan struct{})
	go func() {
		k.Tidy(t.Context()) // what it says of it does not matter
		verify.Run(b.dir, verify.Options{})
		audit.Timeline(b.dir, func(*audit.Record) bool { return false })
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("a FIFO holds everything up")
	}
}

// slow makes the keeper believe that the time passed, and that the clock was not set.
func (b *bed) slow(k *Keeper) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.at.ID = "another boot"
}

// TestAClockThatJumpsRemovesNothing: set forward by ten years while the machine runs, and back.
func TestAClockThatJumpsRemovesNothing(t *testing.T) {
	t.Parallel()
	b := newBed(t, 4)
	k, _ := b.keeper(nil)
	must(t, k.Tidy(t.Context()))
	before, now := b.pieces(), b.now
	b.now = now.Add(10 * 365 * 24 * time.Hour)
	must(t, k.Tidy(t.Context()))
	again, _ := b.keeper(nil) // after a restart too
	must(t, again.Tidy(t.Context()))
	if n := b.pieces(); n != before {
		t.Fatalf("%d pieces of %d are left", n, before)
	}
	b.now = now
	must(t, again.Tidy(t.Context()))
	b.now = now.Add(100 * 24 * time.Hour)
	b.slow(again) // the control: time that passed
	must(t, again.Tidy(t.Context()))
	if n := b.pieces(); n == before {
		t.Error("nothing is ever removed: the test shows nothing")
	}
}

// TestClosedPiecesAreEncrypted: they verify with the identity by their bytes, without by their hashes; a changed byte of
// the ciphertext and a changed record in one are found.
func TestClosedPiecesAreEncrypted(t *testing.T) {
	t.Parallel()
	b := newBed(t, 5)
	id, err := age.GenerateX25519Identity()
	must(t, err)
	k, _ := b.keeper(func(c *Config) { c.Recipients = []string{id.Recipient().String()} })
	shards, err := audit.ShardsOf(b.dir, "x")
	must(t, err)
	harmed := shards[1].Path
	good, err := os.ReadFile(harmed)
	must(t, err)
	must(t, os.WriteFile(harmed, bytes.Replace(good, []byte("dns.lookup"), []byte("dns.lookap"), 1), 0o600))
	must(t, errors.Join(k.Tidy(t.Context()), k.Tidy(t.Context())))
	if _, err := os.Stat(harmed); err != nil {
		t.Errorf("a piece that is not what was written was encrypted: %v", err)
	}
	must(t, os.WriteFile(harmed, good, 0o600))
	must(t, k.Tidy(t.Context()))
	shards, err = audit.ShardsOf(b.dir, "x")
	must(t, err)
	for _, s := range shards[:len(shards)-1] {
		if !s.Sealed {
			t.Errorf("%s is in clear", s.Path)
		}
	}
	unseal := verify.Options{Unseal: []audit.Unseal{seal.With(id)}}
	with, without := b.verify(unseal), b.verify(verify.Options{})
	if !with.OK || !without.OK || logOf(with, "x").Read != 104 || logOf(without, "x").Read >= 42 || logOf(without, "x").Hashed == 0 {
		t.Errorf("with: %+v %s\nwithout: %+v %s", logOf(with, "x"), words(with), logOf(without, "x"), words(without))
	}
	var read int
	_, _, err = audit.Timeline(b.dir, func(r *audit.Record) bool { read++; return false }, seal.With(id))
	if err != nil || read < 104 {
		t.Errorf("a reader with the identity saw %d records: %v", read, err)
	}
	raw, err := os.ReadFile(shards[0].Path)
	must(t, err)
	raw[len(raw)-20] ^= 1
	must(t, os.WriteFile(shards[0].Path, raw, 0o600))
	if r := b.verify(verify.Options{}); r.OK || !strings.Contains(words(r), verify.Ciphertext) {
		t.Errorf("without the identity, a changed byte: %s", words(r))
	}
	if r := b.verify(unseal); r.OK || !strings.Contains(words(r), filepath.Base(shards[0].Path)) {
		t.Errorf("with the identity, a changed byte: %s", words(r))
	}
}

// TestKeysAreExportedOnce: a daemon that signs with another key later is told of, and does not verify.
func TestKeysAreExportedOnce(t *testing.T) {
	t.Parallel()
	b := newBed(t, 1)
	k, _ := b.keeper(nil)
	must(t, k.Tidy(t.Context()))
	exported := filepath.Join(b.dir, verify.KeyDir, "x.pub")
	first, err := os.ReadFile(exported)
	must(t, err)
	if info, err := os.Stat(exported); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("%v %v", info, err)
	}
	must(t, errors.Join(os.Remove(filepath.Join(b.dir, "x", audit.KeyFile)), os.Remove(filepath.Join(b.dir, "x", audit.PublicKeyFile))))
	b.day()
	must(t, k.Tidy(t.Context()))
	if now, err := os.ReadFile(exported); err != nil || string(now) != string(first) {
		t.Errorf("the exported key was replaced: %v", err)
	}
	if r := b.verify(verify.Options{}); r.OK || !strings.Contains(words(r), verify.NewKey) {
		t.Errorf("%s", words(r))
	}
}

// until waits for a condition.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}

// TestWitnessesGetCheckpoints: each kind, beside one that hangs and one that is not there; what each has finds a log that
// was rewritten with its key.
func TestWitnessesGetCheckpoints(t *testing.T) {
	t.Parallel()
	b := newBed(t, 2)
	public, err := os.ReadFile(filepath.Join(b.dir, "x", audit.PublicKeyFile))
	must(t, err)
	key, err := note.NewVerifier(strings.TrimSpace(string(public)))
	must(t, err)
	signs, err := witness.NewKey("witness.test")
	must(t, err)
	kept := t.TempDir()
	cosigning := httptest.NewServer(witness.New(kept, signs, key))
	defer cosigning.Close()
	var mu sync.Mutex
	var posted []byte
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		posted = append(posted, raw...)
	}))
	defer plain.Close()
	hang := make(chan struct{})
	hangs := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		select {
		case <-hang:
		case <-r.Context().Done():
		}
	}))
	defer hangs.Close()
	defer close(hang)
	syslog, err := net.ListenPacket("udp", "127.0.0.1:0")
	must(t, err)
	defer syslog.Close()
	file := filepath.Join(t.TempDir(), "witness")
	wait := 300 * time.Millisecond
	k, m := b.keeper(func(c *Config) {
		c.Witnesses = []Witness{
			{Name: "hangs", URL: hangs.URL, Timeout: wait, Queue: 1}, {Name: "absent", File: filepath.Join(t.TempDir(), "no", "such"), Timeout: wait, Queue: 1},
			{Name: "file", File: file, Timeout: wait, Queue: 16}, {Name: "plain", URL: plain.URL, Timeout: wait, Queue: 16},
			{Name: "cosigns", URL: cosigning.URL, Key: signs.Public(), Timeout: 5 * time.Second, Queue: 16}, {Name: "syslog", Syslog: "udp://" + syslog.LocalAddr().String(), Timeout: wait, Queue: 16},
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx, nobody{}) }()
	cosigned := filepath.Join(b.dir, CosignedDir, "x.cosigns")
	newest := func() string {
		raw, err := os.ReadFile(filepath.Join(b.dir, "x", audit.CheckpointFile))
		must(t, err)
		return string(raw)
	}
	until(t, "the first cosignature", func() bool {
		raw, err := os.ReadFile(cosigned)
		return err == nil && strings.HasPrefix(string(raw), newest())
	})
	b.day() // the log grows: what was seen is proven to be its beginning
	until(t, "the second cosignature", func() bool {
		raw, err := os.ReadFile(cosigned)
		return err == nil && strings.HasPrefix(string(raw), newest())
	})
	until(t, "a dropped checkpoint of the one that hangs", func() bool { return m.of("hangs dropped") > 0 && m.of("absent fail") > 0 })
	cancel()
	must(t, <-ended)

	buf := make([]byte, 4096)
	must(t, syslog.SetReadDeadline(time.Now().Add(10*time.Second)))
	var messages []byte
	for !bytes.Contains(messages, []byte(`log="x"`)) {
		n, _, err := syslog.ReadFrom(buf)
		must(t, err)
		messages = append(append(messages, buf[:n]...), '\n')
	}
	if !bytes.HasPrefix(messages, []byte("<109>1 ")) {
		t.Errorf("no message of RFC 5424: %s", messages)
	}
	have := map[string]string{"file": file, "cosigns": filepath.Join(kept, witness.CheckpointsFile)}
	for name, raw := range map[string][]byte{"plain": posted, "syslog": messages} {
		have[name] = filepath.Join(t.TempDir(), name)
		must(t, os.WriteFile(have[name], raw, 0o600))
	}
	b.now = b.now.Add(time.Minute)
	rewriteWhole(t, b.dir, key.Name())
	if r := b.verify(verify.Options{Daemons: []string{"x"}}); !r.OK {
		t.Errorf("the control, without a witness: %s", words(r))
	}
	for name, path := range have {
		seen, err := verify.ReadWitness(path)
		must(t, err)
		if r := b.verify(verify.Options{Daemons: []string{"x"}, Witnesses: seen}); r.OK || !strings.Contains(words(r), verify.Rewritten) {
			t.Errorf("%s: %s", name, words(r))
		}
	}
	// The rewritten log gets no signature any more.
	c, err := newCosigner(Witness{Name: "cosigns", URL: cosigning.URL, Key: signs.Public(), Timeout: time.Second}, b.dir)
	must(t, err)
	if err := c.send(t.Context(), offered{"x", []byte(newest())}); err == nil {
		t.Errorf("the rewritten log was signed: %v", err)
	}
}

// rewriteWhole changes one record, and signs everything again with the log's own key.
func rewriteWhole(t *testing.T, dir, origin string) {
	t.Helper()
	shards, err := audit.ShardsOf(dir, "x")
	must(t, err)
	var tree audit.Tree
	var h audit.LeafHasher
	var hashes []byte
	for i, s := range shards {
		raw, err := os.ReadFile(s.Path)
		must(t, err)
		if i == 0 {
			raw = bytes.Replace(raw, []byte("dns.lookup"), []byte("dns.lookap"), 1)
			must(t, os.WriteFile(s.Path, raw, 0o600))
		}
		for line := range bytes.Lines(raw) {
			hashes = append(hashes, tree.Add(h.Line(bytes.TrimSuffix(line, []byte("\n"))))...)
		}
	}
	private, err := os.ReadFile(filepath.Join(dir, "x", audit.KeyFile))
	must(t, err)
	signer, err := note.NewSigner(strings.TrimSpace(string(private)))
	must(t, err)
	signed, err := note.Sign(&note.Note{Text: audit.Checkpoint{Origin: origin, Size: tree.Size(), Root: tree.Root()}.Text()}, signer)
	must(t, err)
	must(t, errors.Join(os.WriteFile(filepath.Join(dir, "x", audit.HashFile), hashes, 0o600), os.Remove(filepath.Join(dir, "x", audit.CheckpointsFile)),
		os.WriteFile(filepath.Join(dir, "x", audit.CheckpointFile), signed, 0o600)))
}

// nobody is a box without kids.
type nobody struct{}

func (nobody) Running(context.Context) []string                    { return nil }
func (nobody) Pause(context.Context, string, string, string) error { return nil }
func (nobody) Stop(context.Context, string, string) error          { return nil }

// box is one with a kid, and remembers what was done to it.
type box struct {
	mu   sync.Mutex
	done []string
}

func (*box) Running(context.Context) []string { return []string{"k"} }
func (b *box) Pause(_ context.Context, name, _, _ string) error {
	return b.note("paused " + name)
}
func (b *box) Stop(_ context.Context, name, _ string) error { return b.note("stopped " + name) }
func (b *box) note(s string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.done = append(b.done, s)
	return nil
}
func (b *box) did() string { b.mu.Lock(); defer b.mu.Unlock(); return strings.Join(b.done, " ") }

// TestMarksOfTheDisk: what is done at each, and that each change is recorded.
func TestMarksOfTheDisk(t *testing.T) {
	t.Parallel()
	for policy, want := range map[WhenFull]string{LeaveKids: "", FreezeKids: "paused k", StopKids: "stopped k"} {
		b := newBed(t, 0)
		far := uint64(1) << 60
		kids := &box{}
		look := func(s Space) *Keeper {
			s.WhenFull = policy
			k, _ := b.keeper(func(c *Config) { c.Space = s })
			if k.look() == Act {
				k.act(t.Context(), kids)
			}
			return k
		}
		if k := look(Space{Warn: 1, Refuse: 1, Act: 1}); k.Room() != nil {
			t.Errorf("with plenty: %v", k.Room())
		}
		if k := look(Space{Warn: far, Refuse: 1, Act: 1}); k.Room() != nil || kids.did() != "" {
			t.Errorf("with a warning: %v", k.Room())
		}
		if k := look(Space{Warn: far, Refuse: far, Act: 1}); k.Room() == nil || kids.did() != "" {
			t.Errorf("nearly full: %v %s", k.Room(), kids.did())
		}
		if k := look(Space{Warn: far, Refuse: far, Act: far}); k.Room() == nil || kids.did() != want {
			t.Errorf("full: %v %s", k.Room(), kids.did())
		}
		must(t, b.own.Sync(t.Context()))
		var levels []string
		_, _, err := audit.Timeline(b.dir, func(r *audit.Record) bool {
			if r.Event == audit.EventSpace {
				levels = append(levels, r.Fields["level"])
			}
			return false
		})
		if err != nil || strings.Join(levels, " ") != "warning refuse act" {
			t.Errorf("%v %v", levels, err)
		}
	}
}
