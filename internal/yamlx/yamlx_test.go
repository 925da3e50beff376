package yamlx

import (
	"errors"
	"strings"
	"testing"
)

// TestRefused: files that are no plain YAML are refused in one line that says where and what to write.
func TestRefused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ data, want string }{
		"empty":           {"", "f:1:1: the file is empty: "},
		"only a comment":  {"# x\n", "f:1:1: the file is empty: "},
		"open list":       {"a: [", "f:1:4: YAML syntax: "},
		"open quote":      {"\"x", "f:1:1: YAML syntax: "},
		"tab":             {"a:\n\t- b", "f:2:1: "},
		"two documents":   {"a: b\n---\nc: d\n", "f:3:"},
		"anchor":          {"a: &x b", "f:1:4: anchors, aliases"},
		"alias":           {"a: *x", "f:1:4: anchors, aliases"},
		"merge":           {"<<: {a: b}", "f:1:1: anchors, aliases"},
		"tag":             {"a: !!str b", "f:1:4: tags"},
		"directive":       {"%YAML 1.1\n---\na: b", "f:1:1: tags and directives"},
		"complex key":     {"? a\n: b", "f:1:1: complex keys"},
		"brackets":        {strings.Repeat("[", 100), "f:1:17: too many levels"},
		"dashes":          {strings.Repeat("- ", 100), "f:1:33: too many levels"},
		"not UTF-8":       {"a: b\nc: \xff", "f:2:4: a byte that is not UTF-8"},
		"NUL":             {"a: \x00", "f:1:4: a control character (U+0000)"},
		"escape sequence": {"a: \x1b[2J", "f:1:4: a control character (U+001B)"},
		"too big":         {strings.Repeat("#", MaxBytes+1), "f:1:1: the file has 65537 bytes"},
	} {
		doc, v := Parse("f", []byte(c.data))
		err := doc.Err()
		if err == nil || !strings.HasPrefix(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %q first", name, err, c.want)
		}
		if v.Present() {
			t.Errorf("%s: there is a value", name)
		}
		if _, ok := v.Map(Key{"a", "b"}); ok || len(v.List()) > 0 {
			t.Errorf("%s: the absent value can be read", name)
		}
		var ps Problems
		if !errors.As(doc.Err(), &ps) || len(ps) != 1 {
			t.Errorf("%s: reading the absent value added problems: %v", name, doc.Err())
		}
	}
}

func TestTypes(t *testing.T) {
	t.Parallel()
	doc, v := Parse("f", []byte("text: x\nint: 12\nfloat: 1.5\nbool: true\nlist: [a, b]\nblock: |\n  two\n  lines\nquoted: \"12\"\n"))
	m, ok := v.Map(Key{"text", ""}, Key{"int", ""}, Key{"float", ""}, Key{"bool", ""}, Key{"list", ""}, Key{"block", ""}, Key{"quoted", ""}, Key{"absent", "1"})
	if !ok {
		t.Fatal(doc.Err())
	}
	text, _ := m.Get("text").Text()
	block, _ := m.Get("block").Text()
	quoted, _ := m.Get("quoted").Text()
	n, _ := m.Get("int").Int()
	f, _ := m.Get("float").Number()
	whole, _ := m.Get("int").Number()
	b, _ := m.Get("bool").Bool()
	if text != "x" || block != "two\nlines\n" || quoted != "12" || n != 12 || f != 1.5 || whole != 12 || !b || len(m.Get("list").Texts()) != 2 {
		t.Errorf("%q %q %q %d %g %g %v %v", text, block, quoted, n, f, whole, b, m.Get("list").Texts())
	}
	if _, ok := m.Get("absent").Int(); ok || m.Has("absent") {
		t.Error("an absent key has a value")
	}
	if err := doc.Err(); err != nil {
		t.Error(err)
	}
	m.Get("int").Text()
	m.Get("quoted").Int()
	m.Get("text").Bool()
	m.Get("text").List()
	m.Get("list").Number()
	m.Need("absent")
	if err, ok := doc.Err().(Problems); !ok || len(err) != 6 { // Err returns nothing else
		t.Errorf("got %v", doc.Err())
	}
}

func TestNearest(t *testing.T) {
	t.Parallel()
	known := []string{"egress", "openFiles", "host", "pids"}
	for got, want := range map[string]string{
		"egres": "egress", "Egress": "egress", "openfiles": "openFiles", "hosts": "host", "pid": "pids", "colour": "", "x": "",
		strings.Repeat("y", 1000): "",
	} {
		if near := Nearest(got, known); near != want {
			t.Errorf("Nearest(%q) = %q, want %q", got, near, want)
		}
	}
}
