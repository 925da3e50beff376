package killswitch

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/bootclock"
	"tagout/internal/reason"
	"tagout/internal/session"
	"tagout/internal/trip"
	"tagout/internal/wire"
)

// gauges are TripSources that a test sets.
type gauges struct {
	mu       sync.Mutex
	denied   int64
	bytes    int64
	err      error // of every reading
	rulesErr error
	rules    []trip.Rule
	stamp    time.Time
}

func (g *gauges) set(fn func()) { g.mu.Lock(); defer g.mu.Unlock(); fn() }

func (g *gauges) get(n *int64) (int64, error) { g.mu.Lock(); defer g.mu.Unlock(); return *n, g.err }

func (g *gauges) Denied(uint32) (int64, error)   { return g.get(&g.denied) }
func (g *gauges) BytesOut(uint32) (int64, error) { return g.get(&g.bytes) }
func (g *gauges) CPUTime(*session.Session) (time.Duration, error) {
	n, err := g.get(&g.bytes)
	return time.Duration(n), err
}
func (g *gauges) Processes(*session.Session) (int64, error) { return g.get(&g.bytes) }
func (g *gauges) Watched(*session.Session) error            { _, err := g.get(&g.bytes); return err }
func (g *gauges) Rules() ([]trip.Rule, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.rules, g.rulesErr
}
func (g *gauges) Stamp() (time.Time, error) { return g.stamp, nil }

// tripRig is a rig with trip rules. Its looks are the test's own: nothing runs by itself.
type tripRig struct {
	*rig
	*gauges
	logs string
	keep string
	sw1  *Switch
	t1   *Trips
}

func newTripRig(t *testing.T, rules ...trip.Rule) *tripRig {
	g := &tripRig{rig: newRig(t, "k1", "k2"), gauges: &gauges{rules: []trip.Rule{}, stamp: time.Now()}, logs: t.TempDir(), keep: filepath.Join(t.TempDir(), "counted.json")}
	for _, d := range g.docs {
		d.Boot = bootclock.Now()
	}
	g.docs["k1"].Stop.Trip = rules
	g.restart()
	return g
}

// restart takes over what was kept, as another killswitchd would.
func (g *tripRig) restart() {
	g.sw1 = g.sw()
	g.t1 = g.sw1.Trips(TripConfig{Sources: g.gauges, Logs: g.logs, Keep: g.keep})
	g.t1.facts.fresh = bootclock.Now()
}

// tags waits for stops under way and returns the reasons of the kid's tags.
func (g *tripRig) tags(kid string) []string {
	g.t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !g.sw1.Idle() {
		if time.Now().After(deadline) {
			g.t.Fatal("a stop does not end")
		}
		time.Sleep(time.Millisecond)
	}
	var out []string
	for _, t := range g.sw1.Tags() {
		if t.Scope.Kid == kid {
			out = append(out, t.Reason)
		}
	}
	return out
}

func (g *tripRig) want(kid string, reasons ...string) {
	g.t.Helper()
	got := g.tags(kid)
	if len(got) != len(reasons) {
		g.t.Fatalf("%s has the tags %q, want %q", kid, got, reasons)
	}
	for i := range got {
		if !strings.HasPrefix(got[i], reasons[i]) {
			g.t.Errorf("%s has the tag %q, want %q", kid, got[i], reasons[i])
		}
	}
}

func everything(r trip.Rule) trip.Rule { r.Fires = wire.AllLayers(); return r }

// TestTripFiresOnceForAllThatTrips: rules that trip together and fire the same layers share a stop, and a killswitchd
// that is started again fires nothing a second time.
func TestTripFiresOnceForAllThatTrips(t *testing.T) {
	t.Parallel()
	net := trip.Rule{On: trip.Processes, Over: 5, Fires: []wire.Layer{wire.LayerNetwork}}
	g := newTripRig(t, everything(trip.Rule{On: trip.BytesOut, Over: 9}), everything(trip.Rule{On: trip.Denied, Over: 3, Within: time.Minute}), net)
	g.set(func() { g.bytes, g.denied = 5, 3 })
	g.t1.look(bootclock.Now())
	g.want("k1")
	g.set(func() { g.bytes, g.denied = 10, 4 })
	g.t1.look(bootclock.Now())
	if got := g.tags("k1"); len(got) != 2 {
		t.Fatalf("tags %q, want one of two rules and one of the third", got)
	}
	g.want("k2")
	for _, tag := range g.sw1.Tags() {
		if tag.By != "trip rule" || tag.Cause != CauseTrip {
			t.Errorf("tag %+v", tag)
		}
		if len(tag.Layers) == 3 && tag.Reason != "trip rule bytesOut over 9 bytes: 10 bytes; trip rule denied over 3 within 1m: 4 denied attempts" {
			t.Errorf("reason %q", tag.Reason)
		}
	}
	g.t1.keep()
	g.stored = map[string]wire.Tag{} // released
	g.restart()
	g.t1.look(bootclock.Now())
	g.want("k1")
	if os.Remove(g.keep) != nil {
		t.Fatal("nothing was kept")
	}
	g.restart()
	g.alive[filepath.Join(kidsDir, "k1")] = 3
	g.t1.look(bootclock.Now())
	if len(g.tags("k1")) == 0 {
		t.Error("without what was kept nothing trips: the restart proved nothing")
	}
}

