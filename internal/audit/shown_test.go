package audit

import "testing"

func TestNamesThatAKidChoseAreShown(t *testing.T) {
	for in, want := range map[string]string{
		"/tmp/a b": "/tmp/a b", "": "", "a\nb": `"a\nb"`, "\xff": `"\xff"`, `"x"`: `"\"x\""`, `a\b`: `"a\\b"`, "\x1b[2J": `"\x1b[2J"`,
		"é": "é", "\u202e": `"\u202e"`,
	} {
		if got := Shown(in); got != want {
			t.Errorf("%q is shown as %s, want %s", in, got, want)
		}
	}
	if got, want := Line([]string{"sh", "-c", "echo hi", "", "\x00\xff", `"`}), `sh -c "echo hi" "" "\x00\xff" "\""`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// Different arguments never become the same line.
func FuzzLine(f *testing.F) {
	f.Add("a", "b", "a b", "")
	f.Add(`"a`, `b"`, `"a b"`, "")
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		if same := Line([]string{a, b}) == Line([]string{c, d}); same != (a == c && b == d) {
			t.Errorf("%q %q and %q %q are both %s", a, b, c, d, Line([]string{a, b}))
		}
		if Line([]string{a, b}) == Line([]string{c}) {
			t.Errorf("%q %q and %q are both %s", a, b, c, Line([]string{c}))
		}
	})
}
