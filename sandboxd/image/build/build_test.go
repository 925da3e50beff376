package build

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tagout/internal/card"
	"tagout/sandboxd/image/store"
)

// TestRequests: what passes can be put into command lines, a list of sources and a card; all else is refused.
func TestRequests(t *testing.T) {
	good := func() Request { return Request{Suite: "bookworm"} }
	for name, change := range map[string]func(*Request){
		"nothing more": func(*Request) {},
		"packages":     func(r *Request) { r.Packages = []string{"g++", "libc6:i386", "git=1:2.39.5-0+deb12u1"} },
		"a further source": func(r *Request) {
			r.More = []string{"https://deb.debian.org/debian-security/ bookworm-security main contrib"}
		},
		"a port and a path":  func(r *Request) { r.Mirror = "http://mirror.example.com:8080/pub/~x/debian" },
		"an end of its time": func(r *Request) { r.Time = time.Second },
	} {
		r := good()
		change(&r)
		r, sources, err := r.complete()
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for _, list := range [][]Source{sources, nil} {
			if _, err := card.Parse("card", []byte(cardFor("x", r, list))); err != nil {
				t.Errorf("%s: its card: %v", name, err)
			}
		}
	}
	for name, change := range map[string]func(*Request){
		"no suite":                  func(r *Request) { r.Suite = "" },
		"a suite with a space":      func(r *Request) { r.Suite = "a b" },
		"a suite that is a path":    func(r *Request) { r.Suite = "../x" },
		"a suite that is an option": func(r *Request) { r.Suite = "-x" },
		"a component with a line":   func(r *Request) { r.Components = []string{"main\ndeb http://x y z"} },
		"a mirror that is a file":   func(r *Request) { r.Mirror = "file:///etc" },
		"a mirror with a password":  func(r *Request) { r.Mirror = "http://a:b@example.com/debian" },
		"a mirror with options":     func(r *Request) { r.Mirror = "[trusted=yes] http://example.com/debian" },
		"a mirror with a query":     func(r *Request) { r.Mirror = "http://example.com/debian?x=y" },
		"a mirror that leads up":    func(r *Request) { r.Mirror = "http://example.com/../debian" },
		"a mirror with an escape":   func(r *Request) { r.Mirror = "http://example.com/%2e%2e/debian" },
		"a mirror with a quote":     func(r *Request) { r.Mirror = `http://exa"mple.com/debian` },
		"a port that is none":       func(r *Request) { r.Mirror = "http://example.com:70000/debian" },
		"a source without parts":    func(r *Request) { r.More = []string{"http://example.com/debian bookworm"} },
		"options of a source":       func(r *Request) { r.More = []string{"[trusted=yes] http://example.com/debian bookworm main"} },
		"too many sources": func(r *Request) {
			r.More = slices.Repeat([]string{"http://example.com/debian bookworm main"}, maxSources)
		},
		"too many packages":       func(r *Request) { r.Packages = slices.Repeat([]string{"git"}, maxPackages+1) },
		"a package to be removed": func(r *Request) { r.Packages = []string{"git-"} },
		"a package's suite":       func(r *Request) { r.Packages = []string{"git/sid"} },
		"a pattern":               func(r *Request) { r.Packages = []string{"?essential"} },
		"two packages in one":     func(r *Request) { r.Packages = []string{"git,bash-"} },
		"an option for apt":       func(r *Request) { r.Packages = []string{"-oDebug=1"} },
		"a file of the machine":   func(r *Request) { r.Packages = []string{"./x.deb"} },
		"no space":                func(r *Request) { r.Space = 1 },
		"space without end":       func(r *Request) { r.Space = maxSpace + 1 },
		"space below zero":        func(r *Request) { r.Space = -1 },
		"no time":                 func(r *Request) { r.Time = 1 },
		"time without end":        func(r *Request) { r.Time = maxTime + 1 },
		"a keyring without end":   func(r *Request) { r.Keyring = make([]byte, maxKeyring+1) },
	} {
		r := good()
		change(&r)
		if _, _, err := r.complete(); !errors.Is(err, ErrRequest) {
			t.Errorf("%s: %v, want %v", name, err, ErrRequest)
		}
	}
}

