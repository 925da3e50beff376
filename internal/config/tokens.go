package config

import (
	"time"

	"tagout/internal/yamlx"
)

// TokenLifetime is how long a session's tokens live at most where the box does not say it.
const TokenLifetime = 24 * time.Hour

const (
	minTokenLifetime = time.Second
	maxTokenLifetime = 30 * 24 * time.Hour
)

// tokensFile is the form of the tokens section. An empty text means the default.
type tokensFile struct {
	Lifetime string `yaml:"lifetime,omitempty"`
}

var tokensKeys = []yamlx.Key{{Name: "lifetime", Example: "24h"}}

// readTokens leaves what is not written at zero, which means the default.
func readTokens(v yamlx.Value) time.Duration {
	m, _ := v.Map(tokensKeys...)
	if !m.Has("lifetime") {
		return 0
	}
	return readDuration(m.Get("lifetime"), "lifetime", TokenLifetime, minTokenLifetime, maxTokenLifetime)
}

func writeTokens(lifetime time.Duration) tokensFile {
	if lifetime == 0 {
		return tokensFile{}
	}
	return tokensFile{Lifetime: lifetime.String()}
}
