package trip

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/wire"
)

func all(r Rule) Rule { r.Fires = wire.AllLayers(); return r }

// TestWindowsNeitherMissNorInvent compares windows with the whole history: what fits into no window may be missed by
// nobody, and what trips was there within a window that is at most a 64th and a tick longer.
func TestWindowsNeitherMissNorInvent(t *testing.T) {
	t.Parallel()
	const tick = 250 * time.Millisecond
	for seed := range uint64(400) {
		rng := rand.New(rand.NewPCG(seed, 1))
		within := time.Duration(1+rng.IntN(120)) * time.Second
		rule := all(Rule{On: Denied, Over: int64(rng.IntN(40)), Within: within})
		slack := within/slots + tick
		var k Kid
		var events []time.Duration
		total := int64(0)
		for now := tick; now < 4*within; now += tick {
			if rng.IntN(8) == 0 {
				for range rng.IntN(12) {
					events = append(events, now-time.Duration(rng.Int64N(int64(tick))))
					total++
				}
			}
			trips := k.Look(now, 0, true, []Rule{rule}, func(Rule) Reading { return Reading{Value: total} })
			in := func(span time.Duration) (n int64) {
				for _, at := range events {
					if at > now-span {
						n++
					}
				}
				return n
			}
			if len(trips) == 0 && in(within) > rule.Over {
				t.Fatalf("seed %d: %d attempts within %v at %v, and %s did not trip", seed, in(within), within, now, rule)
			}
			if len(trips) > 0 && in(within+slack) <= rule.Over {
				t.Fatalf("seed %d: %s tripped at %v with %d attempts within %v", seed, rule, now, in(within+slack), within+slack)
			}
			if n := len(k.window(rule.Key()).At); n > slots+2 {
				t.Fatalf("seed %d: a window remembers %d moments", seed, n)
			}
			if len(trips) > 0 {
				break
			}
		}
	}
}

// TestARuleTripsOnce, also when what is remembered went through JSON in between, as it does over a restart.
func TestARuleTripsOnce(t *testing.T) {
	t.Parallel()
	rules := []Rule{all(Rule{On: BytesOut, Over: 10}), all(Rule{On: Canary}), all(Rule{On: CPUTime, Over: int64(time.Second)})}
	read := func(r Rule) Reading {
		return map[string]Reading{BytesOut: {Value: 11}, Canary: {Value: 1, Detail: "vault.corp.example was asked for"}, CPUTime: {Value: int64(time.Second)}}[r.On]
	}
	var k Kid
	trips := k.Look(1, 0, true, rules, read)
	if len(trips) != 2 || trips[0].Reason() != "trip rule bytesOut over 10 bytes: 11 bytes" || trips[1].Reason() != "trip rule canary: vault.corp.example was asked for" {
		t.Fatalf("%+v", trips)
	}
	raw, err := json.Marshal(k)
	if err != nil {
		t.Fatal(err)
	}
	var back Kid
	if err := json.Unmarshal(raw, &back); err != nil {
		t.Fatal(err)
	}
	if again := back.Look(2, 0, true, rules, read); len(again) != 0 {
		t.Errorf("tripped again: %+v", again)
	}
}

// TestWhatCannotBeReadTripsAfterAWhile, but not in a kid in which nothing runs, and not where it came back.
func TestWhatCannotBeReadTripsAfterAWhile(t *testing.T) {
	t.Parallel()
	rule := all(Rule{On: BytesOut, Over: 10})
	unknown := func(Rule) Reading { return Reading{Unknown: "the BPF maps are not open"} }
	known := func(Rule) Reading { return Reading{} }
	var k Kid
	step := func(at time.Duration, alive bool, read func(Rule) Reading) []Trip {
		return k.Look(at, 0, alive, []Rule{rule}, read)
	}
	for _, s := range []struct {
		at    time.Duration
		alive bool
		read  func(Rule) Reading
	}{{1, true, unknown}, {1 + Grace, true, unknown}, {2 + Grace, true, known}, {3 + Grace, true, unknown}, {4 + 2*Grace, false, unknown}, {5 + 2*Grace, true, unknown}, {5 + 3*Grace, true, unknown}} {
		if trips := step(s.at, s.alive, s.read); len(trips) != 0 {
			t.Fatalf("at %v: %+v", s.at, trips)
		}
	}
	trips := step(6+3*Grace, true, unknown)
	if len(trips) != 1 || !trips[0].Unknown || !strings.Contains(trips[0].Reason(), "unknown for more than 10s: the BPF maps are not open") {
		t.Fatalf("%+v", trips)
	}
}

// TestANewRuleCountsFromNow: what an old kid did before anybody counted is not held against it, what a young one did is.
func TestANewRuleCountsFromNow(t *testing.T) {
	t.Parallel()
	rule := all(Rule{On: Denied, Over: 5, Within: time.Minute})
	read := func(n int64) func(Rule) Reading { return func(Rule) Reading { return Reading{Value: n} } }
	var old, young Kid
	if trips := old.Look(time.Hour, 0, true, []Rule{rule}, read(100)); len(trips) != 0 {
		t.Errorf("%+v", trips)
	}
	if trips := old.Look(time.Hour+time.Second, 0, true, []Rule{rule}, read(106)); len(trips) != 1 || trips[0].Measured != "6" {
		t.Errorf("%+v", trips)
	}
	if trips := young.Look(30*time.Second, 0, true, []Rule{rule}, read(6)); len(trips) != 1 {
		t.Errorf("%+v", trips)
	}
}

func TestTexts(t *testing.T) {
	t.Parallel()
	for want, r := range map[string]Rule{
		"denied over 20 within 1m":       {On: Denied, Over: 20, Within: time.Minute},
		"bytesOut over 1GiB":             {On: BytesOut, Over: 1 << 30},
		"wallTime over 2h":               {On: WallTime, Over: int64(2 * time.Hour)},
		"cpuTime over 1m30s":             {On: CPUTime, Over: int64(90 * time.Second)},
		"processes over 200":             {On: Processes, Over: 200},
		"canary":                         {On: Canary, Names: []string{"a.example"}},
		"exec of /usr/bin/a, /usr/bin/b": {On: Exec, Paths: []string{"/usr/bin/a", "/usr/bin/b"}},
	} {
		if got := r.String(); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for _, on := range Kinds() {
		if on == Unreadable || (Rule{On: on}).String() == "" {
			t.Errorf("kind %q", on)
		}
	}
	a, b := all(Rule{On: Canary}), Rule{On: Canary, Fires: []wire.Layer{wire.LayerNetwork}}
	if a.Key() == b.Key() {
		t.Error("rules that fire different layers are taken for one")
	}
	if got := Layers([]Trip{{Rule: b}, {Rule: Rule{Fires: []wire.Layer{wire.LayerSession}}}}); !slices.Equal(got, []wire.Layer{wire.LayerSession, wire.LayerNetwork}) {
		t.Errorf("layers %v", got)
	}
}
