package leaks

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"unicode/utf16"
)

// Keys that open nothing, put together so that no scanner finds them in this file.
var (
	awsKey    = "AKIA" + "QWERTYUIOPASDFGH"
	githubKey = "ghp_" + "abcdEFGHijklMNOPqrstUVWX012345678901"
	openaiKey = "sk-proj-" + strings.Repeat("aZ3kQ9xW", 9) + "gh" + "T3Blbk" + "FJ" + strings.Repeat("bY4mR8vT", 9) + "ij"
	pemKey    = "-----BEGIN " + "PRIVATE KEY-----\n" + strings.Repeat("MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg\n", 8) + "-----END PRIVATE KEY-----"
)

var shared = sync.OnceValues(New)

func detector(t testing.TB) *Detector {
	t.Helper()
	d, err := shared()
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestFindsKeysWhereTheyStand(t *testing.T) {
	d := detector(t)
	for rule, key := range map[string]string{"aws-access-token": awsKey, "github-pat": githubKey, "openai-api-key": openaiKey, "private-key": pemKey} {
		for _, around := range [][2]string{{"", ""}, {"KEY=", "\n"}, {"one\ntwo: \"", "\"\nthree\n"}, {"\n\n", ""}} {
			text := around[0] + key + around[1]
			got := d.Find(text)
			if len(got) != 1 || got[0].Rule != rule {
				t.Errorf("%s in %q…: %+v", rule, around[0], got)
				continue
			}
			if found := text[got[0].Start:got[0].End]; found != key || got[0].Line != strings.Count(around[0], "\n")+1 {
				t.Errorf("%s in %q…: line %d, offsets %d to %d of %d", rule, around[0], got[0].Line, got[0].Start, got[0].End, len(text))
			}
			if s := fmt.Sprintf("%+v %#v", got, got); strings.Contains(s, key[:12]) {
				t.Errorf("a finding of %s quotes it", rule)
			}
		}
	}
}

func TestEveryRepetitionIsAFinding(t *testing.T) {
	text := "a=" + githubKey + "\nb=" + githubKey + " " + githubKey
	got := detector(t).Find(text)
	if len(got) != 3 || got[0].Line != 1 || got[2].Line != 2 {
		t.Fatalf("%+v", got)
	}
	for _, f := range got {
		if text[f.Start:f.End] != githubKey {
			t.Errorf("%+v is another text", f)
		}
	}
}

func TestFindsWhatIsEncoded(t *testing.T) {
	encoded := base64.StdEncoding.EncodeToString([]byte("github_token = " + githubKey))
	text := "first\nconfig: " + encoded + "\n"
	got := detector(t).Find(text)
	if len(got) != 1 || got[0].Line != 2 || !strings.Contains(encoded, text[got[0].Start:got[0].End]) || got[0].End-got[0].Start < 40 {
		t.Fatalf("%+v", got)
	}
}

// TestNothingThatIsDecodedIsPassedOver: what gitleaks finds by decoding, Find finds.
func TestNothingThatIsDecodedIsPassedOver(t *testing.T) {
	d := detector(t)
	escaped := ""
	for _, c := range githubKey {
		escaped += fmt.Sprintf("\\u%04x", c)
	}
	for _, plain := range []string{githubKey, "k=" + githubKey, "{\"aws\":\"" + awsKey + " \"}"} {
		for name, encoded := range map[string]string{
			"base64": base64.StdEncoding.EncodeToString([]byte(plain)), "base64url": base64.RawURLEncoding.EncodeToString([]byte(plain)),
			"hex": hex.EncodeToString([]byte(plain)), "percent": url.QueryEscape(strings.ReplaceAll(plain, "_", "%5F")),
			"twice": base64.StdEncoding.EncodeToString([]byte(base64.StdEncoding.EncodeToString([]byte(plain)))), "unicode": escaped,
		} {
			text := "x = \"" + encoded + "\""
			if len(d.decoding.DetectString(text)) > 0 && len(d.Find(text)) == 0 {
				t.Errorf("%s of %d characters is passed over", name, len(plain))
			}
			if len(d.Find(text)) == 0 && name != "percent" {
				t.Errorf("%s of %d characters is not found", name, len(plain))
			}
		}
	}
}

func TestNothingInTheTextSwitchesTheSearchOff(t *testing.T) {
	if got := detector(t).Find(githubKey + " # gitleaks" + ":allow"); len(got) != 1 {
		t.Errorf("%+v", got)
	}
}

func TestPlaceholdersAndCommonTextAreNoKeys(t *testing.T) {
	d := detector(t)
	for _, text := range []string{
		"", "OPENAI_API_KEY=tgo_k3jd7sh2kq5w7x4m2n6b3v5c7z2a4s6d", "API_KEY=${API_KEY}", "PATH=/usr/bin:/bin", "the secret of the api key is that there is none",
	} {
		if got := d.Find(text); len(got) != 0 {
			t.Errorf("%q: %+v", text, got)
		}
	}
	// What only begins like a placeholder is none.
	if got := d.Find("OPENAI_API_KEY=tgo_k3jd7sh2kq5w7x4m2n6b3v5c7z2a4s6dQ9Zx"); len(got) != 1 {
		t.Errorf("%+v", got)
	}
}

func TestReadFindsKeysOnBothSidesOfAWindow(t *testing.T) {
	d := detector(t)
	filler := strings.Repeat("nothing to see in this line\n", 2*readBlock/28)
	for _, key := range []string{awsKey, pemKey} {
		for at := readBlock - len(key) - 3; at < readBlock+3; at += max(1, len(key)/3) {
			text := filler[:at] + " " + key + " " + filler[at:]
			got, err := d.Read(strings.NewReader(text))
			if err != nil || len(got) != 1 {
				t.Fatalf("at %d: %+v, %v", at, got, err)
			}
			if text[got[0].Start:got[0].End] != key || got[0].Line != strings.Count(text[:got[0].Start], "\n")+1 {
				t.Errorf("at %d: %+v", at, got[0])
			}
		}
	}
}

// TestNoKeyIsLostBetweenWindows puts keys at every place of texts with and without lines.
func TestNoKeyIsLostBetweenWindows(t *testing.T) {
	d := detector(t)
	for name, filler := range map[string]string{
		"lines": strings.Repeat("nothing to see\n", 2*window/15), "words": strings.Repeat("nothing to see ", 2*window/15), "one word": strings.Repeat("~", 2*window),
	} {
		for _, key := range []string{githubKey, pemKey} {
			for at := window/2 - len(key); at < window+len(key); at += 397 {
				text := filler[:at] + "\"" + key + "\"" + filler[at:]
				if got := d.Find(text); len(got) != 1 || text[got[0].Start:got[0].End] != key {
					t.Fatalf("%s, at %d: %+v", name, at, got)
				}
			}
		}
	}
}

// TestGuardHandsNothingOnBeforeItWasSearched: what a key's reader gets ends before the key, wherever that stands, and what
// holds none comes whole.
func TestGuardHandsNothingOnBeforeItWasSearched(t *testing.T) {
	d := detector(t)
	filler := strings.Repeat("nothing to see in this line\n", 3*readBlock/28)
	for _, at := range []int{0, 1, readBlock - block - 20, readBlock - 20, readBlock, 2 * readBlock, len(filler)} {
		text := filler[:at] + " " + githubKey + " " + filler[at:]
		got, err := io.ReadAll(d.Guard(iotest.HalfReader(strings.NewReader(text)), nil))
		var found *Found
		if !errors.As(err, &found) || found.Start != at+1 || found.Rule != "github-pat" || strings.Contains(err.Error(), githubKey[:8]) {
			t.Fatalf("at %d: %v", at, err)
		}
		if len(got) > at || !strings.HasPrefix(text, string(got)) {
			t.Errorf("at %d: %d bytes were handed on", at, len(got))
		}
		asked := 0
		got, err = io.ReadAll(d.Guard(iotest.OneByteReader(strings.NewReader(text)), func(f Finding) bool { asked++; return f.Rule == "github-pat" }))
		if err != nil || string(got) != text || asked != 1 {
			t.Errorf("at %d, let pass: %d of %d bytes, asked %d times, %v", at, len(got), len(text), asked, err)
		}
	}
	for _, n := range []int{0, 1, block, readBlock - 1, readBlock, readBlock + 1, len(filler)} {
		if got, err := io.ReadAll(d.Guard(strings.NewReader(filler[:n]), nil)); err != nil || string(got) != filler[:n] {
			t.Errorf("%d bytes: %d came, %v", n, len(got), err)
		}
	}
}

// TestAFileIsSearchedOnce: what is known to hold no key is not searched again, and only the very same content is known.
func TestAFileIsSearchedOnce(t *testing.T) {
	d, err := New()
	if err != nil {
		t.Fatal(err)
	}
	read := func(text string, pass func(Finding) bool) (string, error) {
		r, err := d.GuardFile(strings.NewReader(text), pass)
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		return string(got), err
	}
	for range 2 {
		if got, err := read("nothing here", nil); got != "nothing here" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		if _, err := read("k="+githubKey, nil); !errors.As(err, new(*Found)) {
			t.Errorf("a key: %v", err)
		}
	}
	if got, err := read("k="+githubKey, func(Finding) bool { return true }); err != nil || got != "k="+githubKey {
		t.Errorf("let pass: %q, %v", got, err)
	}
	if _, err := read("k="+githubKey, nil); !errors.As(err, new(*Found)) {
		t.Errorf("what was let pass once is known: %v", err)
	}
	if len(d.known.sums) != 1 {
		t.Errorf("%d files are known", len(d.known.sums))
	}
	// Changed between the look and the copy.
	f := &changing{Reader: strings.NewReader("nothing here"), then: "k=" + githubKey}
	r, err := d.GuardFile(f, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); !errors.Is(err, errChanged) {
		t.Errorf("a file that changed: %v", err)
	}
}

// changing is a file that holds something else once it was read.
type changing struct {
	*strings.Reader
	then string
}

func (c *changing) Seek(int64, int) (int64, error) {
	c.Reader = strings.NewReader(c.then)
	return 0, nil
}

// TestKeysInUTF16: files that were saved on Windows.
func TestKeysInUTF16(t *testing.T) {
	for name, order := range map[string]binary.AppendByteOrder{"little": binary.LittleEndian, "big": binary.BigEndian} {
		raw := order.AppendUint16(nil, 0xfeff)
		for _, c := range utf16.Encode([]rune(strings.Repeat("nothing\n", readBlock/10) + "KEY=" + githubKey + "\r\n")) {
			raw = order.AppendUint16(raw, c)
		}
		got, err := detector(t).Read(bytes.NewReader(raw))
		if err != nil || len(got) != 1 || got[0].Rule != "github-pat" || got[0].Line != readBlock/10+1 {
			t.Errorf("%s endian: %+v, %v", name, got, err)
		}
	}
}

func TestReadEndsOnErrors(t *testing.T) {
	if _, err := detector(t).Read(brokenReader{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }

func TestManyAtOnce(t *testing.T) {
	d := detector(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				if got := d.Find("x=" + githubKey); len(got) != 1 {
					t.Errorf("%+v", got)
					return
				}
			}
		})
	}
	wg.Wait()
}

