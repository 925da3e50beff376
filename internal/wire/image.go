package wire

import "time"

// ImageLimits bound what an image may unpack to. Zero stands for the default.
type ImageLimits struct {
	MaxBytes int64 `json:"max_bytes,omitempty" query:"max_bytes" minimum:"0" doc:"Most bytes that its files may have, those of all layers together."`
	MaxFiles int   `json:"max_files,omitempty" query:"max_files" minimum:"0" doc:"Most files that its layers may have."`
}

// PullRequest asks for an image from a registry.
type PullRequest struct {
	Name string `json:"name"` // what cards will call it
	Ref  string `json:"ref"`  // such as registry.example.com/tools/shell:1.2
	ImageLimits
}

// BuildRequest asks for an image of Debian packages.
type BuildRequest struct {
	Name       string        `json:"name"`                 // what cards will call it
	Suite      string        `json:"suite"`                // such as bookworm
	Packages   []string      `json:"packages,omitempty"`   // beside the essential ones and apt; NAME or NAME=VERSION
	Mirror     string        `json:"mirror,omitempty"`     // default http://deb.debian.org/debian
	Components []string      `json:"components,omitempty"` // of the mirror's suite; default main
	Sources    []string      `json:"sources,omitempty"`    // further ones: URL SUITE COMPONENT…
	Keyring    []byte        `json:"keyring,omitempty"`    // the keys that sources are signed with; default: those of Debian's archive
	Space      int64         `json:"space,omitempty"`      // bytes of memory in which its files are laid out; default 4 GiB
	Timeout    time.Duration `json:"timeout_ns,omitempty"` // default 1 h
	ImageLimits
}
