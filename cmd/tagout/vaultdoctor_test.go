package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/instance"
	"tagout/internal/testroot"
	"tagout/internal/vaultseal"
)

// TestDoctorWarnsOfAnIdentityInClear, and of one that nobody can read, and not of one that is sealed.
func TestDoctorWarnsOfAnIdentityInClear(t *testing.T) {
	testroot.Require(t) // an instance's state lies where root alone writes
	inst, err := instance.Claim("tvaultdoc")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(inst.StateDir()) // the test's own
		if err := inst.Release(); err != nil {
			t.Error(err)
		}
	})
	if err := os.MkdirAll(inst.CreddDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, ok := sealCheck(inst); ok {
		t.Error("something is said of an identity that is not there")
	}
	for _, c := range []struct {
		raw, missing string
	}{
		{"AGE-SECRET-KEY-1HUNTER2\n", "lies in clear"},
		{"", "cannot be read"},
		{vaultseal.Intro + "-> X25519 a\n", ""},
		{vaultseal.Intro + "-> scrypt a 18\n", ""},
	} {
		if err := os.WriteFile(filepath.Join(inst.CreddDir(), "identity.age"), []byte(c.raw), 0o600); err != nil {
			t.Fatal(err)
		}
		got, ok := sealCheck(inst)
		if !ok || got.OK != (c.missing == "") || got.Needed || !strings.Contains(got.Missing, c.missing) || strings.Contains(got.Missing, "HUNTER2") {
			t.Errorf("%q: %+v", c.raw, got)
		}
	}
}
