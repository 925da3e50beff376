package auditexport

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/reason"
)

func lineOf(t testing.TB, r audit.Record) *auditview.Line {
	t.Helper()
	raw, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	l, ok := auditview.Decode(raw)
	if !ok {
		t.Fatalf("no record: %s", raw)
	}
	return &l
}

// events are all that the audit package names: the ones that it gets are there too.
func events(t *testing.T) []string {
	t.Helper()
	raw, err := os.ReadFile("../audit/record.go")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, m := range regexp.MustCompile(`(?m)^\tEvent\w+\s*= "([a-z.-]+)"`).FindAllSubmatch(raw, -1) {
		out = append(out, string(m[1]))
	}
	if len(out) < 60 {
		t.Fatalf("only %d events were found", len(out))
	}
	return out
}

func full(event string) audit.Record {
	return audit.Record{
		Version: 1, ID: "01J", Time: time.Date(2026, 5, 4, 12, 0, 0, 5e6, time.UTC), Boot: 7, BootID: "b", Instance: "i", Daemon: "d", Event: event, Session: "S", Kid: "k", Mark: 3, Card: "c",
		Actor: "Ada", Outcome: audit.OutcomeDeny, Reason: reason.NameNotAllowed, Rule: 3, Generation: 4, Process: &audit.Process{PID: 7, Parent: 1, Comm: "curl", Exe: "/usr/bin/curl"},
		Dst: &audit.Dst{Name: "a.test", Addr: netip.MustParseAddr("198.18.0.1"), Real: netip.MustParseAddr("2001:db8::1"), Port: 443, Proto: "tls"}, Bytes: &audit.Bytes{Up: 1, Down: 2}, Conn: "C", Count: 3,
		Detail: "words", Fields: map[string]string{"method": "GET", "path": "/x/y", "from": "/x/z", "secret": "vendor_api", "tool": "exec", "argv": "a b", "code": "3", "stop": "01S", "type": "A", "kind": "directory"},
	}
}

// rules is what the published schema says of the attributes that Tagout writes.
type rules struct {
	Classes, Objects map[string]struct {
		Required   []string
		AtLeastOne []string `json:"at_least_one"`
		Attributes map[string]struct {
			Type  string
			Array bool
			Enum  []int
		}
	}
}

// check returns what is wrong with an event or object.
func (s *rules) check(where, kind string, o map[string]any, class bool) (wrong []string) {
	all := s.Objects
	if class {
		all = s.Classes
	}
	r, ok := all[kind]
	if !ok {
		return []string{where + ": the schema has no " + kind}
	}
	for _, k := range r.Required {
		if _, ok := o[k]; !ok {
			wrong = append(wrong, where+"."+k+" is required")
		}
	}
	if len(r.AtLeastOne) > 0 && !slices.ContainsFunc(r.AtLeastOne, func(k string) bool { _, ok := o[k]; return ok }) {
		wrong = append(wrong, fmt.Sprintf("%s has none of %v", where, r.AtLeastOne))
	}
	for k, v := range o {
		a, ok := r.Attributes[k]
		if !ok {
			wrong = append(wrong, where+"."+k+" is no attribute")
			continue
		}
		number, isNumber := v.(float64)
		text, isText := v.(string)
		inner, isObject := v.(map[string]any)
		switch {
		case a.Type == "object" && isObject: // free
		case strings.HasSuffix(a.Type, "_t") && (a.Type == "integer_t" || a.Type == "long_t" || a.Type == "timestamp_t" || a.Type == "port_t"):
			if !isNumber || number != float64(int64(number)) || len(a.Enum) > 0 && !slices.Contains(a.Enum, int(number)) || a.Type == "port_t" && (number < 0 || number > 65535) {
				wrong = append(wrong, fmt.Sprintf("%s.%s is %v", where, k, v))
			}
		case strings.HasSuffix(a.Type, "_t"):
			if !isText || text == "" {
				wrong = append(wrong, fmt.Sprintf("%s.%s is %v", where, k, v))
			}
			if _, err := netip.ParseAddr(text); a.Type == "ip_t" && err != nil {
				wrong = append(wrong, where+"."+k+": "+err.Error())
			}
		case isObject:
			wrong = append(wrong, s.check(where+"."+k, a.Type, inner, false)...)
		default:
			wrong = append(wrong, fmt.Sprintf("%s.%s is %v, not a %s", where, k, v, a.Type))
		}
	}
	return wrong
}

