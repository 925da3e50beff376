package e2e

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/contain"
)

// TestNothingIsReachedFromInside: every attempt of package contain, made by the real program in a real kid, fails, on the
// machine's files, as the root of a user namespace of its own, and on an image. The control is that package's own test, where
// each reaches what it is after. TestContainmentOnTheMachinesNetwork is the same there.
func TestNothingIsReachedFromInside(t *testing.T) {
	t.Parallel()
	box := start(t)
	file := filepath.Join(t.TempDir(), "tool.tar")
	if err := os.WriteFile(file, toolTar(t, box, "contain"), 0o600); err != nil {
		t.Fatal(err)
	}
	box.Must("image", "import", file)
	for _, image := range []string{"host", "host+writable", "tool"} {
		var results []contain.Result
		r := box.Tagout("contain", "--json", "--image", image)
		if err := json.Unmarshal([]byte(r.Stdout), &results); err != nil || len(results) < 40 {
			t.Fatalf("%s: %d results, %v: %+v", image, len(results), err, r)
		}
		for _, a := range results {
			if a.Reached {
				t.Errorf("%s: %s: %s", image, a.Class, a.Attempt)
			}
			t.Logf("%s: %s: %s: %s", image, a.Class, a.Attempt, a.Said)
		}
		if left := box.Must("list", "--json"); strings.Contains(left, `"contain"`) {
			t.Errorf("%s: its kids are still there: %s", image, left)
		}
		table := box.Must("contain", "--image", image)
		if strings.Count(table, "refused") < 15 || strings.Contains(table, "REACHED") {
			t.Errorf("%s: the table for people:\n%s", image, table)
		}
	}
	if r := box.Tagout("contain", "--image", "no such"); r.Code != 2 || !strings.Contains(r.Stderr, "tagout image ls") {
		t.Errorf("an image that there cannot be: %+v", r)
	}
}
