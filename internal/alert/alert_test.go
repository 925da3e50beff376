package alert

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"tagout/internal/alert/alerttest"
	"tagout/internal/audit"
	"tagout/internal/logtail"
	"tagout/internal/reason"
)

// numbers is the metrics of a test.
type numbers struct {
	mu            sync.Mutex
	sent, failed  map[string]int    // guarded by mu
	dropped       map[string]uint64 // guarded by mu
	waiting, most map[string]int    // guarded by mu
	gaps          map[string]uint64 // by daemon; guarded by mu
}

func newNumbers() *numbers {
	return &numbers{sent: map[string]int{}, failed: map[string]int{}, dropped: map[string]uint64{}, waiting: map[string]int{}, most: map[string]int{}, gaps: map[string]uint64{}}
}

func (n *numbers) AlertSent(s string)   { n.mu.Lock(); defer n.mu.Unlock(); n.sent[s]++ }
func (n *numbers) AlertFailed(s string) { n.mu.Lock(); defer n.mu.Unlock(); n.failed[s]++ }
func (n *numbers) AlertsDropped(s string, by uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.dropped[s] += by
}
func (n *numbers) AlertsWaiting(s string, alerts int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.waiting[s], n.most[s] = alerts, max(n.most[s], alerts)
}

func (n *numbers) AuditGap(daemon string, by uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gaps[daemon] += by
}

func (n *numbers) of(s string) (sent, failed int, dropped uint64) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.sent[s], n.failed[s], n.dropped[s]
}

// bench is a daemon's log and a follower's configuration.
type bench struct {
	t       *testing.T
	path    string
	log     *audit.Logger
	cfg     Config
	numbers *numbers
}

func newBench(t *testing.T, sinks ...Sink) *bench {
	t.Helper()
	dir := t.TempDir()
	b := &bench{t: t, path: filepath.Join(dir, "audit", "x", "x.jsonl"), numbers: newNumbers()}
	if err := os.MkdirAll(filepath.Dir(b.path), 0o700); err != nil {
		t.Fatal(err)
	}
	var err error
	b.log, err = audit.Open(b.path, "test", "x")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.log.Close() })
	for i := range sinks {
		if sinks[i].Window == 0 {
			sinks[i].Window = 300 * time.Millisecond
		}
		if sinks[i].Timeout == 0 {
			sinks[i].Timeout = 5 * time.Second
		}
		if sinks[i].Queue == 0 {
			sinks[i].Queue = 1024
		}
	}
	b.cfg = Config{Dir: filepath.Join(dir, "audit"), Sinks: sinks, Cursor: filepath.Join(dir, "cursor"),
		Log: slog.New(slog.DiscardHandler), Audit: b.log, Metrics: b.numbers}
	return b
}

// run runs a follower until the returned function is called.
func (b *bench) run() (stop func()) {
	b.t.Helper()
	f, err := New(b.cfg)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.t.Context())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			b.t.Error(err)
		}
	}
}

// deny logs a denied attempt of a kid towards a port.
func (b *bench) deny(kid string, port int, count uint64) {
	b.log.Log(audit.Record{Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny, Kid: kid, Reason: reason.RawAddress, Count: count,
		Dst: &audit.Dst{Addr: netip.MustParseAddr("203.0.113.7"), Port: uint16(port), Proto: "tcp"}, Detail: fmt.Sprint(port)})
}

func hookSink(name string, h *alerttest.Hook) Sink {
	return Sink{Name: name, Kind: Webhook, URL: h.URL}
}

// told sums what a hook was told, all kids and destinations together.
func told(h *alerttest.Hook) (alerts int, attempts uint64) {
	got, _ := h.Got()
	for _, p := range got {
		attempts += p.Alert.Count
	}
	return len(got), attempts
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("waited 10 s until %s", what)
		}
		time.Sleep(2 * time.Millisecond) // between looks at a condition
	}
}

func untilTold(t *testing.T, h *alerttest.Hook, attempts uint64) {
	t.Helper()
	until(t, fmt.Sprintf("%d attempts were told", attempts), func() bool { _, n := told(h); return n >= attempts })
	if _, n := told(h); n != attempts {
		t.Fatalf("%d attempts were told, want %d", n, attempts)
	}
}