// TestTripOnWhatCannotBeRead: counters, the box's rules and a kid's document that stay unreadable stop what lives.
func TestTripOnWhatCannotBeRead(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		spoil func(g *tripRig)
		want  string
	}{
		"counters":    {func(g *tripRig) { g.err = errors.New("the BPF maps are not open") }, "trip rule bytesOut over 9 bytes: unknown for more than 10s: the BPF maps are not open"},
		"box's rules": {func(g *tripRig) { g.rulesErr = fs.ErrNotExist }, "trip rule unreadable: unknown for more than 10s: "},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newTripRig(t, everything(trip.Rule{On: trip.BytesOut, Over: 9}))
			c.spoil(g)
			now := bootclock.Now()
			for _, after := range []time.Duration{0, trip.Grace} {
				g.t1.look(now + after)
				g.want("k1")
			}
			g.t1.look(now + trip.Grace + time.Second)
			g.want("k1", c.want)
		})
	}
	t.Run("the rules that were there hold on", func(t *testing.T) {
		t.Parallel()
		g := newTripRig(t)
		g.rules = []trip.Rule{everything(trip.Rule{On: trip.BytesOut, Over: 9})}
		g.t1.look(bootclock.Now())
		g.set(func() { g.rulesErr, g.rules, g.bytes = fs.ErrPermission, nil, 10 })
		g.t1.look(bootclock.Now())
		g.want("k2", "trip rule bytesOut over 9 bytes: 10 bytes")
	})
}

