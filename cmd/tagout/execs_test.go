package main

import (
	"testing"
	"time"

	"tagout/internal/wire"
)

// TestExecState: a detached command that a restart would end says so, as long as it runs.
func TestExecState(t *testing.T) {
	for want, e := range map[string]wire.Exec{
		"running":                {},
		"detached":               {Detached: true, Outlives: true},
		"detached until restart": {Detached: true},
		"adopted":                {Detached: true, Outlives: true, Adopted: time.Now()},
		"adopted until restart":  {Detached: true, Adopted: time.Now()},
		"exited 3":               {Detached: true, Exit: &wire.ExecExit{Result: "exited", Code: 3}},
		"timeout":                {Detached: true, Exit: &wire.ExecExit{Result: "timeout"}},
	} {
		if got := execState(e); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