var placeholders = regexp.MustCompile(`tgo_`)

func FuzzFind(f *testing.F) {
	d := detector(f)
	f.Add("a=" + githubKey + "\n")
	f.Add("\n\n\r\n" + base64.StdEncoding.EncodeToString([]byte(awsKey+awsKey)))
	f.Add("\xff\x00" + pemKey)
	f.Fuzz(func(t *testing.T, text string) {
		if !strings.Contains(text, "\n") && len(d.decoding.DetectString(text)) > 0 && len(d.Find(text)) == 0 && len(placeholders.FindString(text)) == 0 {
			t.Fatalf("something in %q is passed over", text)
		}
		for _, g := range d.Find(text) {
			if g.Start < 0 || g.End < g.Start || g.End > len(text) || g.Line < 1 || g.Line > strings.Count(text, "\n")+1 || g.Rule == "" {
				t.Fatalf("%+v of %d bytes", g, len(text))
			}
		}
	})
}

func BenchmarkNew(b *testing.B) {
	for b.Loop() {
		if _, err := New(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkFind(b *testing.B) {
	d := detector(b)
	for name, text := range map[string]string{
		"variable": "PATH=/usr/local/bin:/usr/bin:/bin",
		"log-line": `{"event":"conn.end","token_id":"0123456789ab","secret":"vendor_api","dst":{"name":"api.vendor.test:443"},"bytes":4711}`,
		"words":    strings.Repeat("the quick brown fox jumps over the lazy dog\n", 2000),
		"keywords": strings.Repeat("the api key token of a secret password client\n", 2000),
	} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				d.Find(text)
			}
		})
	}
}
