package archtest

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	namedTest   = regexp.MustCompile("`(Test[A-Z][A-Za-z0-9]*)")
	writtenTest = regexp.MustCompile(`(?m)^func (Test[A-Z][A-Za-z0-9]*)\(t \*testing\.T\)`)
)

// tests returns the names of all tests of the module.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	out := map[string]bool{}
	err := filepath.WalkDir("../..", func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		raw, err := os.ReadFile(path)
		for _, m := range writtenTest.FindAllSubmatch(raw, -1) {
			out[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(out) < 200 {
		t.Fatalf("only %d tests were found", len(out))
	}
	return out
}

// absent returns the tests that a text names and that are not there, and how many it names.
func absent(text string, have map[string]bool) (missing []string, named int) {
	for _, m := range namedTest.FindAllStringSubmatch(text, -1) {
		if named++; !have[m[1]] {
			missing = append(missing, m[1])
		}
	}
	return missing, named
}

// TestTheDocumentationNamesTestsThatThereAre, on every page, and every case of kids has some.
func TestTheDocumentationNamesTestsThatThereAre(t *testing.T) {
	have := tests(t)
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	named := 0
	for _, page := range pages {
		raw, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		missing, n := absent(string(raw), have)
		named += n
		for _, name := range missing {
			t.Errorf("%s names %s, which is not there", page, name)
		}
	}
	if missing, _ := absent("`TestNobodyWroteThis`", have); named < 100 || len(missing) != 1 {
		t.Errorf("%d names were looked at: the test shows nothing", named)
	}
	cases, err := os.ReadFile("../../docs/kid-tests.md")
	if err != nil {
		t.Fatal(err)
	}
	for n := 1; n <= 18; n++ {
		if row := regexp.MustCompile(fmt.Sprintf("(?m)^\\| K%02d \\|.*`Test", n)); !row.Match(cases) {
			t.Errorf("case K%02d has no row with a test", n)
		}
	}
}
