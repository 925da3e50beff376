package config

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"time"

	"tagout/internal/instance"
	"tagout/internal/wire"
)

func TestProof(t *testing.T) {
	head := "apiVersion: tagout/v1\nkind: Box\nresolvers: [\"192.0.2.53:53\"]\n"
	for text, want := range map[string]time.Duration{"": wire.DefaultProofEvery, "proof: {}\n": wire.DefaultProofEvery, "proof: {every: 30s}\n": 30 * time.Second, "proof: {every: 24h}\n": 24 * time.Hour} {
		b, err := Parse("box.yaml", []byte(head+text))
		if err != nil {
			t.Fatal(err)
		}
		files, err := b.Compiled()
		var got wire.ProofSettings
		if err != nil || json.Unmarshal(files[instance.ProofFile], &got) != nil || got.Every != want {
			t.Errorf("%q: killswitchd reads %s, %v, want %v", text, files[instance.ProofFile], err, want)
		}
		raw, err := b.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		if again, err := Parse("box.yaml", raw); err != nil || !reflect.DeepEqual(again, b) {
			t.Errorf("written and read again: %+v, %v, want %+v", again, err, b)
		}
	}
	for _, bad := range []string{"{every: 29s}", "{every: 25h}", "{every: never}", "{every: 0s}", "{evry: 1m}", "10m"} {
		if _, err := Parse("box.yaml", []byte(head+"proof: "+bad+"\n")); err == nil || !strings.Contains(err.Error(), "box.yaml:4:") {
			t.Errorf("proof: %s gives %v, want an error in line 4", bad, err)
		}
	}
}
