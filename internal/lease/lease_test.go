package lease

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/instance"
)

// testInstance is one whose directories nobody made; the test makes and removes its state directory.
func testInstance(t *testing.T) instance.Instance {
	t.Helper()
	inst, err := instance.New("tleaseterms", 15)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(inst.StateDir(), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(inst.StateDir()) })
	return inst
}

func TestLoadGivesUsableTermsWhateverTheFileSays(t *testing.T) {
	inst := testInstance(t)
	if got, err := Load(inst); got != Default || err != nil {
		t.Errorf("without a file: %+v, %v", got, err)
	}
	for _, text := range []string{"", "{", `{"kids_ns":1}`, `{"kernel_ns":-5000000000}`, `{"watchdog_ns":9000000000000000}`, `{"absent_ns":"long"}`} {
		if err := os.WriteFile(File(inst), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := Load(inst); got != Default || err == nil {
			t.Errorf("%q gives %+v, %v; want the defaults and an error", text, got, err)
		}
	}
	want := Terms{Kids: time.Minute, Kernel: 4 * time.Second, Watchdog: Default.Watchdog, Absent: Default.Absent}
	raw, err := json.Marshal(Terms{Kids: want.Kids, Kernel: want.Kernel})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(inst.StateDir(), Name), raw, 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := Load(inst); got != want || err != nil {
		t.Errorf("got %+v, %v, want %+v", got, err, want)
	}
}

func TestDefaultsAreWithinTheBounds(t *testing.T) {
	if err := Default.Check(); err != nil {
		t.Error(err)
	}
	if (Terms{}).Check() == nil {
		t.Error("terms of zero pass the check: every guard would be late at once")
	}
}