// logLine is a line as the logger writes it.
func logLine(t *testing.T, r audit.Record) []byte {
	t.Helper()
	boot, err := bootclock.Boot()
	if err != nil {
		t.Fatal(err)
	}
	r.Version, r.BootID, r.Boot = 1, boot, bootclock.Now()
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestTripReadsTheLogs: what other daemons record counts for the kid that it is about, once, whatever texts a kid puts
// into it.
func TestTripReadsTheLogs(t *testing.T) {
	t.Parallel()
	g := newTripRig(t)
	k1, k2 := g.docs["k1"], g.docs["k2"]
	deny := func(mark uint32, code reason.Code, n uint64) audit.Record {
		return audit.Record{Event: audit.EventLookup, Mark: mark, Outcome: audit.OutcomeDeny, Reason: code, Count: n, Dst: &audit.Dst{Name: "a.test"}}
	}
	forged := deny(k2.Mark, reason.NameNotAllowed, 0)
	forged.Dst.Name, forged.Detail = `x","mark":1,"count":900,"reason":"canary`, `"event":"audit.gap" "mark":5`
	seccomp := deny(k1.Mark, reason.RawSocket, 2)
	seccomp.Fields = map[string]string{"hook": "seccomp"}
	for _, l := range []struct {
		daemon string
		rec    audit.Record
	}{
		{"dnsfilter", deny(k1.Mark, reason.NameNotAllowed, 0)}, {"proxy", deny(k1.Mark, reason.HostMismatch, 40)},
		{"sandboxd", seccomp}, {"sandboxd", deny(k1.Mark, reason.RawAddress, 7)}, // the kernel's counters have these
		{"credd", deny(k1.Mark, reason.TokenScope, 1)}, // and the proxy's record of the request this
		{"killswitchd", deny(k1.Mark, reason.Tripped, 1)}, {"dnsfilter", forged}, {"dnsfilter", deny(0, reason.UnknownSession, 3)},
	} {
		g.t1.facts.line(logLine(t, l.rec), "/audit/"+l.daemon+"/"+l.daemon+".jsonl", 0)
	}
	now := bootclock.Now()
	for mark, want := range map[uint32]int64{k1.Mark: 43, k2.Mark: 1} {
		if got := g.t1.facts.denied(now, mark); got.Value != want || got.Unknown != "" {
			t.Errorf("%#x: %+v, want %d", mark, got, want)
		}
	}
	canary, misuse, gapRule := everything(trip.Rule{On: trip.Canary}), everything(trip.Rule{On: trip.TokenMisuse}), everything(trip.Rule{On: trip.AuditGap})
	if got := g.t1.facts.seen(now, k2, canary); got.Value != 0 {
		t.Errorf("a forged text is a canary: %+v", got)
	}
	if got := g.t1.facts.seen(now, k1, misuse); got.Value != 1 {
		t.Errorf("a misused token: %+v", got)
	}
	if got := g.t1.facts.seen(now, k1, canary); got.Value != 1 {
		t.Errorf("a misused token is no canary: %+v", got)
	}
	if got := g.t1.facts.seen(now, k1, gapRule); got.Value != 0 {
		t.Errorf("a gap: %+v", got)
	}
	counted := audit.Record{Event: audit.EventGap, Count: 5, Fields: map[string]string{audit.FieldCounted: "flood"}}
	g.t1.facts.line(logLine(t, counted), "/audit/sandboxd/sandboxd.jsonl", 0)
	if got := g.t1.facts.seen(now, k1, gapRule); got.Value != 0 {
		t.Errorf("a gap whose events are counted elsewhere: %+v", got)
	}
	g.t1.facts.line(logLine(t, audit.Record{Event: audit.EventGap, Mark: k2.Mark, Detail: "too much", Fields: map[string]string{audit.FieldBlind: "true"}}), "/audit/sandboxd/sandboxd.jsonl", 0)
	if got := g.t1.facts.seen(now, k1, gapRule); got.Value != 0 {
		t.Errorf("another kid's gap: %+v", got)
	}
	for _, r := range []trip.Rule{gapRule, everything(trip.Rule{On: trip.Exec, Paths: []string{"/x"}}), everything(trip.Rule{On: trip.WriteOutside})} {
		if got := g.t1.facts.seen(now, k2, r); got.Value != 1 || got.Detail != "too much" {
			t.Errorf("%s after a kid outran its watch: %+v", r, got)
		}
	}
	g.t1.facts.line(logLine(t, audit.Record{Event: audit.EventGap, Count: 5, Daemon: "proxy", Detail: "the disk was full"}), "/audit/proxy/proxy.jsonl", 0)
	if got := g.t1.facts.seen(now, k1, gapRule); got.Detail != "5 records of proxy are missing: the disk was full" {
		t.Errorf("a gap: %+v", got)
	}
	if later := (&session.Session{Mark: 99, Boot: bootclock.Now()}); g.t1.facts.seen(now, later, gapRule).Value != 0 {
		t.Error("a session has a gap that was before it")
	}
	g.t1.facts.fresh = now - time.Minute
	if got := g.t1.facts.denied(now, k1.Mark); got.Unknown == "" {
		t.Error("logs that nobody has read for a minute are known")
	}
}

// TestWrittenFiles: what one rule takes for scratch another does not, and more files than are remembered are too many.
func TestWrittenFiles(t *testing.T) {
	t.Parallel()
	g := newTripRig(t)
	d := g.docs["k1"]
	write := func(file string) {
		g.t1.facts.line(logLine(t, audit.Record{Event: audit.EventWriteSeen, Mark: d.Mark, Fields: map[string]string{"path": file}}), "/audit/sandboxd/sandboxd.jsonl", 0)
	}
	strict, lenient := everything(trip.Rule{On: trip.WriteOutside}), everything(trip.Rule{On: trip.WriteOutside, Except: []string{"/dev/shm"}})
	count := func(r trip.Rule) int64 { return g.t1.facts.seen(bootclock.Now(), d, r).Value }
	write("/dev/shm/x")
	if count(strict) != 1 || count(lenient) != 0 {
		t.Errorf("strict %d, lenient %d", count(strict), count(lenient))
	}
	for i := range maxWrote {
		write("/dev/shm/" + strings.Repeat("y", i+1))
	}
	if count(lenient) != 1 {
		t.Error("a rule holds although not every file is known")
	}
	for file, in := range map[string]bool{"/dev/shm": true, "/dev/shm/a": true, "/dev/shmem": false, "/dev/shm/../x": false} {
		if within(file, "/dev/shm") != in {
			t.Errorf("%s is in /dev/shm: %v", file, !in)
		}
	}
}

// TestAKidWhoseRulesNobodyKnows: a kid that lives and whose document cannot be read is stopped after a while; one whose
// document is there is not.
func TestAKidWhoseRulesNobodyKnows(t *testing.T) {
	t.Parallel()
	g := newTripRig(t)
	g.t1.docs, g.t1.broken = []*session.Session{g.docs["k2"]}, errors.New("session document of k1: torn")
	now := bootclock.Now()
	for _, after := range []time.Duration{0, trip.Grace} {
		g.t1.lookAtStrays(now+after, map[string]bool{})
		g.want("k1")
	}
	g.t1.lookAtStrays(now+trip.Grace+time.Second, map[string]bool{})
	g.want("k1", "trip rule unreadable: unknown for more than 10s: its session document cannot be read: ")
	g.want("k2")
}
