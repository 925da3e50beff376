package auditview

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/reason"
)

var noon = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

// box writes logs as daemons do, with times of the test's choice.
type box struct {
	t    *testing.T
	dir  string
	n    int
	boot string
}

func newBox(t *testing.T) *box { return &box{t: t, dir: t.TempDir(), boot: "boot-1"} }

// log appends a record that happened so many milliseconds after noon, by both clocks.
func (b *box) log(daemon string, ms int, r audit.Record) {
	b.t.Helper()
	b.n++
	r.Version, r.ID, r.Instance, r.Daemon, r.BootID = 1, fmt.Sprintf("%026d", b.n), "test", daemon, b.boot
	r.Time, r.Boot = noon.Add(time.Duration(ms)*time.Millisecond), time.Duration(ms)*time.Millisecond
	raw, err := json.Marshal(r)
	if err != nil {
		b.t.Fatal(err)
	}
	b.raw(daemon, string(raw)+"\n")
}

func (b *box) raw(daemon, line string) {
	b.t.Helper()
	dir := filepath.Join(b.dir, daemon)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		b.t.Fatal(err)
	}
	f, err := os.OpenFile(filepath.Join(dir, daemon+".jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		b.t.Fatal(err)
	}
	if _, err := f.WriteString(line); err != nil {
		b.t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) tell(who string) *Story {
	b.t.Helper()
	s, err := Tell(context.Background(), Scanner{Dir: b.dir}, who)
	if err != nil {
		b.t.Fatal(err)
	}
	return s
}

// told is the story as "event detail" lines.
func told(s *Story) []string {
	var out []string
	for _, l := range s.Lines {
		out = append(out, strings.TrimSpace(l.Event+" "+l.Detail))
	}
	return out
}

func of(kid, session, detail string) audit.Record {
	return audit.Record{Event: "x.y", Kid: kid, Session: session, Detail: detail}
}

// twoLives has two sessions under one name, another kid, and a stop of the whole box that met the second session.
func twoLives(t *testing.T) *box {
	b := newBox(t)
	stop := func(event, kid, detail string) audit.Record {
		return audit.Record{Event: event, Kid: kid, Detail: detail, Fields: map[string]string{"stop": "STOP1"}}
	}
	b.log("sandboxd", 0, of("k", "S1", "first"))
	b.log("sandboxd", 10, of("k", "", "nameless of the first"))
	b.log("sandboxd", 20, of("k", "S1", "first ends"))
	b.log("sandboxd", 30, of("k", "S2", "second"))
	b.log("sandboxd", 35, of("other", "S3", "another's"))
	b.log("killswitchd", 40, stop(audit.EventStopReceived, "", "ordered"))
	b.log("killswitchd", 41, stop(audit.EventStopProgress, "k", "fired on k"))
	b.log("killswitchd", 42, stop(audit.EventStopCompleted, "", "over"))
	b.log("proxy", 39, of("k", "S2", "on the road"))
	b.log("dnsfilter", 38, audit.Record{Event: audit.EventGap, Count: 3, Detail: "lost"})
	b.log("dnsfilter", 500, audit.Record{Event: audit.EventGap, Count: 4, Detail: "lost later"})
	b.log("killswitchd", 900, stop(audit.EventTagReleased, "", "released"))
	b.log("killswitchd", 901, audit.Record{Event: audit.EventStopReceived, Detail: "of somebody else", Fields: map[string]string{"stop": "STOP2"}})
	return b
}

func TestAStoryIsWholeAndNobodyElses(t *testing.T) {
	b := twoLives(t)
	second := []string{
		"x.y second", "audit.gap lost", "x.y on the road", "stop.received ordered", "stop.progress fired on k", "stop.completed over", "audit.gap lost later", "tag.released released",
	}
	for who, want := range map[string][]string{
		"S1":    {"x.y first", "x.y nameless of the first", "x.y first ends"},
		"S2":    second,
		"STOP1": second,
		"k":     append([]string{"x.y first", "x.y nameless of the first", "x.y first ends"}, second...),
		"S3":    {"x.y another's"},
	} {
		s := b.tell(who)
		if s == nil {
			t.Errorf("%s: there is no story", who)
			continue
		}
		if got := told(s); !slices.Equal(got, want) {
			t.Errorf("%s:\n got %q\nwant %q", who, got, want)
		}
	}
	if s := b.tell("S2"); !slices.Equal(s.Kids, []string{"k"}) || !slices.Equal(s.Stops, []string{"STOP1"}) || s.Kind != KindSession {
		t.Errorf("%+v", s)
	}
	if s := b.tell("nobody"); s != nil {
		t.Errorf("%q has a story: %q", "nobody", told(s))
	}
}

func TestClosedPiecesAreRead(t *testing.T) {
	b := twoLives(t)
	closed := filepath.Join(b.dir, "sandboxd", "shards", "000000000000-20260504T120000Z.jsonl")
	if err := os.MkdirAll(filepath.Dir(closed), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(b.dir, "sandboxd", "sandboxd.jsonl"), closed); err != nil {
		t.Fatal(err)
	}
	b.log("sandboxd", 50, of("k", "S2", "in the next piece"))
	s := b.tell("S2")
	if got := told(s); len(got) != 9 || !slices.Contains(got, "x.y second") || !slices.Contains(got, "x.y in the next piece") {
		t.Errorf("%q", got)
	}
	for _, l := range s.Lines {
		if l.Detail == "in the next piece" && l.Log == closed {
			t.Error("the live piece was taken for the closed one")
		}
	}
}

// The boot clock decides within a boot, whatever was done to the wall clock; boots follow each other by wall clock.
func TestOrderSurvivesASteppedClock(t *testing.T) {
	b := newBox(t)
	b.log("a", 1000, of("k", "S", "1"))
	b.boot = "boot-2"
	b.log("a", 2000, of("k", "S", "2"))
	lines := b.tell("S").Lines
	at := func(boot string, wall, clock int, detail string) Line {
		return Line{Record: audit.Record{BootID: boot, Time: noon.Add(time.Duration(wall) * time.Second), Boot: time.Duration(clock), Detail: detail}}
	}
	lines = append(lines[:0], at("b2", 100, 1, "4"), at("b1", 0, 1, "1"), at("b1", -3600, 3, "3"), at("b1", 50, 2, "2"), at("b2", 90, 2, "5"))
	Order(lines)
	var got string
	for _, l := range lines {
		got += l.Detail
	}
	if got != "12345" {
		t.Errorf("%s", got)
	}
}

// A record for people is one line that cannot steer their terminal, whatever a kid called itself; fields that this build
// does not know are shown all the same.
func TestALineCannotSteerATerminal(t *testing.T) {
	raw := `{"v":1,"id":"1","time":"2026-05-04T12:00:00Z","event":"connect.denied\u001b[2J","daemon":"d\r","outcome":"\u001b[31m","reason":"raw-address","actor":"\u202eada",
	"process":{"pid":7,"comm":"a\u001b[2J\n"},"dst":{"name":"evil\u202e.test\r"},"detail":"x\ny","fields":{"argv":"sh\t\u009b"},"parent":{"pid":3},"newer":"than\u0007this"}`
	l, ok := Decode([]byte(raw))
	if !ok {
		t.Fatal("no record")
	}
	for _, colour := range []bool{false, true} {
		w := Writer{Colour: colour, Kids: true}
		w.Line(&l) // the day
		line := w.Line(&l)
		if colour {
			for _, own := range []string{"\x1b[0m", "\x1b[2m", "\x1b[36m", "\x1b[32m"} {
				line = strings.ReplaceAll(line, own, "")
			}
		}
		if strings.ContainsAny(line, "\x1b\n\r\t\u202e\u009b\a") {
			t.Errorf("%q", line)
		}
		for _, want := range []string{"raw-address", "evil?.test?", "a?[2J?", "[7]", "x?y", `parent={"pid":3}`, "newer=than?this"} {
			if !strings.Contains(line, want) {
				t.Errorf("%q does not say %q", line, want)
			}
		}
	}
}

func TestALineSaysWhatHappened(t *testing.T) {
	l := Line{Raw: []byte("{}"), Record: audit.Record{
		Time: time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC), Daemon: "sandboxd", Event: audit.EventConnectDenied, Outcome: audit.OutcomeDeny,
		Reason: reason.QUIC, Dst: &audit.Dst{Name: "evil.test", Port: 443, Proto: "udp"}, Process: &audit.Process{PID: 7, Comm: "curl"}, Count: 3, Fields: map[string]string{"hook": "connect4", "a": "b"},
	}}
	const want = "-- 2026-01-02 UTC\n03:04:05.006 sandboxd    connect.denied     deny quic -> evil.test:443/udp by curl[7] x3 a=b hook=connect4"
	if got := new(Writer).Line(&l); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func TestThePageNeedsNothingAndEscapes(t *testing.T) {
	b := twoLives(t)
	b.log("proxy", 45, audit.Record{Event: audit.EventConnOpened, Kid: "k", Session: "S2", Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed,
		Dst: &audit.Dst{Name: `"><script>alert(1)</script><img src=http://evil.test/x>`, Port: 443, Addr: netip.MustParseAddr("198.18.0.1")}, Detail: "</table><b>"})
	var page bytes.Buffer
	if err := b.tell("S2").HTML(&page); err != nil {
		t.Fatal(err)
	}
	text := page.String()
	for _, bad := range []string{"<script", "<img", "<link", "url(", "@import", "</table><b>", "ZgotmplZ"} {
		if strings.Contains(text, bad) {
			t.Errorf("the page holds %q", bad)
		}
	}
	if m := regexp.MustCompile(`<[^>]*\s(src|href|action|on[a-z]+)=`).FindString(text); m != "" {
		t.Errorf("the page holds %q", m)
	}
	for _, want := range []string{"default-src 'none'", "&lt;script&gt;", "STOP1", "7 records of this time are missing", "@media print", `class="bar network bad"`} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not hold %q", want)
		}
	}
	var again bytes.Buffer
	if err := b.tell("S2").HTML(&again); err != nil || again.String() != text {
		t.Errorf("the same logs give another page: %v", err)
	}
}

