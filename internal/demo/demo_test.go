package demo

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/card"
	"tagout/internal/config"
	"tagout/internal/drill"
	"tagout/internal/instance"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/testroot"
)

func TestParseWay(t *testing.T) {
	w, ok := parseWay("way 5 DNS over TLS: denied after 0.3ms: dial tcp 203.0.113.7:853: connect: operation not permitted")
	if !ok || w.Number != 5 || w.Name != "DNS over TLS" || !w.Denied || w.Took != 300*time.Microsecond || !strings.HasPrefix(w.Got, "dial") {
		t.Errorf("%t %+v", ok, w)
	}
	if w, ok := parseWay("way 1 raw address: GOT OUT after 501.2ms: sent, not refused"); !ok || w.Denied {
		t.Errorf("%t %+v, want one that got out", ok, w)
	}
	for _, line := range []string{"", "whoami: accepted=true", "way 9 x: denied after 1ms: y", "way 0 x: denied after 1ms: y", "way 1 x: perhaps after 1ms: y"} {
		if w, ok := parseWay(line); ok {
			t.Errorf("%q became %+v", line, w)
		}
	}
}

func TestLinesAreCutWhole(t *testing.T) {
	var got []string
	b := &lineBuffer{each: func(l string) { got = append(got, l) }}
	for _, p := range []string{"a", "b\nc\n\nd", "e"} {
		b.add([]byte(p))
	}
	b.flush()
	if fmt.Sprintf("%q", got) != `["ab" "c" "" "de"]` {
		t.Errorf("%q", got)
	}
}

func TestJoinWantsRecordProcessAndAlert(t *testing.T) {
	rec := audit.Record{ID: "01A", Daemon: instance.Sandboxd, Kid: kidName, Outcome: audit.OutcomeDeny, Reason: reason.QUIC, Process: &audit.Process{PID: 7, Comm: "hostile"}}
	alert := []practice.Alert{{Record: rec}}
	way := func(change func(*audit.Record), alerts []practice.Alert) Way {
		r := rec
		change(&r)
		w := Way{Number: 6}
		w.join([]audit.Record{r}, alerts)
		return w
	}
	if w := way(func(*audit.Record) {}, alert); !w.Alerted || w.Process.PID != 7 || w.Reason != reason.QUIC {
		t.Errorf("%+v", w)
	}
	if w := way(func(*audit.Record) {}, nil); w.Alerted || w.Record != "01A" {
		t.Errorf("without an alert: %+v", w)
	}
	for name, change := range map[string]func(*audit.Record){
		"another kid":    func(r *audit.Record) { r.Kid = "other" },
		"allowed":        func(r *audit.Record) { r.Outcome = audit.OutcomeAllow },
		"another reason": func(r *audit.Record) { r.Reason = reason.DoT },
		"no process":     func(r *audit.Record) { r.Process = nil },
	} {
		if w := way(change, alert); w.Record != "" || w.Alerted {
			t.Errorf("%s: joined all the same: %+v", name, w)
		}
	}
}

// good is evidence that supports every claim.
func good() *evidence {
	e := &evidence{
		secret: []byte("vk_live_1"), kidOutput: []byte("VENDOR_API_KEY=tgo_x"), logs: []byte("{}\n"), modelKey: []byte("sk-1"), chatted: []byte("OPENAI_API_KEY=tgo_y your key is ****"), model: practice.ModelTally{Accepted: 2}, apiUses: practice.Tally{Accepted: 1},
		drill:           &drill.Report{Passed: true},
		attackerCounted: true, looked: true,
	}
	for n := range ways {
		e.ways = append(e.ways, Way{Number: n + 1, Denied: true, Took: time.Millisecond, Reason: ways[n][0], Process: &audit.Process{PID: 1, Comm: "c"}, Alerted: true})
	}
	return e
}

