// Package tokenshape finds texts that have the shape of a session's token: "tgo_" and 32 characters of base32 (RFC 4648,
// section 6, in lower case, without padding). Case does not count: names of hosts and of header fields lose theirs on
// the way. It says nothing about whether such a token exists: only credd knows.
package tokenshape

import "strings"

// Len is the length of a token in bytes.
const Len = 36

const prefix = "tgo"

// Next returns where the next token in s begins at or after from, -1 where there is none.
func Next[T string | []byte](s T, from int) int {
	for i := from + len(prefix); i <= len(s)-(Len-len(prefix)); i++ {
		if s[i] == '_' && begins(s[i-len(prefix):]) {
			return i - len(prefix)
		}
	}
	return -1
}

// begins says whether s, which is long enough, begins with a token.
func begins[T string | []byte](s T) bool {
	for i := range len(prefix) {
		if s[i]|0x20 != prefix[i] {
			return false
		}
	}
	for i := len(prefix) + 1; i < Len; i++ {
		letter := s[i] | 0x20
		if (letter < 'a' || letter > 'z') && (s[i] < '2' || s[i] > '7') {
			return false
		}
	}
	return true
}

// First returns the first token in s as credd knows it, in lower case; "" where there is none.
func First[T string | []byte](s T) string {
	i := Next(s, 0)
	if i < 0 {
		return ""
	}
	return strings.ToLower(string(s[i : i+Len])) // ASCII
}
