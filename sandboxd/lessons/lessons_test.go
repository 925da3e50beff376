package lessons

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

var day = time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)

func lesson(session, purpose, text string) wire.Lesson {
	return wire.Lesson{
		Kid: "k1", Session: session, Card: "research", Purpose: purpose, Owner: "Ada", By: "uid:0", Created: day.Add(-time.Hour),
		Destroyed: day, State: wire.KidRunning, Reason: "done", Text: text,
	}
}

func open(t *testing.T) *Store {
	t.Helper()
	s, err := Open(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *Store) mustKeep(t *testing.T, l wire.Lesson, secrets ...string) string {
	t.Helper()
	name, err := s.Keep(l, secrets)
	if err != nil {
		t.Fatal(err)
	}
	return name
}

func TestKeepAndFind(t *testing.T) {
	s := open(t)
	first := s.mustKeep(t, lesson("s1", "try npm install", "The registry needs `npm.test`.\n\nAllow it."))
	later := lesson("s2", "compile", "Nothing.")
	later.Unused = []string{"idle_key"}
	later.Wide = []wire.WideSecret{{Secret: "vendor_api", Uses: 3, Hosts: []string{"a.test:443"}, OnlyMethod: "GET"}}
	later.Destroyed = day.Add(time.Hour)
	second := s.mustKeep(t, later)
	if first != "2026-03-04-try-npm-install.md" || second != "2026-03-04-compile.md" {
		t.Errorf("names %s, %s", first, second)
	}
	find := func(words ...string) string {
		list, err := s.List(words)
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, l := range list {
			names = append(names, l.Name+": "+l.Text)
		}
		return strings.Join(names, "; ")
	}
	const npm, compile = "2026-03-04-try-npm-install.md: The registry needs `npm.test`.", "2026-03-04-compile.md: Nothing."
	for _, c := range []struct {
		words []string
		want  string
	}{{nil, compile + "; " + npm}, {[]string{"ALLOW", "registry"}, npm}, {[]string{"allow", "nothing"}, ""}, {[]string{"s2"}, compile}} {
		if got := find(c.words...); got != c.want {
			t.Errorf("with %q: %s, want %s", c.words, got, c.want)
		}
	}
	if got, err := s.Get(second); err != nil || !slices.Equal(got.Unused, later.Unused) || len(got.Wide) != 1 || got.Wide[0].String() != later.Wide[0].String() {
		t.Errorf("what it was granted: %+v, %v", got, err)
	}
	got, err := s.Get(first)
	want := lesson("s1", "try npm install", "The registry needs `npm.test`.\n\nAllow it.")
	want.Name = first
	if err != nil || fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
		t.Errorf("read %+v, %v, want %+v", got, err, want)
	}
	for _, name := range []string{"2026-03-04-none.md", "../lock", "/etc/passwd", "", "2026-03-04-../x.md"} {
		if _, err := s.Get(name); !errors.Is(err, ErrNotFound) {
			t.Errorf("note %q: %v", name, err)
		}
	}
}

// Whatever a purpose is, the note lies in the directory, under a name that no shell and no file system minds.
func TestHostilePurposes(t *testing.T) {
	s := open(t)
	for i, c := range []struct{ purpose, want string }{
		{"../../../etc/cron.d/x", "etc-cron-d-x"}, {"/etc/passwd", "etc-passwd"}, {".", "kid"}, {"..", "kid"}, {"", "kid"}, {"日本語", "kid"},
		{"a\x00b", "a-b"}, {"-rf *", "rf"}, {"$(reboot); `id`", "reboot-id"}, {"x\n---\nkid: \"other\"\n---\n", "x-kid-other"}, {"CON", "con"},
		{strings.Repeat("long ", 5000), strings.TrimSuffix(strings.Repeat("long-", 9)+"lon", "-")}, {"\x1b[2J\u202egpj.exe", "2j-gpj-exe"}, {"\xff\xfe", "kid"},
	} {
		name := s.mustKeep(t, lesson(fmt.Sprint("s", i), c.purpose, "text"))
		name = strings.TrimSuffix(strings.TrimPrefix(name, "2026-03-04-"), ".md")
		if base, n, ok := strings.Cut(name, "kid-"); ok && base == "" && n != "" {
			name = "kid" // of some that have the same name
		}
		if name != c.want {
			t.Errorf("purpose %q: %s, want %s", c.purpose, name, c.want)
		}
	}
	all, err := s.List(nil)
	if err != nil || len(all) != 14 {
		t.Errorf("%d notes, %v", len(all), err)
	}
	for _, l := range all {
		if l.Kid != "k1" || strings.ContainsAny(l.Purpose, "\x1b\n\x00\u202e") || len(l.Purpose) > maxField+3 {
			t.Errorf("a note says kid %q, purpose %q", l.Kid, l.Purpose)
		}
	}
	entries, err := os.ReadDir(s.path)
	if err != nil || len(entries) != 14 {
		t.Errorf("%d files, %v", len(entries), err)
	}
	above, err := os.ReadDir(filepath.Dir(filepath.Dir(s.path)))
	if err != nil || len(above) != 1 {
		t.Errorf("beside the directory: %v, %v", above, err)
	}
}