func TestEveryClaimNeedsItsEvidence(t *testing.T) {
	for _, c := range good().judge() {
		if !c.Observed {
			t.Errorf("good evidence does not support %q: %s", c.Text, c.Detail)
		}
	}
	for _, c := range new(evidence).judge() {
		if c.Observed {
			t.Errorf("no evidence at all supports %q: %s", c.Text, c.Detail)
		}
	}
	for name, spoil := range map[string]func(*evidence){
		"the API never got the secret":    func(e *evidence) { e.apiUses.Accepted = 0 },
		"the token got out":               func(e *evidence) { e.tokensSeen = 1 },
		"the secret is in the kid":        func(e *evidence) { e.kidOutput = append(e.kidOutput, e.secret...) },
		"the secret is in the log":        func(e *evidence) { e.logs = append(e.logs, e.secret...) },
		"the kid was not searched":        func(e *evidence) { e.kidOutput = nil },
		"the model was not asked":         func(e *evidence) { e.model.Accepted = 0 },
		"the model got the token":         func(e *evidence) { e.model.Refused, e.model.Tokens = 1, 1 },
		"the key came back":               func(e *evidence) { e.chatted = append(e.chatted, e.modelKey...) },
		"the key is in the log":           func(e *evidence) { e.logs = append(e.logs, e.modelKey...) },
		"no key was masked":               func(e *evidence) { e.chatted = []byte("tgo_y") },
		"the library held no token":       func(e *evidence) { e.chatted = []byte("****") },
		"a way got out":                   func(e *evidence) { e.ways[2].Denied = false },
		"a way hung":                      func(e *evidence) { e.ways[2].Took = 2 * time.Second },
		"a way is missing":                func(e *evidence) { e.ways = e.ways[:7] },
		"a way is there twice":            func(e *evidence) { e.ways[7] = e.ways[6] },
		"a way has no record":             func(e *evidence) { e.ways[3].Reason, e.ways[3].Process = reason.OK, nil },
		"a way has no process name":       func(e *evidence) { e.ways[3].Process = &audit.Process{PID: 1} },
		"a way was not alerted":           func(e *evidence) { e.ways[4].Alerted = false },
		"the attacker was reached":        func(e *evidence) { e.contacts = 1 },
		"the attacker got a byte":         func(e *evidence) { e.attackerBytes = 1 },
		"a DNS query got out":             func(e *evidence) { e.evilQueries = 1 },
		"the drill did not pass":          func(e *evidence) { e.drill.Passed = false },
		"something is left":               func(e *evidence) { e.leftovers = []string{"link x"} },
		"nobody looked whether it is":     func(e *evidence) { e.looked = false },
		"nobody looked at the attacker's": func(e *evidence) { e.attackerCounted = false },
	} {
		e := good()
		spoil(e)
		rep := &Report{Claims: e.judge()}
		if len(rep.failed()) == 0 {
			t.Errorf("%s, and every claim stands", name)
		}
	}
}

func TestScriptFitsThePracticeCard(t *testing.T) {
	raw, err := os.ReadFile("../../deploy/cards/practice.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c, err := card.Parse("practice.yaml", raw)
	if err != nil {
		t.Fatal(err)
	}
	where := map[string]string{}
	for _, in := range c.Filesystem.Inputs {
		where[in.From] = in.To
	}
	if where["hostile"] != "/workspace/hostile" || where["escape.sh"] != "/workspace/escape.sh" {
		t.Errorf("inputs %v", where)
	}
	if len(c.Identity.Scope) != 1 || c.Identity.Scope[0].Env != "VENDOR_API_KEY" {
		t.Errorf("identity %+v", c.Identity)
	}
	if n := bytes.Count(escapeScript, []byte(`"$me" try `)); n != len(ways) {
		t.Errorf("the script tries %d ways, the demo knows %d", n, len(ways))
	}
}

// TestAFailedStepStillCleansUp runs the demo with a box that cannot be set up.
func TestAFailedStepStillCleansUp(t *testing.T) {
	testroot.Require(t)
	const name = "tdemofail"
	bin := t.TempDir()
	for _, name := range []string{"hostile", "chat"} {
		if err := os.WriteFile(filepath.Join(bin, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var inst instance.Instance
	cleaned := false
	report := filepath.Join(t.TempDir(), "demo.json")
	err := Run(t.Context(), Config{
		Instance: name, BinDir: bin, Cards: os.DirFS("../../deploy/cards"), Out: io.Discard, Path: report,
		Doctor: func(context.Context, io.Writer) error { return nil },
		Setup: func(_ context.Context, got string, box *config.Box) error {
			var err error
			if inst, err = instance.Open(got); err != nil || len(practice.Leftovers(inst)) == 0 || box.AlertWebhook == "" {
				t.Errorf("no practice internet before the box is set up: %v, %+v", err, box)
			}
			return errors.New("no room")
		},
		Up: func(context.Context, instance.Instance) error { panic("a box that was not set up is started") },
		Cleanup: func(context.Context, string) error {
			cleaned = true
			return os.RemoveAll(inst.RunDir())
		},
		Leftovers: func(context.Context, string) ([]string, error) { return nil, nil },
	})
	if err == nil || !strings.Contains(err.Error(), "no room") || !cleaned {
		t.Errorf("err %v, cleaned %t", err, cleaned)
	}
	if left := practice.Leftovers(inst); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if _, err := instance.Open(name); !errors.Is(err, instance.ErrUnknown) {
		t.Errorf("the slot is still taken: %v", err)
	}
	raw, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var rep Report
	if err := json.Unmarshal(raw, &rep); err != nil || rep.Passed || rep.Error == "" || len(rep.Steps) != 4 {
		t.Errorf("report %v: %+v", err, rep)
	}
}

func TestAnExistingInstanceIsLeftAlone(t *testing.T) {
	testroot.Require(t)
	inst, err := instance.Claim("tdemobusy")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { inst.Release() })                                   // test
	err = Run(t.Context(), Config{Instance: inst.Name(), Out: io.Discard}) // every function would panic: it is nil
	if err == nil || !strings.Contains(err.Error(), "exists") {
		t.Errorf("err %v", err)
	}
	if _, err := instance.Open(inst.Name()); err != nil {
		t.Errorf("the instance is gone: %v", err)
	}
}
