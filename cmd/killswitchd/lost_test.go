package main

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/bpf"
	"tagout/internal/bootclock"
	"tagout/internal/session"
	"tagout/internal/wire"
)

// TestAStopOfAKidWhoseDocumentIsTorn: the real daemon finds the session by the kid's cgroup in the real maps, and cuts
// it; without the kernel's entry it says that it could not.
func TestAStopOfAKidWhoseDocumentIsTorn(t *testing.T) {
	b := newBox(t, "tkillt")
	b.installBPF()
	maps, err := bpf.Open(b.inst.PinDir())
	must(t, err)
	defer maps.Close() // a test
	kids := map[string]*session.Session{}
	for i, name := range []string{"torn", "gone", "nobody"} {
		s := b.kid(name, i+1)
		must(t, maps.PutSession(s.Mark, bpf.SessionEntry{State: bpf.StateActive, Addr: s.Addr}))
		must(t, maps.GrantLease(s.Mark, bootclock.Now()+time.Hour))
		if name != "nobody" {
			must(t, maps.PutKid(s.CgroupID, 0, s.Mark))
		}
		b.spawn(s.Cgroup, "/bin/sleep", "600")
		kids[name] = s
	}
	must(t, os.WriteFile(filepath.Join(b.inst.SessionDir(), "torn.json"), []byte(`{"version":1,"id":`), 0o640))
	must(t, os.WriteFile(filepath.Join(b.inst.SessionDir(), "nobody.json"), nil, 0o640))
	must(t, session.NewStore(b.inst.SessionDir()).Delete("gone"))
	b.start()
	for name, want := range map[string]wire.State{"torn": wire.StateObserved, "gone": wire.StateObserved, "nobody": wire.StateFailed} {
		rep, err := b.stop(wire.StopRequest{Scope: wire.Scope{Kid: name}, Layers: []wire.Layer{wire.LayerSession, wire.LayerNetwork}, By: "ada"}, nil)
		must(t, err)
		if got := rep.Layers[wire.LayerNetwork]; got.State != want || rep.Layers[wire.LayerSession].State != wire.StateObserved {
			t.Errorf("%s: %+v, want the network layer %s", name, rep.Layers, want)
		}
		e, err := maps.Session(kids[name].Mark)
		if stopped := e.State == bpf.StateStopped; err != nil || stopped != (want == wire.StateObserved) || !b.empty(kids[name].Cgroup) {
			t.Errorf("%s: session %+v, %v", name, e, err)
		}
	}
}
