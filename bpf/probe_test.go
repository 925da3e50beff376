package bpf

import (
	"testing"

	"tagout/internal/testroot"
)

func TestProbe(t *testing.T) {
	testroot.Require(t)
	seen := map[string]bool{}
	for _, f := range Probe() {
		if f.Name == "" || f.Use == "" || f.Since == "" || seen[f.Name] {
			t.Errorf("feature %+v: name, use and version must be there, the name once", f)
		}
		seen[f.Name] = true
		if f.Err != nil && !f.Optional {
			t.Errorf("%s: %v", f.Name, f.Err)
		}
		t.Logf("%-22s %v", f.Name, f.Err)
	}
}
