// Package deploy carries the files that an installed tagout needs without its source tree: the example cards
// and the card schema.
package deploy

import "embed"

// Cards holds the example cards, and those that Tagout itself spawns: drill, contain and tagout-proof.
//
//go:embed cards/*.yaml
var Cards embed.FS

// CardSchema is the JSON Schema of job card v1.
//
//go:embed schema/card-v1.json
var CardSchema []byte
