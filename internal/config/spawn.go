package config

import "tagout/internal/yamlx"

// spawnFile is the form of the spawn section.
type spawnFile struct {
	Signed bool `yaml:"signed,omitempty"`
}

var spawnKeys = []yamlx.Key{{Name: "signed", Example: "true"}}

// readSpawn says whether making a kid takes the signature of somebody with the role spawn.
func readSpawn(v yamlx.Value) bool {
	m, _ := v.Map(spawnKeys...)
	signed, _ := m.Get("signed").Bool()
	return signed
}
