package netfw

import (
	"flag"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"tagout/internal/instance"
)

var update = flag.Bool("update", false, "rewrite testdata/rules.golden")

func inst(t testing.TB, name string, slot int) instance.Instance {
	t.Helper()
	i, err := instance.New(name, slot)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func calls() []Call {
	return []Call{
		{To: netip.MustParseAddr("192.0.2.70"), Port: 8200}, {To: netip.MustParseAddr("2001:db8::70"), Port: 8200},
		{Port: 443}, {Port: 443}, {To: netip.MustParseAddr("192.0.2.53"), Port: 53, UDP: true},
	}
}

func TestTextGolden(t *testing.T) {
	got := Text(inst(t, "main", 2), calls()...)
	const file = "testdata/rules.golden"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the rules changed: read the difference, then run `go test ./internal/netfw -run Golden -update`\n%s", got)
	}
}

// No rule may let a packet through because of the state of its connection: that is how cuts are defeated.
func TestNoStateMatch(t *testing.T) {
	for _, word := range []string{"ESTABLISHED", "RELATED", "--state", "--ctstate", "conntrack"} {
		if strings.Contains(Text(inst(t, "main", 0)), word) {
			t.Errorf("a rule mentions %s", word)
		}
	}
}

func TestChainNamesFit(t *testing.T) {
	for _, f := range []family{desired4(inst(t, "abcdefghijkl", 15), nil), desired6(inst(t, "abcdefghijkl", 15), nil)} {
		for _, c := range f.chains {
			if len(c.name) > 28 {
				t.Errorf("chain name %s has %d bytes, at most 28 fit", c.name, len(c.name))
			}
		}
	}
}

func TestHeaded(t *testing.T) {
	jumps := []string{"-i kid0-+ -j TGO-a-in", "-d 198.19.0.1/32 -j TGO-a-gw"}
	other := "-i kid1-+ -j TGO-b-in"
	foreign := "-j DOCKER"
	tests := []struct {
		name  string
		rules []string
		want  bool
	}{
		{"alone", jumps, true},
		{"after another instance", append([]string{other}, jumps...), true},
		{"before others", append(slices.Clone(jumps), foreign), true},
		{"after a foreign rule", append([]string{foreign}, jumps...), false},
		{"foreign rule between", []string{jumps[0], foreign, jumps[1]}, false},
		{"one missing", jumps[:1], false},
		{"twice", append(slices.Clone(jumps), jumps[0]), false},
		{"order", []string{jumps[1], jumps[0]}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := headed(tt.rules, jumps, "TGO-a-"); got != tt.want {
				t.Errorf("headed = %v, want %v", got, tt.want)
			}
		})
	}
}

func TestWords(t *testing.T) {
	tests := map[string][]string{
		"-i kid0-+ -j TGO-a-in":                 {"-i", "kid0-+", "-j", "TGO-a-in"},
		`-m comment --comment "two words" -j X`: {"-m", "comment", "--comment", "two words", "-j", "X"},
		`--comment "say \"hi\" there" -j X`:     {"--comment", `say "hi" there`, "-j", "X"},
		`--comment "" -j X`:                     {"--comment", "", "-j", "X"},
	}
	for in, want := range tests {
		if got := words(in); !slices.Equal(got, want) {
			t.Errorf("words(%s) = %q, want %q", in, got, want)
		}
	}
}
