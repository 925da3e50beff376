package tokenshape

import (
	"regexp"
	"strings"
	"testing"
)

const token = "tgo_abcdefghijklmnopqrstuvwxyz234567"

var byExpression = regexp.MustCompile(`(?i)tgo_[a-z2-7]{32}`)

// FuzzNext: every token is found, and nothing else, as a regular expression has it.
func FuzzNext(f *testing.F) {
	for _, s := range []string{"", "tgo_", token, "x" + token, strings.ToUpper(token), token[:35], token + token, "tgo_" + token, "tgo_abcdefghijklmnopqrstuvwxyz23456\u0131", "_____" + token, "tgo_abcdefghijklmnopqrstuvwxyz 34567"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		// Case folding takes letters beyond ASCII for some of these; none of them is in a token.
		want := -1
		for from := 0; ; from++ {
			at := byExpression.FindStringIndex(s[from:])
			if at == nil {
				break
			}
			if from += at[0]; at[1]-at[0] == Len {
				want = from
				break
			}
		}
		if got := Next(s, 0); got != want {
			t.Errorf("Next(%q) = %d, want %d", s, got, want)
		}
		if got := Next([]byte(s), 0); got != want {
			t.Errorf("Next of bytes %q = %d, want %d", s, got, want)
		}
	})
}

func TestFirst(t *testing.T) {
	if got := First("a " + strings.ToUpper(token) + " b"); got != token {
		t.Errorf("got %q", got)
	}
	if got := First([]byte("none")); got != "" {
		t.Errorf("got %q", got)
	}
	if Next(token+token, 1) != Len || Next(token, 1) != -1 {
		t.Error("the second token is not found")
	}
}
