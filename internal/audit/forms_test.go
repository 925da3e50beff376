package audit

import (
	"bytes"
	"encoding/base32"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// ways are encodings as they come up in the wild, around a value.
var ways = map[string]func(before, v, after string) string{
	"clear":         func(b, v, a string) string { return b + v + a },
	"query":         func(b, v, a string) string { return url.QueryEscape(b + v + a) },
	"query twice":   func(b, v, a string) string { return url.QueryEscape(url.QueryEscape(b + v + a)) },
	"path":          func(b, v, a string) string { return url.PathEscape(b + v + a) },
	"percent":       func(b, v, a string) string { return lowerEscapes(url.QueryEscape(b + v + a)) },
	"all percent":   func(b, v, a string) string { return each([]byte(b+v+a), "%", "") },
	"hex":           func(b, v, a string) string { return hex.EncodeToString([]byte(b + v + a)) },
	"HEX":           func(b, v, a string) string { return strings.ToUpper(hex.EncodeToString([]byte(b + v + a))) },
	"a dump":        func(b, v, a string) string { return each([]byte(b+v+a), "", " ") },
	"escapes":       func(b, v, a string) string { return each([]byte(b+v+a), `\x`, "") },
	"base64":        func(b, v, a string) string { return base64.StdEncoding.EncodeToString([]byte(b + v + a)) },
	"base64url":     func(b, v, a string) string { return base64.RawURLEncoding.EncodeToString([]byte(b + v + a)) },
	"base32":        func(b, v, a string) string { return base32.StdEncoding.EncodeToString([]byte(b + v + a)) },
	"JSON":          func(b, v, a string) string { return inJSON(b + v + a) },
	"JSON quoted":   func(b, v, a string) string { return inQuotes(inJSON(b + v + a)) },
	"quoted":        func(b, v, a string) string { return inQuotes(b + v + a) },
	"quoted twice":  func(b, v, a string) string { return inQuotes(inQuotes(b + v + a)) },
	"shown":         func(b, v, a string) string { return Shown(b + v + a) },
	"in a line":     func(b, v, a string) string { return Line([]string{b, v, a}) },
	"basic's value": func(b, v, a string) string { return base64.StdEncoding.EncodeToString([]byte("user" + b + ":" + v)) },
}

// secretValue is one of many kinds.
func secretValue(r *rand.Rand) string {
	alphabets := []string{"abcdefghijklmnopqrstuvwxyz0123456789", "ABCxyz019+/=&%?#\"'\\<>{}", "äßж✓ab12\"\\\n\t"}
	alphabet := []rune(alphabets[r.IntN(len(alphabets))])
	out := make([]rune, 8+r.IntN(40))
	for i := range out {
		out[i] = alphabet[r.IntN(len(alphabet))]
	}
	return string(out)
}

// leftOf says whether a record's line still gives the value away: it, or what stands for it in the encoding.
func leftOf(line []byte, encoded string) bool {
	return bytes.Contains(line, []byte(encoded)) || bytes.Contains(line, []byte(inJSON(encoded)))
}

// TestNoEncodingOfASecretReachesTheFile: whatever stands around it, in whatever field, whoever of the daemons knows it, and
// wherever a long text is cut. Without the knowledge the same texts do reach it.
func TestNoEncodingOfASecretReachesTheFile(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for _, who := range []string{"known", "recognised", "nobody"} {
		dir := t.TempDir()
		path := filepath.Join(dir, "x.jsonl")
		l, err := Open(path, "test", "x")
		if err != nil {
			t.Fatal(err)
		}
		p, err := NewPrints(saving(filepath.Join(dir, "prints")), func(err error) { t.Error(err) })
		if err != nil {
			t.Fatal(err)
		}
		l.FollowPrints(filepath.Join(dir, "prints"), func(err error) { t.Error(err) })
		var want []string // what must not be found
		for n := range 24 {
			v := secretValue(r)
			switch who {
			case "known":
				l.AddSecret(v)
			case "recognised":
				p.Add(v)
				waitPrints(t, l, v)
			}
			for name, way := range ways {
				before, after := strings.Repeat("b", r.IntN(6)), strings.Repeat("a", r.IntN(6))
				text := way(before, v, after)
				if n%6 == 0 { // the cut falls somewhere into it
					text = strings.Repeat("x ", (maxText-r.IntN(len(text)+1))/2) + text + " end"
				}
				want = append(want, way("", v, ""))
				l.Log(Record{Event: EventRequest, Detail: text, Process: &Process{Exe: text}, Dst: &Dst{Name: text}, Fields: map[string]string{name: text}})
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		found := 0
		for _, encoded := range want {
			if leftOf(raw, encoded) {
				if found++; found < 5 && who != "nobody" {
					t.Errorf("%s: %q is in the log", who, encoded)
				}
			}
		}
		if who == "nobody" && found < len(want)/2 {
			t.Errorf("only %d of %d are found where nothing is redacted: the test shows nothing", found, len(want))
		}
	}
}

// waitPrints waits until the logger recognises a value.
func waitPrints(t *testing.T, l *Logger, v string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for l.redact.text(v) == v {
		if time.Now().After(deadline) {
			t.Fatal("the value is not recognised")
		}
		time.Sleep(time.Millisecond) // between looks
	}
}

// saving writes a file whole, at path.
func saving(path string) func([]byte) error {
	return func(raw []byte) error {
		if err := os.WriteFile(path+".new", raw, 0o600); err != nil {
			return err
		}
		return os.Rename(path+".new", path)
	}
}

// waitFile waits until there is something in the file.
func waitFile(t testing.TB, path string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		if use, err := readPrints(path); err == nil && len(use.byHead) > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the file is not written")
		}
		time.Sleep(time.Millisecond) // between looks
	}
}

// The file gives away no value, and nothing that hashes to it without the key that is in it.
func TestPrintsHoldNoValue(t *testing.T) {
	path := filepath.Join(t.TempDir(), "prints")
	p, err := NewPrints(saving(path), nil)
	if err != nil {
		t.Fatal(err)
	}
	const value = "correct horse battery staple"
	p.Add(value)
	p.Add(value)
	p.Add("tiny")
	waitFile(t, path)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range forms(value) {
		if bytes.Contains(raw, []byte(f)) {
			t.Errorf("%q is in it", f)
		}
	}
	var f printsFile
	if err := json.Unmarshal(raw, &f); err != nil || len(f.Prints) != len(forms(value)) {
		t.Errorf("%d lines, %v", len(f.Prints), err)
	}
	for _, bad := range []string{"", "{}", `{"version":1,"key":"AA=="}`, `{"version":1,"key":"` + strings.Repeat("A", 43) + `=","prints":[{"n":1}]}`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readPrints(path); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
}

// A long text is cut after it was redacted, and its length and hash are kept.
func TestLongTextsAreCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	l, err := Open(path, "test", "x")
	if err != nil {
		t.Fatal(err)
	}
	l.SetScan(func(s string) string { return strings.ReplaceAll(s, "KEY", Redacted) })
	l.SetCards(func(session, kid string) string { return "card of " + session })
	long := strings.Repeat("word ", 10000) + "KEY"
	l.Log(Record{Event: EventRequest, Session: "s", Detail: long, Fields: map[string]string{"a": long, "b": "KEY", "word": strings.Repeat("ж", 9000)}})
	l.Log(Record{Event: EventRequest, Session: "s", CardSHA256: "its own"})
	l.Close()
	got := readAll(t, path)
	f := got[0].Fields
	if len(f["a"]) > maxText+10 || f["a_bytes"] != strconv.Itoa(len(long)-3+len(Redacted)) || len(f["a_sha256"]) != 64 || f["b"] != Redacted || !strings.HasSuffix(f["a"], "word"+cutMark) {
		t.Errorf("got %s, %s, %s", f["a_bytes"], f["a_sha256"], f["b"])
	}
	if len(got[0].Detail) > maxText+10 || strings.Contains(f["word"], "\ufffd") {
		t.Error("cut badly")
	}
	if got[0].CardSHA256 != "card of s" || got[1].CardSHA256 != "its own" {
		t.Errorf("cards %q, %q", got[0].CardSHA256, got[1].CardSHA256)
	}
}

// Of a value that goes on where another ends nothing is left.
func TestValuesThatBeginAlike(t *testing.T) {
	r := newRedactor()
	for _, v := range []string{"a value of number 5", "a value of number 51", "a value of number 516"} {
		r.add(v)
	}
	if got := r.text("<a value of number 516> <a value of number 5>"); got != "<"+Redacted+"> <"+Redacted+">" {
		t.Errorf("got %q", got)
	}
}

func TestTheWordInWhichATextIsCutGoes(t *testing.T) {
	long := strings.Repeat("x", 2*longWord)
	for in, want := range map[string]string{"": "…", "s3cret": "…", "a s3cr": "a…", "a\"s3": "a…", long: long[:longWord] + "…", "ab " + long: ("ab " + long)[:longWord+1] + "…"} {
		if got := WithoutLastWord(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
}

func BenchmarkPrints(b *testing.B) {
	path := filepath.Join(b.TempDir(), "prints")
	p, err := NewPrints(saving(path), nil)
	if err != nil {
		b.Fatal(err)
	}
	for i := range 50 {
		p.Add(fmt.Sprint("a secret value of number ", i))
	}
	waitFile(b, path)
	use, err := readPrints(path)
	if err != nil {
		b.Fatal(err)
	}
	const line = "looking up evil.test: no rule names it"
	b.SetBytes(int64(len(line)))
	for b.Loop() {
		use.text(line)
	}
}

// TestASecretThatIsDropped: what is worth nothing any more is recognised no more, and the others still are.
func TestASecretThatIsDropped(t *testing.T) {
	path := filepath.Join(t.TempDir(), "prints")
	p, err := NewPrints(saving(path), nil)
	if err != nil {
		t.Fatal(err)
	}
	const dead, alive = "a lease that is revoked", "a lease that is not"
	p.Add(dead)
	p.Add(alive)
	waitFile(t, path)
	p.Remove(dead)
	p.Remove(dead)
	deadline := time.Now().Add(10 * time.Second)
	for {
		use, err := readPrints(path)
		if err == nil && use.text(dead) == dead && use.text(alive) == Redacted {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the file still has it: %v", err)
		}
		time.Sleep(time.Millisecond) // between looks
	}
	r := newRedactor()
	r.add(dead)
	r.add(alive)
	r.text("so that both are known")
	r.drop(dead)
	if r.text(dead) != dead || r.text(alive) != Redacted {
		t.Errorf("%q %q", r.text(dead), r.text(alive))
	}
}