const (
	fakeToken = "tgo_abcdefghijklmnopqrstuvwxyz234567"
	value     = "correct horse battery"
	keyBody   = "MC4CAQAwBQYDK2VwBCIEIAAB"
	pemKey    = "-----BEGIN PRIVATE KEY-----\n" + keyBody + "\n-----END PRIVATE KEY-----"
)

// A note has no secret, neither one of the kid's nor one that looks like it; control: the same without the redaction has.
func TestRedacted(t *testing.T) {
	l := lesson("s1", "use "+fakeToken, "Call it with password=hunter2hunter2 and "+value+".\n\n"+pemKey+"\nEnd.")
	l.Reason, l.Cause, l.Owner = "AKIA"+"ABCDEFGHIJKLMNOP leaked", value, "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
	secrets := []string{value, fakeToken, "hunter2hunter2", "AKIAABCDEFGHIJKLMNOP", l.Owner, keyBody}
	plain := render(&l)
	s := open(t)
	raw, err := s.read(s.mustKeep(t, l, value))
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range secrets {
		if !strings.Contains(plain, secret) {
			t.Errorf("control: not even unredacted there is %q in the note", secret)
		}
		if strings.Contains(raw, secret) {
			t.Errorf("%q is in the note:\n%s", secret, raw)
		}
	}
	if n := strings.Count(raw, audit.Redacted); n != 7 { // the purpose's too; the file's name has no place for it
		t.Errorf("redacted %d times:\n%s", n, raw)
	}
	// Of a secret that a bound cuts through, no part is left.
	long := lesson("s2", strings.Repeat("x", maxField-10)+" "+fakeToken, "text")
	if raw, err = s.read(s.mustKeep(t, long)); err != nil || strings.Contains(raw, "tgo_") || !strings.Contains(raw, "xxx [red") {
		t.Errorf("the beginning of a secret is in the note, %v", err)
	}
}

