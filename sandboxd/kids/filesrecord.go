package kids

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"strconv"
	"time"

	"tagout/internal/audit"
	"tagout/internal/wire"
	"tagout/sandboxd/filelog"
	"tagout/sandboxd/image"
	"tagout/sandboxd/manifest"
	"tagout/sandboxd/runtime"
)

// Bounds of the list of a kid's files at its end. Nobody waits for it for longer than listWait.
var listLimits = manifest.Limits{Time: 250 * time.Millisecond, Entries: 4096, Depth: 64, Bytes: 64 << 20}

const (
	listWait   = 400 * time.Millisecond
	listInEach = 50      // entries in one record, at most
	listBytes  = 6 << 10 // of the entries in one record, the last left out: the log would cut a longer text
)

// places are the file systems in which the kid may write, while its first process is there.
func (m *Manager) places(k *kid) []filelog.Place {
	out := m.ownPlaces(k)
	if k.pid != 0 {
		for _, dir := range []string{"/tmp", "/dev/shm"} {
			out = append(out, filelog.Place{Dir: fmt.Sprintf("/proc/%d/root%s", k.pid, dir), As: dir})
		}
	}
	return out
}

// ownPlaces are those that are mounted on the host.
func (m *Manager) ownPlaces(k *kid) []filelog.Place {
	out := []filelog.Place{{Dir: m.workspaceDir(k), As: runtime.Home}}
	parts := image.Parts(m.layersDir(k))
	if parts == nil {
		return out
	}
	layer := filelog.Place{Dir: m.layersDir(k), As: "/"}
	for _, p := range parts {
		layer.Parts = append(layer.Parts, filelog.Part(p))
	}
	return append(out, layer)
}

// recordFiles begins to record what is done to the kid's files. A proof's kid does nothing.
func (m *Manager) recordFiles(k *kid, late bool) {
	if m.cfg.FileLog != nil && !wire.IsProofKid(k.name) {
		m.cfg.FileLog.Add(&k.rec.Session, m.places(k), late)
	}
}

// listing is the list of a kid's files that is being made.
type listing struct {
	done chan *manifest.Manifest
	told bool // it is recorded, or never will be
}

// listFiles ends the record of what is done to the kid's files, of which nothing runs any more, and begins to list them.
// Whoever has the rest of the kid to take apart does not wait for it.
func (m *Manager) listFiles(k *kid) {
	if m.cfg.FileLog == nil || wire.IsProofKid(k.name) {
		return
	}
	tops := m.cfg.FileLog.End(k.rec.Session.ID)
	if k.listing != nil || !k.rec.Whole {
		closeTops(tops) // an earlier try began, or there was never a kid
		return
	}
	if tops == nil {
		tops = m.leftTops(k)
	}
	roots := make([]manifest.Root, len(tops))
	for i, t := range tops {
		roots[i] = manifest.Root{Dir: t.Dir, As: t.As}
		for _, p := range t.Parts {
			roots[i].Parts = append(roots[i].Parts, manifest.Part(p))
		}
	}
	k.listing = &listing{done: make(chan *manifest.Manifest, 1)}
	go func() {
		defer closeTops(tops)
		k.listing.done <- manifest.Make(context.Background(), roots, listLimits)
	}()
}

// leftTops opens what is left of the kid's places where nobody recorded what was done in them.
func (m *Manager) leftTops(k *kid) []filelog.Root {
	var out []filelog.Root
	for _, p := range m.ownPlaces(k) {
		if dir, err := os.Open(p.Dir); err == nil { // what is gone cannot be listed
			out = append(out, filelog.Root{Dir: dir, As: p.As, Parts: p.Parts})
		}
	}
	return out
}

func closeTops(tops []filelog.Root) {
	for _, t := range tops {
		t.Dir.Close() // only read
	}
}

// recordListing records the list of the kid's files and returns what its last record says of it.
func (m *Manager) recordListing(k *kid) map[string]string {
	if k.listing == nil || k.listing.told {
		return nil
	}
	k.listing.told = true
	var list *manifest.Manifest
	select {
	case list = <-k.listing.done:
	case <-time.After(listWait):
		return map[string]string{"manifest_left_out": "all: listing the files took too long"}
	}
	sum := sha256.New()
	for at := 0; at < len(list.Entries); {
		first, text := at+1, ""
		for ; at < len(list.Entries) && at+1-first < listInEach && len(text) < listBytes; at++ {
			text += list.Entries[at] + "\n"
		}
		if m.cfg.Redact != nil {
			text = m.cfg.Redact(text)
		}
		sum.Write([]byte(text))
		m.log(k, audit.Record{Event: audit.EventFileManifest, Outcome: audit.OutcomeOK, Fields: map[string]string{
			"entries": text, "first": strconv.Itoa(first), "of": strconv.Itoa(len(list.Entries)),
		}})
	}
	out := map[string]string{"manifest_sha256": hex.EncodeToString(sum.Sum(nil)), "manifest_entries": strconv.Itoa(len(list.Entries))}
	if left := list.Left(); left != "" {
		out["manifest_left_out"] = left
	}
	return out
}
