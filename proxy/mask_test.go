package proxy

import (
	"bytes"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"
)

// masked is what a mask has to make of a text: each byte of each occurrence of each value blanked.
func masked(text string, values [][]byte) string {
	out := []byte(text)
	for _, v := range values {
		for i := 0; i+len(v) <= len(text); i++ {
			if text[i:i+len(v)] == string(v) {
				copy(out[i:], strings.Repeat("*", len(v)))
			}
		}
	}
	return string(out)
}

// bits hands a text out in bits of random length.
type bits struct {
	rest string
	r    *rand.Rand
}

func (p *bits) Read(b []byte) (int, error) {
	if p.rest == "" {
		return 0, io.EOF
	}
	n := copy(b, p.rest[:min(len(p.rest), 1+p.r.IntN(9))])
	p.rest = p.rest[n:]
	return n, nil
}

// FuzzMask: whatever bits a text comes in, the mask blanks the same, and that is every secret in it.
func FuzzMask(f *testing.F) {
	f.Add("a secret-one and secret-two", "secret-one", "secret-two", uint64(1))
	f.Add("abcabcabcabd", "abcabd", "cabcab", uint64(2))
	f.Add("xdefghiabcz", "ghiabcz", "defghi", uint64(3))
	f.Add("aaaaaaaaaaaaaaaaa", "aaaaaa", "aaaaaaa", uint64(4))
	f.Add("c2VjcmV0LW9uZQ== 7365637265742d6f6e65", "secret-one", "one-se", uint64(5))
	f.Fuzz(func(t *testing.T, text, one, two string, seed uint64) {
		secrets := []secret{{"one", one}, {"two", two}}
		values := maskedForms(secrets)
		want := masked(text, values)
		for _, r := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text)), &bits{text, rand.New(rand.NewPCG(seed, 1))}} {
			var got bytes.Buffer
			m := newMask(secrets)
			if _, err := io.Copy(&got, readerFunc(func(p []byte) (int, error) { return m.read(r, p) })); err != nil {
				t.Fatal(err)
			}
			if got.String() != want {
				t.Errorf("%q became %q, want %q", text, got.String(), want)
			}
		}
		if got := newMask(secrets).text(text); got != want {
			t.Errorf("as a whole %q became %q, want %q", text, got, want)
		}
	})
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// TestMaskedTextMeetsSecrets makes texts out of the secrets' own parts, which random ones never are.
func TestMaskedTextMeetsSecrets(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	secrets := []secret{{"a", "abcabcab-key"}, {"b", "cab-key-abcabc"}, {"c", "-key-a/b+c\"d"}}
	var parts []string
	for _, s := range secrets {
		for _, form := range forms(s.value) {
			for range 3 {
				i := r.IntN(len(form))
				parts = append(parts, form[:i], form[i:], form)
			}
		}
	}
	for range 3000 {
		var text strings.Builder
		for range 1 + r.IntN(8) {
			text.WriteString(parts[r.IntN(len(parts))])
		}
		m, want := newMask(secrets), masked(text.String(), maskedForms(secrets))
		src := &bits{text.String(), r}
		got, err := io.ReadAll(readerFunc(func(p []byte) (int, error) { return m.read(src, p) }))
		if err != nil || string(got) != want {
			t.Fatalf("%q became %q, want %q (%v)", text.String(), got, want, err)
		}
	}
}