func TestSearchByFields(t *testing.T) {
	b := newBox(t)
	b.log("proxy", 1, audit.Record{Event: audit.EventConnOpened, Kid: "k", Card: "c", Actor: "Ada \"A\" <a@b>", Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed,
		Dst: &audit.Dst{Name: "API.vendor.test", Real: netip.MustParseAddr("203.0.113.7")}, Detail: `a "quoted" word`})
	b.log("sandboxd", 2, audit.Record{Event: "file.written", Kid: "k2", Session: "S", Fields: map[string]string{"path": "/workspace/x/y"}, Process: &audit.Process{Exe: "/usr/bin/curl"}})
	b.raw("sandboxd", "no record\n")
	for i, c := range []struct {
		q    Query
		want int
	}{
		{Query{}, 2}, {Query{Kid: "k"}, 1}, {Query{Kid: "k", Card: "d"}, 0}, {Query{Events: []string{"conn.*", "nothing"}}, 1}, {Query{Events: []string{"*"}}, 2},
		{Query{Reason: "name-not-allowed"}, 1}, {Query{Outcome: "deny"}, 1}, {Query{Daemon: "sandboxd"}, 1}, {Query{Host: "api.vendor.test."}, 1}, {Query{Host: "*.vendor.test"}, 1},
		{Query{Host: "203.0.113.7"}, 1}, {Query{Host: "vendor.test"}, 0}, {Query{Path: "/workspace/*"}, 1}, {Query{Path: "/usr/bin/curl"}, 1}, {Query{Path: "/workspace"}, 0},
		{Query{Actor: `Ada "A" <a@b>`}, 1}, {Query{Text: `A "QUOTED" w`}, 1}, {Query{Text: "<a@B>"}, 1}, {Query{Text: "missing"}, 0}, {Query{Session: "S"}, 1},
		{Query{Since: noon.Add(2 * time.Millisecond)}, 1}, {Query{Until: noon.Add(2 * time.Millisecond)}, 1},
	} {
		n := 0
		if _, err := (Scanner{Dir: b.dir}).Find(t.Context(), c.q, func(Line) error { n++; return nil }); err != nil || n != c.want {
			t.Errorf("%d: %+v finds %d, want %d: %v", i, c.q, n, c.want, err)
		}
	}
	lines, older, stats, err := Newest(t.Context(), Scanner{Dir: b.dir}, Query{}, 1)
	if err != nil || len(lines) != 1 || lines[0].Kid != "k2" || older != 1 || stats.Unreadable != 1 {
		t.Errorf("%v %d %+v %v", lines, older, stats, err)
	}
}

