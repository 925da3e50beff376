package audit

import "testing"

// The short cuts around the expressions never change what is redacted.
func FuzzShortCutsHideNothing(f *testing.F) {
	for _, s := range []string{
		"tgo_abcdefghijklmnop", "Basic QWxhZGRp", "bearer+abcdefgh", "BASIC\u0020abcdefgh", "ba\u017fic abcdefgh", "AKIAABCDEFGHIJKLMNOP",
		"ghp_abcdefghijklmnopqrst", "github_pat_abcdefghijklmnopqrst", "xoxb-abcdefghij", "sk-abcdefghijklmnopqrst", "eyJabcdefgh.abcdefgh.",
		"-----BEGIN EC PRIVATE KEY-----", "AGE-SECRET-KEY-1ABC", "password=abcd", "PassWD: abcd", "secret=abcd", "\u017fecret=abcd",
		"to\u212aen:abcd", "TOKEN=abcd", "api_key=abcd", "apikey=abcd", "API-KEY='abcd'", "access_key=abcd", "accesskey: \"abcd", "198.19.0.3:43210", "via=transparent",
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if shapes.MatchString(s) && !mayHaveShape(s) {
			t.Errorf("%q has the shape of a secret", s)
		}
		if keyed.MatchString(s) && !mayBeKeyed(s) {
			t.Errorf("%q has the key of a secret", s)
		}
	})
}
