package kids

import (
	"strings"
	"testing"

	"tagout/internal/wire"
)

// TestMadeUpNamesAreNotTagged: a kid whose name was made up is not refused for a tag on a kid of that name long ago.
func TestMadeUpNamesAreNotTagged(t *testing.T) {
	b := newBox(t, "tsbmadeup")
	for _, a := range adjectives {
		for _, n := range animals {
			b.guards.tags = append(b.guards.tags, wire.Tag{By: "ada", Scope: wire.Scope{Kid: a + "-" + n}})
		}
	}
	if k := b.spawn("", plan()); strings.Count(k.Name, "-") != 2 {
		t.Errorf("%s is tagged", k.Name)
	}
	_, err := b.Spawn(t.Context(), Request{Name: "calm-owl", Purpose: "test", Actor: "test", Plan: plan()})
	if KindOf(err) != Tagged {
		t.Errorf("by that name: %v", err)
	}
}
