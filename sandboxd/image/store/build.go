package store

import (
	"encoding/hex"
	"runtime"
	"slices"
	"strings"
)

// Build says what a built image was made of.
type Build struct {
	Sources  []BuildSource `json:"sources"` // the first is the mirror that was asked for
	Wanted   []string      `json:"wanted"`  // packages that were asked for
	Packages []Package     `json:"packages"`
}

// BuildSource is an archive in one of its suites, as it was at the time.
type BuildSource struct {
	URL        string            `json:"url"`
	Suite      string            `json:"suite"`
	Components []string          `json:"components"`
	Date       string            `json:"date,omitempty"`    // of its Release file
	Indexes    map[string]string `json:"indexes,omitempty"` // list of packages -> SHA-256, as its Release file has them
}

// Package is a package of a built image.
type Package struct {
	Name    string `json:"name"`
	Version string `json:"version"`
	Arch    string `json:"arch"`
}

// debianArch are Go's names that Debian has others for.
var debianArch = map[string]string{"386": "i386", "arm": "armhf", "ppc64le": "ppc64el", "mips64le": "mips64el"}

// Note takes what is of interest out of one line of a Release file, split into words: its date, and the sums of the lists of
// packages that the source's components have for this machine.
func (s *BuildSource) Note(words []string) {
	if len(words) > 1 && words[0] == "Date:" {
		s.Date = strings.Join(words[1:], " ")
		return
	}
	if len(words) != 3 || len(words[0]) != 64 {
		return
	}
	if _, err := hex.DecodeString(words[0]); err != nil {
		return
	}
	arch := runtime.GOARCH
	if a, ok := debianArch[arch]; ok {
		arch = a
	}
	component, _, ok := strings.Cut(words[2], "/binary-"+arch+"/Packages") // plain or compressed
	if !ok || !slices.Contains(s.Components, component) {
		return
	}
	if s.Indexes == nil {
		s.Indexes = map[string]string{}
	}
	s.Indexes[words[2]] = words[0]
}