func ocsfRules(t *testing.T) *rules {
	t.Helper()
	raw, err := os.ReadFile("testdata/ocsf.json")
	if err != nil {
		t.Fatal(err)
	}
	var s rules
	if err := json.Unmarshal(raw, &s); err != nil {
		t.Fatal(err)
	}
	return &s
}

func (s *rules) event(t *testing.T, l *auditview.Line) (map[string]any, []string) {
	t.Helper()
	raw, err := json.Marshal(Event(l, "v1"))
	if err != nil {
		t.Fatal(err)
	}
	var e map[string]any
	if err := json.Unmarshal(raw, &e); err != nil {
		t.Fatal(err)
	}
	wrong := s.check(l.Event, fmt.Sprint(e["class_uid"]), e, true)
	class, _ := e["class_uid"].(float64)
	id, _ := e["activity_id"].(float64)
	if e["type_uid"] != class*100+id || e["category_uid"] != float64(int(class)/1000) {
		wrong = append(wrong, fmt.Sprintf("%s: type %v, category %v", l.Event, e["type_uid"], e["category_uid"]))
	}
	return e, wrong
}

// Every event, with all there can be in a record and with nothing, is what OCSF's schema asks for.
func TestEventsFollowOCSF(t *testing.T) {
	s := ocsfRules(t)
	seen := map[any]bool{}
	for _, event := range append(events(t), "never.heard", "x") {
		for _, r := range []audit.Record{full(event), {Event: event}, {Event: event, Kid: "k", Outcome: "ok", Dst: &audit.Dst{Port: 3}, Process: &audit.Process{}}} {
			e, wrong := s.event(t, lineOf(t, r))
			seen[e["class_uid"]] = true
			for _, w := range wrong {
				t.Error(w)
			}
		}
	}
	for _, class := range []float64{1001, 1007, 3002, 4001, 4002, 4003, 6003} {
		if !seen[class] {
			t.Errorf("no event is of class %v", class)
		}
	}
}

// The control: the check sees what is wrong.
func TestTheOCSFCheckSeesWhatIsWrong(t *testing.T) {
	s := ocsfRules(t)
	for _, spoil := range []func(e map[string]any){
		func(e map[string]any) { delete(e, "metadata") },
		func(e map[string]any) { e["activity_id"] = 77.0 },
		func(e map[string]any) { e["dst_endpoint"] = map[string]any{"port": 3.0} },
		func(e map[string]any) { e["dst_endpoint"] = map[string]any{"ip": "a.test"} },
		func(e map[string]any) { e["kid"] = "k" },
		func(e map[string]any) { e["time"] = "now" },
		func(e map[string]any) { delete(e, "dst_endpoint"); delete(e, "src_endpoint") },
	} {
		e, wrong := s.event(t, lineOf(t, full(audit.EventConnOpened)))
		if len(wrong) != 0 {
			t.Fatal(wrong)
		}
		spoil(e)
		if len(s.check("e", "4001", e, true)) == 0 {
			t.Errorf("%v passes", e)
		}
	}
}

