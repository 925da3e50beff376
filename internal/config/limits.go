package config

import "tagout/internal/yamlx"

// KidLimits bound how many kids there are, and what one kid may ask of the daemons that all kids share. 0 means the
// daemon's own default.
type KidLimits struct {
	Kids         int `yaml:"kids,omitempty"`         // at once, whatever state they are in
	KidsPerOwner int `yaml:"kidsPerOwner,omitempty"` // of these, with one owner in their cards

	Queries     int  `yaml:"queriesPerSecond,omitempty"` // DNS; twice as many at once
	Connections int  `yaml:"connections,omitempty"`      // through the proxy, open at once
	Opens       int  `yaml:"opensPerSecond,omitempty"`   // new connections through the proxy; twice as many at once
	Buffered    Size `yaml:"bufferedBytes,omitempty"`    // that the proxy keeps for all of a kid's connections
}

// DefaultOpens is the default of opensPerSecond.
const DefaultOpens = 500

// OpensPerSecond is how many connections a second the proxy accepts from one kid on average.
func (l KidLimits) OpensPerSecond() int {
	if l.Opens == 0 {
		return DefaultOpens
	}
	return l.Opens
}

// Size is a number of bytes, a multiple of 1 KiB. In the file it has a unit: 128MiB.
type Size int64

// MarshalYAML implements yaml.InterfaceMarshaler.
func (s Size) MarshalYAML() (any, error) { return yamlx.FormatSize(int64(s)), nil }

var kidLimitKeys = []yamlx.Key{
	{Name: "kids", Example: "255"},
	{Name: "kidsPerOwner", Example: "100"},
	{Name: "queriesPerSecond", Example: "500"},
	{Name: "connections", Example: "1024"},
	{Name: "opensPerSecond", Example: "500"},
	{Name: "bufferedBytes", Example: "128MiB"},
}

// maxKidLimit is far above what the daemons manage.
const maxKidLimit = 100_000_000

// Below minBuffered a kid could not have one inspected HTTP/2 connection (3 MiB), above maxBuffered there is no limit.
const (
	minBuffered = 4 << 20
	maxBuffered = 64 << 30
)

func readKidLimits(v yamlx.Value) KidLimits {
	m, _ := v.Map(kidLimitKeys...)
	buffered, _ := m.Get("bufferedBytes").Size(minBuffered, maxBuffered)
	return KidLimits{
		Kids:         readKidLimit(m.Get("kids")),
		KidsPerOwner: readKidLimit(m.Get("kidsPerOwner")),
		Queries:      readKidLimit(m.Get("queriesPerSecond")),
		Connections:  readKidLimit(m.Get("connections")),
		Opens:        readKidLimit(m.Get("opensPerSecond")),
		Buffered:     Size(buffered),
	}
}

// readKidLimit returns 0 where there is no value or a wrong one.
func readKidLimit(v yamlx.Value) int {
	n, ok := v.Int()
	switch {
	case !ok:
		return 0
	case n < 1 || n > maxKidLimit:
		v.Refuse("write a number from 1 to 100000000, or remove it for the default", "%d is no limit", n)
		return 0
	}
	return int(n)
}
