package box

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/doctor"
	"tagout/internal/instance"
)

// TestOneAtATime: while somebody sets the instance up or removes it, nobody else does either.
func TestOneAtATime(t *testing.T) {
	const name = "tboxlock"
	b := boxes(t, name)
	unlock, err := instance.Lock(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	for what, do := range map[string]func(context.Context) error{
		"setup":   func(ctx context.Context) error { _, err := b.Setup(ctx, name, rawConfig("version: 1\n")); return err },
		"cleanup": func(ctx context.Context) error { return b.Cleanup(ctx, name, true) },
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		err := do(ctx)
		cancel()
		if err == nil || !strings.Contains(err.Error(), "another command is setting up or removing") {
			t.Errorf("%s: %v", what, err)
		}
	}
	mustNone(t, b, name)
}

// TestAFailedSetupTakesNothingFromAnother: of two at once, the one that fails takes back only what it made, and
// the other's box is whole.
func TestAFailedSetupTakesNothingFromAnother(t *testing.T) {
	const name = "tboxtwo"
	good := boxes(t, name)
	bad := good
	bad.BPF = fakeBPF{
		install: func(instance.Instance, string, []string) error { return errors.New("no") },
		uninstall: func(i instance.Instance, kids string, daemons []string) error {
			return KernelBPF{}.Uninstall(i, kids, daemons)
		},
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := bad.Setup(t.Context(), name, rawConfig("version: 2\n")); err == nil {
			t.Error("the bad setup succeeded")
		}
	})
	wg.Go(func() {
		if _, err := good.Setup(t.Context(), name, rawConfig("version: 1\n")); err != nil {
			t.Error(err)
		}
	})
	wg.Wait()
	i, err := instance.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	if got := read(t, i.BoxConfig()); got != "version: 1\n" {
		t.Errorf("configuration %q", got)
	}
	if !exists(i.PinDir()) || !exists(i.RunDir()) {
		t.Error("the failed setup took the other's box")
	}
}

// TestHalfWrittenFilesGo: what a setup that was killed left half-written is gone after the next one.
func TestHalfWrittenFilesGo(t *testing.T) {
	const name = "tboxhalf"
	b := boxes(t, name)
	i := setup(t, b, name)
	for _, dir := range []string{i.StateDir(), i.CADir()} {
		if err := os.WriteFile(filepath.Join(dir, ".new-123"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	setup(t, b, name)
	for _, dir := range []string{i.StateDir(), i.CADir()} {
		if exists(filepath.Join(dir, ".new-123")) {
			t.Errorf("left in %s", dir)
		}
	}
}

// TestCalledOffWhileTheMachineIsChecked: what doctor had no time to try is not called missing.
func TestCalledOffWhileTheMachineIsChecked(t *testing.T) {
	const name = "tboxoff"
	b := boxes(t, name)
	ctx, cancel := context.WithCancel(t.Context())
	b.Doctor = func(context.Context) doctor.Report {
		cancel()
		return doctor.Report{Checks: []doctor.Check{{Name: "so-mark", Needed: true, Missing: "not tried"}}}
	}
	if _, err := b.Setup(ctx, name, rawConfig("version: 1\n")); !errors.Is(err, context.Canceled) {
		t.Errorf("called off: %v", err)
	}
	mustNone(t, b, name)
}
