package config

import (
	"tagout/internal/trip"
)

// tripFile is a trip rule's form in the file, for writing.
type tripFile struct {
	On     string   `yaml:"on"`
	Over   any      `yaml:"over,omitempty"`
	Within string   `yaml:"within,omitempty"`
	Paths  []string `yaml:"paths,omitempty"`
	Names  []string `yaml:"names,omitempty"`
	Except []string `yaml:"except,omitempty"`
	Fires  []string `yaml:"fires"`
}

func tripFiles(rules []trip.Rule) []tripFile {
	var out []tripFile
	for _, r := range rules {
		f := tripFile{On: r.On, Paths: r.Paths, Names: r.Names, Except: r.Except}
		if !trip.Event(r.On) {
			f.Over = r.Amount()
		}
		if r.Within != 0 {
			f.Within = r.Within.String()
		}
		for _, l := range r.Fires {
			f.Fires = append(f.Fires, string(l))
		}
		out = append(out, f)
	}
	return out
}