// TestDescribe reads what the first kid says, which nobody trusts: it names packages, and each Release file's sums go to the
// source that it is of.
func TestDescribe(t *testing.T) {
	sources := []Source{{"http://a.test/debian", "s", []string{"main", "contrib"}}, {"https://b.test/pub/~x_y", "s-security", []string{"main"}}}
	a, b, c := strings.Repeat("a", 64), strings.Repeat("b", 64), strings.Repeat("c", 64)
	text := "package zlib 1:1.2 amd64\npackage apt 2.6 all\npackage too many words here\n" +
		"\nrelease a.test_debian_dists_s_InRelease\nDate: Thu, 01 Jan 2026 00:00:00 UTC\n " + a + " 12 main/binary-amd64/Packages.xz\n " + b + " 12 main/binary-arm64/Packages.xz\n " +
		c + " 12 non-free/binary-amd64/Packages.xz\n short 12 main/binary-amd64/Packages\n" +
		"\nrelease b.test_pub_%7ex%5fy_dists_s-security_Release\n " + b + " 12 main/binary-amd64/Packages\n" +
		"\nrelease elsewhere_dists_s_InRelease\n " + c + " 12 main/binary-amd64/Packages\n"
	out, err := describe(text, sources, []string{"zlib"})
	if err != nil {
		t.Fatal(err)
	}
	if want := []store.Package{{Name: "apt", Version: "2.6", Arch: "all"}, {Name: "zlib", Version: "1:1.2", Arch: "amd64"}}; !slices.Equal(out.Packages, want) {
		t.Errorf("packages %+v", out.Packages)
	}
	if got := fmt.Sprint(out.Sources[0].Date, out.Sources[0].Indexes, out.Sources[1].Indexes); got != "Thu, 01 Jan 2026 00:00:00 UTC"+
		"map[main/binary-amd64/Packages.xz:"+a+"] map[main/binary-amd64/Packages:"+b+"]" {
		t.Errorf("sources %s", got)
	}
	if _, err := describe("nothing\n", sources, nil); err == nil {
		t.Error("an image without packages was described")
	}
}

// TestNewer compares with what the sources have now; a source that does not say is unknown, and not old.
func TestNewer(t *testing.T) {
	sum, page := strings.Repeat("a", 64), ""
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if page == "" || r.URL.Path != "/debian/dists/s/InRelease" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, page)
	}))
	defer srv.Close()
	b := &store.Build{Sources: []store.BuildSource{{URL: srv.URL + "/debian", Suite: "s", Components: []string{"main"}, Indexes: map[string]string{"main/binary-amd64/Packages": sum}}}}
	for _, c := range []struct {
		page  string
		newer bool
		err   bool
	}{
		{" " + sum + " 1 main/binary-amd64/Packages\n", false, false},
		{" " + strings.Repeat("b", 64) + " 1 main/binary-amd64/Packages\n", true, false},
		{" nothing\n", true, false},
		{"", false, true},
	} {
		page = c.page
		if newer, err := Newer(t.Context(), b, srv.Client()); newer != c.newer || (err != nil) != c.err {
			t.Errorf("%q: %v %v", c.page, newer, err)
		}
	}
	b.Sources[0].Indexes = nil
	if _, err := Newer(t.Context(), b, srv.Client()); err == nil {
		t.Error("what a source had is not known, and it is said to be the same")
	}
}

// TestSaid keeps the last of what nobody trusts, in characters that do nothing to a terminal and lines that end.
func TestSaid(t *testing.T) {
	var told []string
	s := &said{tell: func(line string) { told = append(told, line) }}
	s.write([]byte("one\x1b[2J\r\n\n" + strings.Repeat("x", 10*maxLine) + "\ntw")) // never fails
	s.write([]byte("o"))                                                           // as above
	last := s.last()
	if len(told) != 3 || told[0] != "one?[2J" || len(told[1]) != maxLine || !strings.HasSuffix(last, "\ntwo") {
		t.Errorf("told %q, last %q", told, last)
	}
	for range 1000 {
		s.write([]byte("a line\n")) // as above
	}
	if n := len(s.last()); n > maxSaid {
		t.Errorf("%d bytes are kept", n)
	}
}

// TestTold: some failures are known by what programs say.
func TestTold(t *testing.T) {
	for text, want := range map[string]error{
		"E: Failed to fetch http://x  Hash Sum mismatch":                              store.ErrForged,
		"E: The repository 'http://x s InRelease' is not signed.":                     store.ErrForged,
		"dpkg: error: cannot copy: failed to write (No space left on device)":         unix.ENOSPC,
		"E: You don't have enough free space in /build/root/var/cache/apt/archives/.": unix.ENOSPC,
		"tar: ./usr/share/large: Wrote only 6144 of 10240 bytes":                      unix.ENOSPC,
		"E: Unable to locate package nosuch":                                          nil,
	} {
		err := told(fmt.Errorf("x: %w", &failure{1, text}))
		if forged, full := errors.Is(err, store.ErrForged), errors.Is(err, unix.ENOSPC); forged != (want == store.ErrForged) || full != (want == unix.ENOSPC) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
