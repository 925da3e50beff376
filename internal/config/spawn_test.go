package config

import (
	"strings"
	"testing"
)

func TestSpawnSigned(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]bool{"": false, "spawn: {}\n": false, "spawn: {signed: false}\n": false, "spawn: {signed: true}\n": true} {
		b, err := Parse("box.yaml", []byte(minimal+text))
		if err != nil || b.SpawnSigned != want {
			t.Fatalf("%q: %+v, %v", text, b, err)
		}
		raw, err := b.Marshal()
		if err != nil || strings.Contains(string(raw), "spawn") != want {
			t.Errorf("%q is written as %s, %v", text, raw, err)
		}
		if again, err := Parse("box.yaml", raw); err != nil || again.SpawnSigned != want {
			t.Errorf("%q comes back as %+v, %v", text, again, err)
		}
	}
	for _, bad := range []string{"true", "{signed: yes please}", "{sign: true}"} {
		if _, err := Parse("box.yaml", []byte(minimal+"spawn: "+bad+"\n")); err == nil {
			t.Errorf("spawn: %s is accepted", bad)
		}
	}
}