func export(t testing.TB, format string, l *auditview.Line) string {
	t.Helper()
	var b bytes.Buffer
	w, err := New(format, &b, "v1")
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(l); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestFormsOfARecord(t *testing.T) {
	r := full(audit.EventConnOpened)
	r.Actor, r.Detail, r.Fields, r.Kid = "=cmd|' /C calc'!A0", "a=b|c\\d\nnext", map[string]string{"x": "@SUM(1)"}, ""
	l := lineOf(t, r)
	if got := export(t, JSONL, l); got != string(l.Raw)+"\n" {
		t.Errorf("%s", got)
	}
	const cef = `CEF:0|Tagout|Tagout|v1|conn.opened|conn opened deny|7|rt=1777896000005 externalId=01J deviceProcessName=d dvchost=i cat=network outcome=deny reason=name-not-allowed ` +
		`suser=\=cmd|' /C calc'!A0 cnt=3 dhost=a.test c6a3=2001:db8::1 c6a3Label=Destination IPv6 Address dpt=443 app=tls spid=7 sproc=curl out=1 in=2 filePath=/usr/bin/curl ` +
		`cs2=S cs2Label=session cs3=c cs3Label=card cs5=x\="@SUM(1)" cs5Label=fields msg=a\=b|c\\d\nnext` + "\n"
	if got := export(t, CEF, l); got != cef {
		t.Errorf("got  %swant %s", got, cef)
	}
	rows, err := csv.NewReader(strings.NewReader(export(t, CSV, l))).ReadAll()
	if err != nil || len(rows) != 2 || len(rows[0]) != len(rows[1]) {
		t.Fatalf("%v %v", rows, err)
	}
	cell := func(name string) string { return rows[1][slices.Index(rows[0], name)] }
	if cell("actor") != "'=cmd|' /C calc'!A0" || cell("address") != "2001:db8::1" || cell("detail") != "a=b|c\\d next" || cell("port") != "443" {
		t.Errorf("%q", rows[1])
	}
	if _, err := New("xml", os.Stdout, "v1"); err == nil {
		t.Error("xml is a format")
	}
}

// cefParts reads a CEF line back, by the rules of its specification.
func cefParts(s string) (head []string, ext map[string]string, ok bool) {
	var part strings.Builder
	i := 0
	for ; i < len(s) && len(head) < 7; i++ {
		switch {
		case s[i] == '\\' && i+1 < len(s):
			i++
			part.WriteByte(s[i])
		case s[i] == '|':
			head = append(head, part.String())
			part.Reset()
		default:
			part.WriteByte(s[i])
		}
	}
	ext = map[string]string{}
	keys := regexp.MustCompile(`(^| )([A-Za-z0-9]+)=`).FindAllStringSubmatchIndex(s[i:], -1)
	rest := s[i:]
	for n, k := range keys {
		end := len(rest)
		if n+1 < len(keys) {
			end = keys[n+1][0]
		}
		value := rest[k[1]:end]
		ext[rest[k[4]:k[5]]] = strings.NewReplacer(`\\`, `\`, `\=`, `=`, `\n`, "\n").Replace(value)
	}
	return head, ext, len(head) == 7
}

// FuzzNoRecordBreaksOut: whatever stands in a record, each form is one line and reads back as that record, and no cell is
// a formula.
func FuzzNoRecordBreaksOut(f *testing.F) {
	for _, s := range []string{"=1+1", "\t=1", " +x", "a|b\\", "a=b c=d", "x\r\ny", "\u2028", "\x00\x1b[2J", "'\"", "\ufeff=1", "=x\\n", "\\", "\uff1d1"} {
		f.Add(s, s, s, s)
	}
	f.Fuzz(func(t *testing.T, actor, detail, name, event string) {
		if event == "" {
			return
		}
		l := lineOf(t, audit.Record{Event: event, Actor: actor, Detail: detail, Dst: &audit.Dst{Name: name}, Kid: name, Fields: map[string]string{detail: actor, "path": name}})
		for _, format := range []string{JSONL, OCSF, CEF} {
			if got := export(t, format, l); strings.Count(got, "\n") != 1 || strings.ContainsAny(got, "\r\x00\x1b") {
				t.Errorf("%s is not one line: %q", format, got)
			}
		}
		rows, err := csv.NewReader(strings.NewReader(export(t, CSV, l))).ReadAll()
		if err != nil || len(rows) != 2 {
			t.Fatalf("%v %v", rows, err)
		}
		for _, c := range rows[1] {
			if trimmed := strings.TrimSpace(c); trimmed != "" && strings.ContainsAny(trimmed[:1], "=+-@") {
				t.Errorf("%q is a formula", c)
			}
		}
		head, ext, ok := cefParts(strings.TrimSuffix(export(t, CEF, l), "\n"))
		if !ok || head[0] != "CEF:0" || head[4] != cefText(l.Event, " ") {
			t.Errorf("%q %v", head, ok)
		}
		if l.Detail != "" && ext["msg"] != cefText(l.Detail, "\n") {
			t.Errorf("msg is %q, not %q", ext["msg"], l.Detail)
		}
	})
}