func TestOnlyDenialsAreAlerted(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	b := newBench(t, hookSink("a", hook))
	defer b.run()()
	b.log.Log(audit.Record{Event: audit.EventLookup, Outcome: audit.OutcomeAllow, Detail: `"outcome":"deny"`})
	b.deny("otter", 80, 0)
	untilTold(t, hook, 1)
	got, _ := hook.Got()
	if p := got[0]; p.Kid != "otter" || p.Reason != "raw-address" || p.Alert.Destination != "203.0.113.7:80" || p.Alert.Repeat || p.Count != 0 {
		t.Errorf("alert %+v", p)
	}
}

// TestRepeatsAreCounted: the first attempt leaves at once, the others as summaries with their exact number.
func TestRepeatsAreCounted(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	b := newBench(t, hookSink("a", hook))
	defer b.run()()
	b.deny("otter", 80, 0)
	untilTold(t, hook, 1)
	for range 99 {
		b.deny("otter", 80, 0)
	}
	b.deny("otter", 80, 900) // a record that stands for many
	b.deny("otter", 81, 0)   // another destination
	b.deny("stoat", 80, 0)   // another kid
	untilTold(t, hook, 1002)
	alerts := 0
	got, _ := hook.Got()
	for i, p := range got {
		if p.Kid != "otter" || p.Alert.Destination != "203.0.113.7:80" {
			continue
		}
		alerts++
		if p.Alert.Repeat != (i > 0) || p.Alert.Count > 1 && p.Count != p.Alert.Count || p.Alert.Last.Before(p.Alert.First) {
			t.Errorf("alert %+v", p)
		}
	}
	if alerts > 10 {
		t.Errorf("%d alerts for one destination: nothing was summed up", alerts)
	}
}