func TestBounds(t *testing.T) {
	s := open(t)
	for _, text := range []string{"", " \n\t ", strings.Repeat("x", wire.MaxLesson+1)} {
		if _, err := s.Keep(lesson("s", "p", text), nil); !errors.Is(err, ErrInvalid) {
			t.Errorf("a text of %d bytes: %v", len(text), err)
		}
	}
	// The largest that there can be is read again.
	worst := lesson("s1", "p", strings.Repeat(`"`, wire.MaxLesson))
	for _, f := range fields(&worst) {
		*f = strings.Repeat(`"\`, maxField)
	}
	worst.Purpose = "p"
	var records []audit.Record
	for i := range maxDenied + 5 {
		for range 2 {
			records = append(records, audit.Record{Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed, Count: 1 << 62,
				Dst: &audit.Dst{Name: fmt.Sprint(i) + strings.Repeat(`"`, 300), Port: 65535}})
		}
	}
	worst.Denied, worst.DeniedMore = denied(records)
	if len(worst.Denied) != maxDenied || worst.DeniedMore != 5 || worst.Denied[0].Count != 1<<63 {
		t.Errorf("%d places, %d more, the first %d times", len(worst.Denied), worst.DeniedMore, worst.Denied[0].Count)
	}
	name := s.mustKeep(t, worst)
	if info, err := os.Stat(filepath.Join(s.path, name)); err != nil || info.Size() > maxFile || info.Mode().Perm() != 0o600 {
		t.Errorf("its file: %+v, %v", info, err)
	}
	if l, err := s.Get(name); err != nil || len(l.Text) != wire.MaxLesson || len(l.Denied) != maxDenied {
		t.Errorf("read again: %v", err)
	}
	for i := 2; i <= maxSame; i++ {
		s.mustKeep(t, lesson(fmt.Sprint("t", i), "p", "text"))
	}
	if _, err := s.Keep(lesson("last", "p", "text"), nil); !errors.Is(err, ErrFull) {
		t.Errorf("one more of the same day and purpose: %v", err)
	}
	if again := s.mustKeep(t, lesson("t7", "p", "other")); again != "2026-03-04-p-7.md" {
		t.Errorf("a session's second note is %s", again)
	}
	if l, err := s.Get("2026-03-04-p-7.md"); err != nil || l.Text != "text" {
		t.Errorf("a note was written over: %q, %v", l.Text, err)
	}
	for i := range MaxNotes - maxSame - 1 { // the last as a file that is no note
		if err := os.Link(filepath.Join(s.path, name), filepath.Join(s.path, fmt.Sprintf("2026-03-04-l%d.md", i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(s.path, "2026-03-04-torn.md"), []byte("---\nkid: "), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Keep(lesson("full", "q", "text"), nil); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), s.path) {
		t.Errorf("one more than there may be: %v", err)
	}
}

// What is in the directory and is no note is not followed, not waited for and not believed.
func TestForeignFiles(t *testing.T) {
	s := open(t)
	real := s.mustKeep(t, lesson("s1", "p", "text"))
	outside := filepath.Join(t.TempDir(), "secret")
	raw, err := s.read(real)
	if err != nil {
		t.Fatal(err)
	}
	at := func(name string) string { return filepath.Join(s.path, name) }
	err = errors.Join(os.WriteFile(outside, []byte(raw), 0o600), os.Symlink(outside, at("2026-03-04-link.md")), unix.Mkfifo(at("2026-03-04-fifo.md"), 0o600),
		os.Mkdir(at("2026-03-04-dir.md"), 0o700), os.WriteFile(at("2026-03-04-big.md"), []byte(raw+strings.Repeat("x", maxFile)), 0o600),
		os.WriteFile(at("2026-03-04-twice.md"), []byte(strings.Replace(raw, "---\n", "---\nkid: \"a\"\n", 1)), 0o600), os.WriteFile(at("README"), []byte(raw), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	if all, err := s.List(nil); err != nil || len(all) != 1 || all[0].Name != real {
		t.Errorf("listed %+v, %v", all, err)
	}
	for _, name := range []string{"link", "fifo", "dir", "big", "twice"} {
		if l, err := s.Get("2026-03-04-" + name + ".md"); err == nil {
			t.Errorf("%s is read as %+v", name, l)
		}
	}
	state := t.TempDir()
	if err := os.Symlink(t.TempDir(), filepath.Join(state, "learned")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(state, ""); err == nil {
		t.Error("a link was followed to the directory")
	}
}

// A kill while a note is written leaves all of it or nothing, and the next Open clears away the rest.
func TestKilledWhileWriting(t *testing.T) {
	killed := errors.New("killed")
	for step, want := range map[string]int{"written": 0, "linked": 1} {
		state := t.TempDir()
		s, err := Open(state, "")
		if err != nil {
			t.Fatal(err)
		}
		s.fault = func(at string) error {
			if at != step {
				return nil
			}
			// As a kill leaves it: the deferred removal is not run.
			entries, err := os.ReadDir(s.path)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if strings.HasPrefix(e.Name(), newPrefix) {
					if err := os.Link(filepath.Join(s.path, e.Name()), filepath.Join(s.path, newPrefix+"left")); err != nil {
						t.Fatal(err)
					}
				}
			}
			return killed
		}
		if _, err := s.Keep(lesson("s1", "p", "text"), nil); !errors.Is(err, killed) {
			t.Fatal(err)
		}
		if _, err := os.Stat(filepath.Join(s.path, newPrefix+"left")); err != nil {
			t.Fatalf("nothing was left, this shows nothing: %v", err)
		}
		if s, err = Open(state, ""); err != nil {
			t.Fatal(err)
		}
		all, err := s.List(nil)
		entries, _ := os.ReadDir(s.path) // would be seen in err
		if err != nil || len(all) != want || len(entries) != want {
			t.Errorf("after a kill when it was %s: %d notes, %v, %v", step, len(all), entries, err)
		}
		if name := s.mustKeep(t, lesson("s1", "p", "text")); name != "2026-03-04-p.md" {
			t.Errorf("kept again as %s", name)
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	s := open(t)
	const n = 20
	names := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { names[i], _ = s.Keep(lesson(fmt.Sprint("s", i), "same", "text"), nil) }) // "" is seen below
	}
	wg.Wait()
	slices.Sort(names)
	if names[0] == "" || len(slices.Compact(names)) != n {
		t.Errorf("names: %v", names)
	}
}

// What the kid was refused is in the note, from its own session alone.
func TestDenied(t *testing.T) {
	state := t.TempDir()
	logs := filepath.Join(state, "audit")
	if err := os.MkdirAll(filepath.Join(logs, "proxy"), 0o700); err != nil {
		t.Fatal(err)
	}
	log, err := audit.Open(filepath.Join(logs, "proxy", "proxy.jsonl"), "test", "proxy")
	if err != nil {
		t.Fatal(err)
	}
	refused := func(session, name string) {
		log.Log(audit.Record{Event: audit.EventConnectDenied, Session: session, Kid: "k1", Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed, Dst: &audit.Dst{Name: name, Port: 443}})
	}
	refused("s1", "evil.test")
	refused("s1", "evil.test")
	refused("s0", "other.test")
	log.Log(audit.Record{Event: audit.EventConnectDenied, Session: "s1", Kid: "k1", Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed, Dst: &audit.Dst{Addr: netip.MustParseAddr("203.0.113.9"), Port: 22}})
	log.Log(audit.Record{Event: audit.EventConnOpened, Session: "s1", Kid: "k1", Outcome: audit.OutcomeAllow, Dst: &audit.Dst{Name: "good.test", Port: 443}})
	if err := log.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := Open(state, logs)
	if err != nil {
		t.Fatal(err)
	}
	l, err := s.Get(s.mustKeep(t, lesson("s1", "p", "text")))
	if err != nil || fmt.Sprint(l.Denied) != "[{evil.test:443 name-not-allowed 2} {203.0.113.9:22 name-not-allowed 1}]" {
		t.Errorf("refused: %v, %v", l.Denied, err)
	}
}
