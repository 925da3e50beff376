package drill

import (
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"tagout/internal/card"
	"tagout/internal/wire"
)

// Technique is one way in which the agent resists. cmd/hostile holds the registry, a file each.
type Technique struct {
	Name   string       `json:"name"`
	What   string       `json:"what"`
	Layers []wire.Layer `json:"layers"`           // which layers it makes hard to stop
	Signs  []Sign       `json:"signs"`            // beside ticks, token uses and replays
	Host   string       `json:"host,omitempty"`   // what is done from outside: "", freeze or disk
	Replay int          `json:"replay,omitempty"` // a second, by the accomplice; 0: 200
}

// Sign is something that must be seen from outside before the order; cmd/hostile says what each counts.
type Sign struct {
	What string `json:"what"`
	N    int64  `json:"n"`
	Via  string `json:"via,omitempty"`
}

func (s Sign) String() string {
	if s.Via != "" {
		return s.What + ":" + s.Via
	}
	return s.What
}

// everything is the technique that is drilled where none is named: all at once.
const everything = "everything"

// AgentFile is the agent within an input directory.
const AgentFile = "hostile"

// Techniques asks the agent at path which techniques it knows. The one with everything comes first.
func Techniques(ctx context.Context, path string) ([]Technique, error) {
	out, err := exec.CommandContext(ctx, path, "techniques").Output()
	var all []Technique
	if err == nil {
		err = json.Unmarshal(out, &all)
	}
	if err != nil {
		return nil, fmt.Errorf("asking %s for its techniques: %w", path, err)
	}
	slices.SortStableFunc(all, func(a, b Technique) int {
		return boolCompare(b.Name == everything, a.Name == everything)
	})
	return all, nil
}

func boolCompare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

// Choose returns the techniques with those names, in the order of all; none means all.
func Choose(all []Technique, names []string) ([]Technique, error) {
	known := make([]string, 0, len(all))
	var out []Technique
	for _, t := range all {
		known = append(known, t.Name)
		if len(names) == 0 || slices.Contains(names, t.Name) {
			out = append(out, t)
		}
	}
	for _, n := range names {
		if !slices.Contains(known, n) {
			return nil, fmt.Errorf("no technique is called %q: use %s", n, strings.Join(known, ", "))
		}
	}
	return out, nil
}

// allAtOnce is the technique of a drill that names none. An agent of any make can play it.
func allAtOnce() Technique {
	return Technique{
		Name: everything, What: "everything at once", Layers: wire.AllLayers(),
		Signs: []Sign{{What: "processes"}, {What: "refused", N: 1}, {What: "bulk", N: leastBulk}},
	}
}

// least is how much of a sign must be seen; a sign without a number goes by the card.
func (c Config) least(s Sign) int64 {
	switch {
	case s.N > 0:
		return s.N
	case s.What == "processes":
		return int64(c.Processes)
	case s.What == "resident":
		return fillable(c.card) * 9 / 10 >> 20
	case s.What == "files":
		return int64(c.card.Limits.OpenFiles) * 9 / 10 // a count of files
	}
	return 1
}

// fillable is how many bytes the agent is told to fill: it must leave room for the rest of the kid.
func fillable(c *card.Card) int64 { return c.Limits.Memory / 2 }

// arguments are those of the agent in the kid.
func (d *duel) arguments() []string {
	argv := append(slices.Clone(d.Agent),
		"-tag", d.kid,
		"-evil", d.Internet.EvilAddr().String(),
		"-evil6", d.Internet.EvilAddr6().String(),
		"-dns", d.Internet.DNSAddr().String()+":53",
	)
	if d.c.technique.Name != everything {
		argv = append(argv, "-technique", d.c.technique.Name, "-memory", fmt.Sprint(fillable(d.card)))
	}
	return argv
}

// agentPath is the agent outside the kid, where it is the drill's own hand.
func (c Config) agentPath() string { return filepath.Join(c.InputDir, AgentFile) }
