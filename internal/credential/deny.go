package credential

import (
	"bytes"
	"path"
	"strings"
	"unicode"

	"golang.org/x/text/unicode/norm"
)

// denied says whether what is called name can never be minted, however it is spelled.
func (s *Service) denied(name string) bool {
	for _, spelled := range []string{strings.ToLower(name), fold(name)} {
		for _, pattern := range s.deny {
			if ok, err := path.Match(pattern, spelled); ok || err != nil {
				return true
			}
		}
	}
	return false
}

// fold takes the differences out of a name that people do not see: case, the forms in which Unicode has the same letter
// (NFKD), accents, blanks, and characters without a shape. A slash becomes an underscore: no star of a pattern stands for one.
func fold(name string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == '/':
			return '_'
		case unicode.IsSpace(r), unicode.IsControl(r), unicode.In(r, unicode.Cf, unicode.Mn):
			return -1
		}
		return r
	}, strings.ToLower(norm.NFKD.String(strings.ToLower(name))))
}

// twin refuses a value that an entry on the other side of denySecrets has: what can never be granted cannot be granted
// under another name either. Callers hold mu.
func (v *vault) twin(name, value string) error {
	if v.denied == nil {
		return nil
	}
	for other, s := range v.secrets {
		if other != name && v.denied(other) != v.denied(name) && bytes.Equal(s.Value, []byte(value)) {
			denied := name
			if v.denied(other) {
				denied = other
			}
			return &badEntry{"secret " + denied + " can never be granted to a kid (denySecrets), and this is the same value under another name"}
		}
	}
	return nil
}