func TestALineThatIsTooLongOrNotOverHidesNoOther(t *testing.T) {
	b := newBox(t)
	b.raw("a", strings.Repeat("x", 3<<20)+"\n")
	b.log("a", 1, of("k", "S", "after the long one"))
	b.raw("a", `{"v":1,"id":"9","event":"x.y","kid":"k","detail":"not ov`)
	s := b.tell("k")
	if got := told(s); !slices.Equal(got, []string{"x.y after the long one"}) || s.Stats.Unreadable != 1 {
		t.Errorf("%q %+v", got, s.Stats)
	}
	if s.Lines[0].Seq != 1 {
		t.Errorf("it is the log's record %d, want 1", s.Lines[0].Seq)
	}
}

// A stream is in order over all logs, also where there is much more than is held.
func TestAStreamIsInOrder(t *testing.T) {
	b := newBox(t)
	for n := range 3000 {
		b.log([]string{"a", "b", "c"}[n*7%3], n, of("k", "S", fmt.Sprint(n)))
	}
	next := 0
	_, err := Scanner{Dir: b.dir}.Stream(t.Context(), Query{}, func(l *Line) error {
		if l.Detail != fmt.Sprint(next) {
			return fmt.Errorf("%s comes where %d should", l.Detail, next)
		}
		next++
		return nil
	})
	if err != nil || next != 3000 {
		t.Errorf("%d: %v", next, err)
	}
	stop := errors.New("enough")
	if _, err := (Scanner{Dir: b.dir}).Stream(t.Context(), Query{}, func(*Line) error { return stop }); !errors.Is(err, stop) {
		t.Errorf("%v", err)
	}
}

