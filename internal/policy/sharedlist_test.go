package policy

import (
	"flag"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"golang.org/x/net/publicsuffix"

	"tagout/internal/reason"
)

var update = flag.Bool("update", false, "write shared.txt")

// isShared asks the library whether anybody can have names under name.
func isShared(name string) bool {
	suffix, _ := publicsuffix.PublicSuffix(name)
	return suffix == name
}

// suffixRules returns the whole public suffix list that this build knows, from the library's own test.
func suffixRules(t *testing.T) []string {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/net").Output()
	if err != nil {
		t.Fatalf("asking go for the public suffix library: %v", err)
	}
	raw, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "publicsuffix", "table_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	rules, _, _ := strings.Cut(string(raw), "nodeLabels")
	var out []string
	for _, m := range regexp.MustCompile(`(?m)^\t"([^"]+)",$`).FindAllStringSubmatch(rules, -1) {
		out = append(out, m[1])
	}
	if len(out) < 9000 {
		t.Fatalf("found %d rules of the public suffix list: its form has changed", len(out))
	}
	return out
}

// ownedAbove returns the names above a rule of the list that are no public suffixes, without single labels.
func ownedAbove(rule string) []string {
	var out []string
	for _, base, _ := strings.Cut(rule, "."); strings.Contains(base, "."); _, base, _ = strings.Cut(base, ".") {
		if !isShared(base) {
			out = append(out, base)
		}
	}
	return out
}

// TestSharedNamesAreThoseOfTheLibrary: a new library brings new entries, and the list at hand follows.
func TestSharedNamesAreThoseOfTheLibrary(t *testing.T) {
	t.Parallel()
	var want []string
	for _, rule := range suffixRules(t) {
		if rule[0] != '!' && len(ownedAbove(rule)) > 0 {
			want = append(want, rule)
		}
	}
	slices.Sort(want)
	text := strings.Join(want, "\n") + "\n"
	if *update {
		if err := os.WriteFile("shared.txt", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if text != sharedText {
		t.Error("shared.txt is behind the library: run go test ./internal/policy -run Shared -update")
	}
}

// TestNoPatternHoldsASharedName: no card with a pattern above an entry of the list loads, and a policy that
// got one all the same opens no name under that entry.
func TestNoPatternHoldsASharedName(t *testing.T) {
	t.Parallel()
	tried := 0
	for _, rule := range slices.Sorted(maps.Keys(sharedList())) {
		suffix := strings.Replace(rule, "*.", "a-label.", 1)
		for _, base := range ownedAbove(rule) {
			tried++
			if _, _, ok := strings.Cut(strings.TrimSuffix(rule, "."+base), "."); !ok && SharedUnder("*."+base) == "" {
				t.Errorf("*.%s loads and reaches %s", base, rule)
			}
			if SharedUnder("**."+base) == "" {
				t.Errorf("**.%s loads and reaches %s", base, rule)
			}
			p, err := Compile(Spec{Allow: []Rule{
				{Host: "**." + base, Ports: []uint16{443}, Protocol: TLS},
				{Host: "*." + base, Ports: []uint16{443}, Protocol: TLS},
			}})
			if err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{suffix, "evil." + suffix, "a.b." + suffix} {
				if d := p.Connect(name, 443); d.Reason != reason.PublicSuffix {
					t.Errorf("**.%s: connect to %s: %v", base, name, d.Reason)
				}
				if _, d := p.Lookup(name); d.Reason != reason.PublicSuffix {
					t.Errorf("**.%s: lookup of %s: %v", base, name, d.Reason)
				}
			}
		}
	}
	if tried < 1000 {
		t.Errorf("only %d patterns were tried", tried)
	}
}
