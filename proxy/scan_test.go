package proxy

import (
	"math/rand/v2"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"tagout/internal/tokenshape"
)

var oneEscape = regexp.MustCompile(`\\u00[0-7][0-9a-fA-F]|%[0-7][0-9a-fA-F]`)

// FuzzTokenScan: whatever pieces a text comes in, a token in it is found where one is there, as it is or as JSON and forms
// write it, and none where none is.
func FuzzTokenScan(f *testing.F) {
	for _, s := range []string{token, "a" + token + "b", `tgo\u005f` + token[4:], "%74%67o%5F" + token[4:], `\u0074\u0067` + token[2:], `\%` + token, `%%74go%5f` + token[4:], token[:20] + "x" + token[20:], `\u00zz` + token, `\u0\u0074go_` + token[4:]} {
		f.Add(s, uint64(len(s)))
	}
	f.Fuzz(func(t *testing.T, text string, seed uint64) {
		plain := oneEscape.ReplaceAllStringFunc(text, func(e string) string {
			n, err := strconv.ParseUint(e[len(e)-2:], 16, 8)
			if err != nil || n == 0 {
				return e
			}
			return string(rune(n))
		})
		want := tokenshape.First(text) != "" || tokenshape.First(plain) != ""
		s := tokenScan{escapes: &tokenScan{}}
		src := &bits{text, rand.New(rand.NewPCG(seed, 2))}
		found := ""
		buf := make([]byte, 16)
		for found == "" {
			n, err := src.Read(buf)
			if found = s.feed(buf[:n]); err != nil {
				break
			}
		}
		if (found != "") != want {
			t.Errorf("%q: found %q, want one: %t", text, found, want)
		}
	})
}

// TestLongStreamsAreScanned: a token anywhere in a long stream is found when it ends, and not before.
func TestLongStreamsAreScanned(t *testing.T) {
	r := rand.New(rand.NewPCG(9, 9))
	for range 300 {
		before := strings.Repeat("tgo_abc ", r.IntN(300))
		var s tokenScan
		src := &bits{before + token + strings.Repeat("x", 50), r}
		seen, buf := 0, make([]byte, 1+r.IntN(64))
		for {
			n, err := src.Read(buf)
			if err != nil {
				t.Fatalf("no token behind %d bytes", len(before))
			}
			got := s.feed(buf[:n])
			seen += n
			if got == "" {
				continue
			}
			if end := len(before) + len(token); got != token || seen < end || seen-n >= end {
				t.Fatalf("%q found after %d bytes, it ends at %d", got, seen, end)
			}
			break
		}
	}
}
