package killswitch

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"time"

	"tagout/internal/bootclock"
	"tagout/internal/logtail"
	"tagout/internal/trip"
)

// keepEvery is how often what was counted is written down.
const keepEvery = time.Second

const tripKeepVersion = 1

// tripKept is what outlives killswitchd, though not the machine: without it a killswitchd that was started again
// would fire twice, miss what happened meanwhile, and not notice a log that was cut.
type tripKept struct {
	Version int                     `json:"v"`
	BootID  string                  `json:"boot_id"`
	Kids    map[string]*trip.Kid    `json:"kids"`
	Marks   map[string]logtail.Mark `json:"marks"`
	Facts   map[uint32]*facts       `json:"facts"`
	Gap     gapSeen                 `json:"gap"`
}

// load takes over what a predecessor kept. Without it the logs are read from their beginning: nothing is missed,
// and what belongs to sessions that are gone counts for nobody.
func (t *Trips) load() {
	t.facts.bootID, _ = bootclock.Boot() // "" where it is not known, as in the records
	raw, err := os.ReadFile(t.cfg.Keep)
	var k tripKept
	if err == nil {
		err = json.Unmarshal(raw, &k)
	}
	switch {
	case errors.Is(err, fs.ErrNotExist):
		t.skipPast()
		return
	case err != nil:
		t.log.Error("reading what trip rules have counted; counting again", "error", err)
		return
	case k.Version != tripKeepVersion || k.BootID != t.facts.bootID:
		t.skipPast() // another boot
		return
	}
	if k.Kids != nil {
		t.kids = k.Kids
	}
	t.facts.marks, t.facts.byMark, t.facts.gap = k.Marks, k.Facts, k.Gap
	t.kept = raw
}

// skipPast begins at the logs' ends where there is no session that their past could be about: logs grow old.
func (t *Trips) skipPast() {
	if docs, err := t.s.cfg.Sessions.Load(); err == nil && len(docs) == 0 {
		t.facts.marks = logtail.Ends(t.cfg.Logs)
	}
}

// keep writes down what was counted, where that is new. The directory is in memory: no disk is waited for.
func (t *Trips) keep() {
	t.keptAt = time.Now()
	raw, err := t.encode()
	if err == nil && bytes.Equal(raw, t.kept) {
		return
	}
	if err == nil {
		err = os.WriteFile(t.cfg.Keep+".new", raw, 0o600)
	}
	if err == nil {
		err = os.Rename(t.cfg.Keep+".new", t.cfg.Keep)
	}
	if err != nil {
		t.log.Error("keeping what trip rules have counted: a killswitchd that is started again counts anew", "error", err)
		return
	}
	t.kept = raw
}

func (t *Trips) encode() ([]byte, error) {
	b := &t.facts
	b.mu.Lock()
	defer b.mu.Unlock()
	return json.Marshal(tripKept{Version: tripKeepVersion, BootID: b.bootID, Kids: t.kids, Marks: b.marks, Facts: b.byMark, Gap: b.gap})
}