func TestTopicsHaveNames(t *testing.T) {
	if _, err := ParseTopics([]string{"network", "pizza"}); err == nil {
		t.Error("pizza is a topic")
	}
	for event, want := range map[string]string{
		audit.EventLookup: Network, audit.EventConnectDenied: Network, audit.EventFileWritten: Files, audit.EventToolCalled: Tools, audit.EventExecSeen: Processes,
		audit.EventTokenUsed: Identity, audit.EventTripped: Stop, audit.EventTagReleased: Stop, audit.EventKidSpawned: Life, "never.heard": Life, audit.EventGap: Life,
	} {
		if got := Topic(event); got != want {
			t.Errorf("%s is about %s, want %s", event, got, want)
		}
	}
}

// FuzzNothingWantedIsPassedOver: what a look at the raw line rules out does not match either.
func FuzzNothingWantedIsPassedOver(f *testing.F) {
	f.Add("k", "S", "conn.opened", "deny", "Ada", "x", "k")
	f.Add("k\"", "S\\", "a<b", "\u2028", "é", "\x00", "k\"")
	f.Fuzz(func(t *testing.T, kid, session, event, outcome, actor, stop, want string) {
		raw, err := json.Marshal(audit.Record{Event: event, Kid: kid, Session: session, Outcome: outcome, Actor: actor, Fields: map[string]string{"stop": stop}, Reason: reason.NameNotAllowed})
		if err != nil {
			t.Fatal(err)
		}
		l, ok := Decode(raw)
		if !ok {
			return
		}
		for _, q := range []Query{{Who: want}, {Kid: want}, {Session: want}, {Stop: want}, {Outcome: want}, {Actor: want}, {Events: []string{want}}, {Events: []string{want + "*"}}, {Reason: want}} {
			if q.Match(&l) && !holdsOne(raw, q.needles()) {
				t.Errorf("%+v wants %s and passes it over", q, raw)
			}
		}
		if containsFold(raw, want) != bytes.Contains(bytes.ToLower(raw), bytes.ToLower([]byte(want))) && isASCII(string(raw)+want) {
			t.Errorf("%q in %q", want, raw)
		}
	})
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}
