package main

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"tagout/internal/wire"
)

// maxLampTags is how many tags a lamp names.
const maxLampTags = 3

// lampText is what the lamp of one layer says in words.
func lampText(l wire.Layer, st layerStatus, tags []wire.Tag) string {
	var more []string
	if st.State != wire.LampDegraded && st.Detail != "" {
		more = append(more, st.Detail)
	}
	if st.Proof != nil && st.Proof.Passed {
		more = append(more, "proven "+ago(st.Proof.Age)+" ago")
	}
	hanging := tagTexts(l, tags)
	switch st.State {
	case wire.LampArmed:
		return "ARMED, " + strings.Join(more, "; ")
	case wire.LampStopped:
		return strings.Join(append([]string{"STOPPED: " + hanging}, more...), "; ")
	}
	text := "DEGRADED: " + st.Detail
	if hanging != "" {
		text += "; demanded by " + hanging
	}
	return text
}

// tagTexts names the tags that demand a layer.
func tagTexts(l wire.Layer, tags []wire.Tag) string {
	var out []string
	for _, t := range tags {
		if slices.Contains(t.Layers, l) {
			out = append(out, fmt.Sprintf("tag %s on %s by %s", t.Stop, scopeText(t.Scope), t.By))
		}
	}
	if n := len(out) - maxLampTags; n > 0 {
		out = append(out[:maxLampTags], fmt.Sprintf("and %s more", count(n, "tag")))
	}
	return strings.Join(out, ", ")
}

// ago is an age that people can read.
func ago(d time.Duration) string {
	if d < time.Second {
		return "less than a second"
	}
	return d.Round(time.Second).String()
}
