package kidinit

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"unsafe"
)

func TestSizesAreThoseOfTheStructs(t *testing.T) {
	for name, sizes := range map[string][2]int{
		"report": {ReportSize, int(unsafe.Sizeof(Report{}))}, "command": {CommandSize, int(unsafe.Sizeof(Command{}))}, "failure": {FailureSize, int(unsafe.Sizeof(Failure{}))},
	} {
		if sizes[0] != sizes[1] {
			t.Errorf("%s: %d bytes are sent, the struct has %d", name, sizes[0], sizes[1])
		}
	}
	want := Command{Size: 1 << 40, Words: 2, Paths: 3, Argv: 4, Env: 5, UID: 6, Umask: 7, TTY: 8, Caps: 9}
	raw := EncodeCommand(want)
	if got := *(*Command)(unsafe.Pointer(&raw[0])); got != want {
		t.Errorf("%+v became %+v", want, got)
	}
}

// TestTextIsWhatExecveWants reads it as a child does.
func TestTextIsWhatExecveWants(t *testing.T) {
	paths, argv, env := []string{"/usr/bin/x", "/bin/x"}, []string{"x", "", "\xff\x01"}, []string{"A=1"}
	c, text, err := Text("/workspace", paths, argv, env)
	if err != nil || int(c.Size) != len(text) {
		t.Fatalf("%+v, %d bytes, %v", c, len(text), err)
	}
	list := func(from uint32) (out []string) {
		for i := from; ; i++ {
			at := order.Uint64(text[8*i:])
			if at == 0 {
				return out
			}
			out = append(out, string(text[at:int(at)+bytes.IndexByte(text[at:], 0)]))
		}
	}
	if got := list(0); got[0] != "/workspace" || !slices.Equal(list(c.Paths), paths) || !slices.Equal(list(c.Argv), argv) || !slices.Equal(list(c.Env), env) {
		t.Errorf("%q %q %q %q", got, list(c.Paths), list(c.Argv), list(c.Env))
	}
	if _, _, err := Text("/", nil, []string{strings.Repeat("a", MaxText)}, nil); err == nil {
		t.Error("a text without bounds")
	}
}

func TestPaths(t *testing.T) {
	for want, in := range map[string][]string{
		"/bin/ls":         {"/bin/ls"},
		"./ls":            {"./ls", "PATH=/a"},
		"/a/ls /b/ls":     {"ls", "PATH=/a:.::x:/b"},
		"":                {"ls", "PATH="},
		"/last/ls":        {"ls", "PATH=/first", "PATH=/last"},
		"/usr/local/sbin": {"x"},
	} {
		got := strings.Join(Paths(in[0], in[1:]), " ")
		if got != want && !(want == "/usr/local/sbin" && strings.HasPrefix(got, want)) {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(make([]byte, ReportSize))
	f.Add(make([]byte, FailureSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, err := DecodeReport(b); err == nil && (len(b) != ReportSize || r.Kind == 0) {
			t.Errorf("%x is a report: %+v", b, r)
		}
		if _, err := DecodeFailure(b); err == nil && len(b) != FailureSize {
			t.Errorf("%x is a failure", b)
		}
	})
}