// TestManyDestinationsAreBounded: a kid that tries everything makes a bounded number of alerts.
func TestManyDestinationsAreBounded(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	sink := hookSink("a", hook)
	sink.Window = time.Hour
	b := newBench(t, sink)
	f, err := New(b.cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, now := f.lanes[0], time.Now()
	for i := range 20_000 {
		r := audit.Record{Kid: fmt.Sprint("kid", i%40), Reason: reason.RawAddress, Dst: &audit.Dst{Name: fmt.Sprintf("x%d.test", i)}}
		l.add(&r, place{"log", int64(i)}, now)
	}
	if n := len(l.windows); n > keysInAll+1 {
		t.Errorf("%d windows", n)
	}
	l.tick(now.Add(2 * time.Hour))
	sum := l.dropped
	for _, a := range l.queue {
		sum += a.count
	}
	if sum != 20_000 || len(l.queue) > sink.Queue+1024 {
		t.Errorf("%d alerts stand for %d attempts", len(l.queue), sum)
	}
	l.tick(now.Add(4 * time.Hour))
	if len(l.windows) != 0 || len(l.kids) != 0 {
		t.Errorf("%d windows and %d kids are kept for ever", len(l.windows), len(l.kids))
	}
}

// TestSlowSinkDelaysNobody: one receiver that never answers, one that is down, one that works.
func TestSlowSinkDelaysNobody(t *testing.T) {
	hook, slow := alerttest.StartHook(t, ""), alerttest.StartHook(t, "")
	release := make(chan struct{})
	slow.Answer(func(alerttest.Posted) int { <-release; return http.StatusOK })
	defer close(release)
	down := Sink{Name: "down", Kind: Webhook, URL: "http://127.0.0.1:1/"}
	b := newBench(t, hookSink("slow", slow), down, hookSink("a", hook))
	defer b.run()()
	for port := range 50 {
		b.deny("otter", 1000+port, 0)
	}
	untilTold(t, hook, 50)
	if n, _ := told(slow); n != 0 {
		t.Errorf("the slow receiver took %d", n)
	}
}

func TestFailingSinkGetsItLater(t *testing.T) {
	for name, status := range map[string]int{"its fault": 500, "not authorised": 401, "moved": 302} {
		t.Run(name, func(t *testing.T) {
			hook := alerttest.StartHook(t, "")
			hook.Answer(func(alerttest.Posted) int { return status })
			b := newBench(t, hookSink("a", hook))
			defer b.run()()
			b.deny("otter", 80, 0)
			until(t, "a failure is counted", func() bool { _, failed, _ := b.numbers.of("a"); return failed > 0 })
			hook.Answer(nil)
			untilTold(t, hook, 1)
		})
	}
}

// drops sums the records of dropped alerts.
func (b *bench) drops() (n uint64) {
	b.t.Helper()
	recs, _, err := audit.Timeline(b.cfg.Dir, func(r *audit.Record) bool { return r.Event == audit.EventAlertDropped })
	if err != nil {
		b.t.Fatal(err)
	}
	for _, r := range recs {
		if r.Fields["sink"] == "" || r.Outcome == audit.OutcomeDeny {
			b.t.Errorf("record %+v", r)
		}
		n += r.Count
	}
	return n
}

// TestRefusedAlertMakesRoom: what a receiver refuses for good is dropped, recorded, and blocks nothing.
func TestRefusedAlertMakesRoom(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	hook.Answer(func(p alerttest.Posted) int {
		if p.Alert.Destination == "203.0.113.7:80" {
			return http.StatusBadRequest
		}
		return http.StatusNoContent
	})
	b := newBench(t, hookSink("a", hook))
	defer b.run()()
	b.deny("otter", 80, 5)
	b.deny("otter", 81, 0)
	untilTold(t, hook, 1)
	until(t, "the drop is recorded", func() bool { return b.drops() == 5 })
	if _, _, dropped := b.numbers.of("a"); dropped != 5 {
		t.Errorf("%d attempts are counted as dropped, want 5", dropped)
	}
}

// TestFullQueueDropsWithARecord: what was told and what was dropped is everything.
func TestFullQueueDropsWithARecord(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	hook.Answer(func(alerttest.Posted) int { return http.StatusServiceUnavailable })
	sink := hookSink("a", hook)
	sink.Queue = 16
	b := newBench(t, sink)
	stop := b.run()
	for port := range 100 {
		b.deny("otter", 1000+port, 3)
	}
	until(t, "the queue is full", func() bool { _, _, dropped := b.numbers.of("a"); return dropped >= 3*(100-17) })
	hook.Answer(nil)
	until(t, "the rest arrived", func() bool { _, n := told(hook); _, _, d := b.numbers.of("a"); return n+d == 300 })
	stop()
	if _, n := told(hook); n+b.drops() != 300 || n == 0 {
		t.Errorf("%d attempts told, %d recorded as dropped, of 300", n, b.drops())
	}
	if b.numbers.most["a"] > 17 || b.numbers.waiting["a"] != 0 {
		t.Errorf("up to %d alerts waited, at the end %d", b.numbers.most["a"], b.numbers.waiting["a"])
	}
}

// TestRestartLosesNothing: each sink goes on where it was, whatever waited and whatever happened in between.
func TestRestartLosesNothing(t *testing.T) {
	fine, down := alerttest.StartHook(t, ""), alerttest.StartHook(t, "")
	down.Answer(func(alerttest.Posted) int { return http.StatusServiceUnavailable })
	b := newBench(t, hookSink("fine", fine), hookSink("down", down))
	stop := b.run()
	b.deny("otter", 80, 0)
	untilTold(t, fine, 1)
	b.deny("otter", 80, 41) // waits for its window's end
	until(t, "the other receiver was tried", func() bool { _, failed, _ := b.numbers.of("down"); return failed > 0 })
	stop()
	b.deny("otter", 81, 0)
	down.Answer(nil)
	defer b.run()()
	untilTold(t, fine, 43)
	untilTold(t, down, 43)
}

// TestWithoutACursorAlertsAreRepeated shows what the cursor is for.
func TestWithoutACursorAlertsAreRepeated(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	b := newBench(t, hookSink("a", hook))
	stop := b.run()
	b.deny("otter", 80, 0)
	untilTold(t, hook, 1)
	stop()
	if err := os.Remove(b.cfg.Cursor); err != nil {
		t.Fatal(err)
	}
	defer b.run()()
	untilTold(t, hook, 2)
}

// TestNewSinkIsNotToldOfThePast, also where there was none before it.
func TestNewSinkIsNotToldOfThePast(t *testing.T) {
	old, later := alerttest.StartHook(t, ""), alerttest.StartHook(t, "")
	b := newBench(t, hookSink("later", later))
	sinks := b.cfg.Sinks
	b.deny("otter", 80, 0)
	if err := b.log.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.cfg.Sinks = nil
	stop := b.run()
	until(t, "the log is read", func() bool {
		info, err := os.Stat(b.path)
		raw, _ := os.ReadFile(b.cfg.Cursor)
		return err == nil && strings.Contains(string(raw), fmt.Sprintf(`"pos":%d}`, info.Size()))
	})
	stop()
	b.deny("otter", 81, 0)
	b.cfg.Sinks = []Sink{hookSink("old", old)}
	b.cfg.Sinks[0].Window, b.cfg.Sinks[0].Timeout, b.cfg.Sinks[0].Queue = time.Second, time.Second, 16
	stop = b.run()
	untilTold(t, old, 1)
	stop()
	b.cfg.Sinks = sinks
	b.deny("otter", 82, 0)
	defer b.run()()
	untilTold(t, later, 1)
	if got, _ := later.Got(); got[0].Alert.Destination != "203.0.113.7:82" {
		t.Errorf("told of %s", got[0].Alert.Destination)
	}
}

// TestFirstVersionsCursor: a webhook that an older build served goes on where it was.
func TestFirstVersionsCursor(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	b := newBench(t, hookSink("webhook", hook))
	b.deny("otter", 80, 0)
	if err := b.log.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(b.path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(b.cfg.Cursor, fmt.Appendf(nil, "{%q:%d}", b.path, info.Size()), 0o600); err != nil {
		t.Fatal(err)
	}
	b.deny("otter", 81, 0)
	defer b.run()()
	untilTold(t, hook, 1)
	if got, _ := hook.Got(); got[0].Alert.Destination != "203.0.113.7:81" {
		t.Errorf("told of %s", got[0].Alert.Destination)
	}
}

// TestCutAndReplacedLogs: a log that a full disk cut is read on, another file in its place is read whole.
func TestCutAndReplacedLogs(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	b := newBench(t, hookSink("a", hook))
	defer b.run()()
	line := func(port int) []byte {
		return fmt.Appendf(nil, `{"v":1,"id":"I%d","outcome":"deny","kid":"otter","reason":"quic","dst":{"addr":"203.0.113.7","port":%d}}`+"\n", port, port)
	}
	path := filepath.Join(filepath.Dir(b.path), "y.jsonl")
	whole := append(line(1), line(2)...)
	if err := os.WriteFile(path, append(whole, line(3)...), 0o600); err != nil {
		t.Fatal(err)
	}
	untilTold(t, hook, 3)
	if err := os.Truncate(path, int64(len(whole))); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	until(t, "the cut was noticed", func() bool {
		raw, _ := os.ReadFile(b.cfg.Cursor)
		return strings.Contains(string(raw), fmt.Sprintf(`"pos":%d}`, len(whole)))
	})
	if _, err := f.Write(line(4)); err != nil {
		t.Fatal(err)
	}
	untilTold(t, hook, 4)
	other := path + ".new"
	if err := os.WriteFile(other, append(line(5), line(6)...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	untilTold(t, hook, 6)
}

func TestJunkInALogIsPassedOver(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	b := newBench(t, hookSink("a", hook))
	junk := append(make([]byte, logtail.Chunk+100), '\n')
	junk = append(junk, `{"outcome":"deny","v":"what"}`+"\n"...)
	if err := os.WriteFile(filepath.Join(filepath.Dir(b.path), "y.jsonl"), junk, 0o600); err != nil {
		t.Fatal(err)
	}
	defer b.run()()
	b.deny("otter", 80, 0)
	untilTold(t, hook, 1)
}

// TestGapsAreCounted: of all daemons, with or without receivers, and not again after a restart.
func TestGapsAreCounted(t *testing.T) {
	b := newBench(t)
	b.log.Log(audit.Record{Event: audit.EventGap, Count: 5})
	b.log.Log(audit.Record{Event: audit.EventLookup, Detail: `"event":"audit.gap"`})
	stop := b.run()
	counted := func() uint64 { b.numbers.mu.Lock(); defer b.numbers.mu.Unlock(); return b.numbers.gaps["x"] }
	until(t, "the gap is counted", func() bool { return counted() == 5 })
	stop()
	b.log.Log(audit.Record{Event: audit.EventGap, Count: 2})
	defer b.run()()
	until(t, "the new gap is counted", func() bool { return counted() >= 7 })
	if n := counted(); n != 7 {
		t.Errorf("%d missing records are counted, want 7", n)
	}
}
