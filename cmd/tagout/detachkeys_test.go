package main

import (
	"bytes"
	"math/rand/v2"
	"testing"
)

func TestDetachKeysAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "ctrl-],d": "\x1dd", "ctrl-p,ctrl-q": "\x10\x11", "CTRL-A": "\x01", "ctrl-@": "\x00", "ctrl-[": "\x1b", "ctrl-_": "\x1f", "a,b,c": "abc", "~,.": "~.",
	} {
		var d detachKeys
		if err := d.Set(text); err != nil || string(d.keys) != want || d.String() != text {
			t.Errorf("%q: %q %q %v, want %q", text, d.keys, d.String(), err, want)
		}
	}
	for _, text := range []string{",", "a,", "ab", "ctrl-", "ctrl-1", "ctrl-é", "é", " ", "ctrl-ab", "a,b,c,d,e,f,g,h,i", "\x1d"} {
		var d detachKeys
		if err := d.Set(text); err == nil {
			t.Errorf("%q is taken as %q", text, d.keys)
		}
	}
}

// TestDetachKeysAreFound wherever reads cut them, and everything before them goes to the command, byte for byte.
func TestDetachKeysAreFound(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 5000 {
		d := detachKeys{keys: [][]byte{{1, 2}, {1, 1, 2}, {1}, {1, 2, 1, 2, 1}, {}}[rng.IntN(5)]}
		keys := d.keys
		typed := make([]byte, rng.IntN(40))
		for i := range typed {
			typed[i] = byte(rng.IntN(3)) // so that there is much that begins like them
		}
		want, leaves := typed, false
		if at := bytes.Index(typed, keys); at >= 0 && len(keys) > 0 {
			want, leaves = typed[:at], true
		}
		var got []byte
		left := false
		for rest := typed; len(rest) > 0 && !left; {
			n := 1 + rng.IntN(len(rest))
			var out []byte
			out, left = d.scan(bytes.Clone(rest[:n]))
			got, rest = append(got, out...), rest[n:]
		}
		if !left {
			got = append(got, d.held...) // they go with the key that follows
		}
		if left != leaves || !bytes.Equal(got, want) {
			t.Fatalf("seed %d: keys %v, typed %v: left %t with %v, want %t with %v", seed, keys, typed, left, got, leaves, want)
		}
	}
}
