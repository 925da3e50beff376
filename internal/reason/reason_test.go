package reason

import (
	"encoding/json"
	"regexp"
	"testing"
)

func TestWordsAreUniqueAndSurviveJSON(t *testing.T) {
	seen := map[string]Code{}
	for code, info := range All() {
		if prev, dup := seen[info.Word]; dup {
			t.Errorf("%d and %d share the word %s", prev, code, info.Word)
		}
		seen[info.Word] = code
		if !regexp.MustCompile(`^[a-z][a-z0-9-]*$`).MatchString(info.Word) || info.Text == "" {
			t.Errorf("code %d: word %q, text %q", code, info.Word, info.Text)
		}
		raw, err := json.Marshal(code)
		var back Code
		if err != nil || json.Unmarshal(raw, &back) != nil || back != code {
			t.Errorf("%s became %s and came back as %s", code, raw, back)
		}
	}
}

func TestUnknownIsNeverOK(t *testing.T) {
	var c Code
	if err := c.UnmarshalText([]byte("no such word")); err != nil || c != Internal {
		t.Fatalf("got %v, %v", c, err)
	}
	if Code(250).String() != "internal" {
		t.Fatal("an unknown number has a word of its own")
	}
}
