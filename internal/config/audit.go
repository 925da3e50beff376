package config

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"

	"tagout/internal/yamlx"
)

// Kinds of witnesses.
const (
	WitnessFile   = "file"   // appended to; on another disk or machine
	WitnessURL    = "url"    // http or https
	WitnessSyslog = "syslog" // RFC 5424
)

// What happens to kids when the audit disk is nearly full.
const (
	FullNothing = "nothing"
	FullFreeze  = "freeze"
	FullStop    = "stop"
)

// DefaultRetention is for how many days records are kept.
const DefaultRetention = 90

// Audit says how the logs are kept.
type Audit struct {
	Retention  int       // days; 0: DefaultRetention
	Recipients []string  // age recipients for whom closed pieces are encrypted; none: they are not
	Witnesses  []Witness // who get the logs' checkpoints, each name once
	Sinks      []Stream  // who get the records as they are written, each name once
	WhenFull   string    // FullNothing, FullFreeze or FullStop; "": FullNothing

	// Free space below which the operator is warned, nothing is spawned any more, and WhenFull is done; 0: the default.
	WarnBelow, RefuseBelow, ActBelow int64
}

// Days is the retention.
func (a Audit) Days() int {
	if a.Retention == 0 {
		return DefaultRetention
	}
	return a.Retention
}

// Witness is one receiver of checkpoints.
type Witness struct {
	Name    string
	Kind    string // WitnessFile, WitnessURL or WitnessSyslog
	Target  string
	Key     string // with WitnessURL: the witness cosigns (C2SP tlog-witness) with this key; empty: it takes a plain POST
	Timeout time.Duration
	Queue   int // checkpoints that may wait
}

type auditFile struct {
	Retention   string        `yaml:"retention,omitempty"`
	Recipients  []string      `yaml:"recipients,omitempty"`
	Witnesses   []witnessFile `yaml:"witnesses,omitempty"`
	Sinks       []streamFile  `yaml:"sinks,omitempty"`
	WhenFull    string        `yaml:"whenFull,omitempty"`
	WarnBelow   Size          `yaml:"warnBelow,omitempty"`
	RefuseBelow Size          `yaml:"refuseBelow,omitempty"`
	ActBelow    Size          `yaml:"actBelow,omitempty"`
}

type witnessFile struct {
	Name    string `yaml:"name"`
	File    string `yaml:"file,omitempty"`
	URL     string `yaml:"url,omitempty"`
	Syslog  string `yaml:"syslog,omitempty"`
	Key     string `yaml:"key,omitempty"`
	Timeout string `yaml:"timeout,omitempty"`
	Queue   int    `yaml:"queue,omitempty"`
}

func (a Audit) file() *auditFile {
	f := auditFile{Recipients: a.Recipients, WhenFull: a.WhenFull, WarnBelow: Size(a.WarnBelow), RefuseBelow: Size(a.RefuseBelow), ActBelow: Size(a.ActBelow)}
	if a.Retention != 0 {
		f.Retention = fmt.Sprintf("%dd", a.Retention)
	}
	for _, w := range a.Witnesses {
		wf := witnessFile{Name: w.Name, Key: w.Key, Queue: w.Queue}
		if w.Timeout != 0 {
			wf.Timeout = w.Timeout.String()
		}
		switch w.Kind {
		case WitnessFile:
			wf.File = w.Target
		case WitnessURL:
			wf.URL = w.Target
		case WitnessSyslog:
			wf.Syslog = w.Target
		}
		f.Witnesses = append(f.Witnesses, wf)
	}
	for _, st := range a.Sinks {
		f.Sinks = append(f.Sinks, st.file())
	}
	if f.Retention == "" && len(f.Recipients)+len(f.Witnesses)+len(f.Sinks) == 0 && f.WhenFull == "" && f.WarnBelow+f.RefuseBelow+f.ActBelow == 0 {
		return nil
	}
	return &f
}

var (
	auditKeys = []yamlx.Key{
		{Name: "retention", Example: "183d"},
		{Name: "recipients", Example: "[age1…]"},
		{Name: "witnesses", Example: "[{name: elsewhere, file: /mnt/witness/box1}]"},
		{Name: "sinks", Example: `[{name: otel, otlp: "http://127.0.0.1:4318"}]`},
		{Name: "whenFull", Example: FullFreeze},
		{Name: "warnBelow", Example: "4GiB"},
		{Name: "refuseBelow", Example: "1GiB"},
		{Name: "actBelow", Example: "256MiB"},
	}
	witnessKeys = []yamlx.Key{
		{Name: "name", Example: "elsewhere"},
		{Name: WitnessFile, Example: "/mnt/witness/box1"},
		{Name: WitnessURL, Example: "https://witness.example.com"},
		{Name: WitnessSyslog, Example: "tcp://192.0.2.60:601"},
		{Name: "key", Example: "witness.example.com+…"},
		{Name: "timeout", Example: "3s"},
		{Name: "queue", Example: "1024"},
	}
	recipient = regexp.MustCompile(`^age1[a-z0-9]{20,1000}$`)
)

const (
	maxRetention = 100 * 366 // days
	maxWatermark = 1 << 44
)

func readAudit(v yamlx.Value) Audit {
	m, ok := v.Map(auditKeys...)
	if !ok {
		return Audit{}
	}
	a := Audit{Retention: readRetention(m.Get("retention")), Witnesses: readWitnesses(m.Get("witnesses")), Sinks: readStreams(m.Get("sinks")), WhenFull: readWhenFull(m.Get("whenFull"))}
	for _, at := range m.Get("recipients").Texts() {
		if !recipient.MatchString(at.Text) {
			at.Refuse("write what age-keygen prints as the public key, age1…", "%s is no age recipient", yamlx.Quote(at.Text))
			continue
		}
		a.Recipients = append(a.Recipients, at.Text)
	}
	a.WarnBelow, _ = m.Get("warnBelow").Size(1<<10, maxWatermark)
	a.RefuseBelow, _ = m.Get("refuseBelow").Size(1<<10, maxWatermark)
	a.ActBelow, _ = m.Get("actBelow").Size(1<<10, maxWatermark)
	if a.ActBelow > 0 && a.RefuseBelow > 0 && a.ActBelow > a.RefuseBelow || a.RefuseBelow > 0 && a.WarnBelow > 0 && a.RefuseBelow > a.WarnBelow {
		v.Refuse("make warnBelow the greatest and actBelow the smallest", "the disk's marks are in the wrong order")
	}
	return a
}

func readRetention(v yamlx.Value) int {
	s, ok := v.Text()
	if !ok {
		return 0
	}
	n, err := strconv.Atoi(strings.TrimSuffix(s, "d"))
	if err != nil || !strings.HasSuffix(s, "d") || n < 1 || n > maxRetention {
		v.Refuse("write whole days, such as `90d` or `183d`", "retention is %s", yamlx.Quote(s))
		return 0
	}
	return n
}

func readWhenFull(v yamlx.Value) string {
	s, ok := v.Text()
	all := []string{FullNothing, FullFreeze, FullStop}
	if ok && !slices.Contains(all, s) {
		v.Refuse("write one of "+strings.Join(all, ", "), "whenFull is %s", yamlx.Quote(s))
	}
	return s
}

func readWitnesses(v yamlx.Value) []Witness {
	var out []Witness
	for _, entry := range v.List() {
		m, ok := entry.Map(witnessKeys...)
		if !ok {
			continue
		}
		w := Witness{
			Timeout: readDuration(m.Get("timeout"), "timeout", DefaultTimeout, 100*time.Millisecond, time.Minute),
			Queue:   readQueue(m.Get("queue")),
		}
		name := m.Need("name")
		w.Name, _ = name.Text()
		if w.Name != "" && (!sinkName.MatchString(w.Name) || slices.ContainsFunc(out, func(o Witness) bool { return o.Name == w.Name })) {
			name.Refuse("write up to 32 small letters, digits and single dashes, once", "%s cannot name a witness", yamlx.Quote(w.Name))
		}
		w.Kind, w.Target = readWitnessTarget(entry, m)
		w.Key = readWitnessKey(m, w.Kind)
		out = append(out, w)
	}
	return out
}

func readWitnessTarget(entry yamlx.Value, m yamlx.Map) (kind, target string) {
	for _, k := range []string{WitnessFile, WitnessURL, WitnessSyslog} {
		if !m.Has(k) {
			continue
		}
		if kind != "" {
			m.Get(k).Refuse("write two entries, each with a name of its own", "a witness cannot be both %s and %s", kind, k)
			return kind, target
		}
		switch kind = k; k {
		case WitnessFile:
			if target, _ = m.Get(k).Text(); !path.IsAbs(target) {
				m.Get(k).Refuse("write an absolute path", "%s is not an absolute path", yamlx.Quote(target))
			}
		case WitnessURL:
			target = readURL(m.Get(k), k, "https://witness.example.com")
		case WitnessSyslog:
			target = readSyslog(m.Get(k))
		}
	}
	if kind == "" {
		entry.Refuse("write one of file, url, syslog", "nothing says where the checkpoints go")
	}
	return kind, target
}

func readWitnessKey(m yamlx.Map, kind string) string {
	v := m.Get("key")
	s, ok := v.Text()
	switch {
	case !ok:
	case kind != WitnessURL:
		v.Refuse("remove the key", "only a witness with a url cosigns")
	case !cosigner(s):
		v.Refuse("write the witness's public key, NAME+HASH+KEY", "%s is no key that cosigns", yamlx.Quote(s))
	}
	return s
}

// cosigner says whether s is the form of a verifier key; what type of key it is, its user finds out.
func cosigner(s string) bool {
	if _, err := note.NewVerifier(s); err == nil {
		return true
	}
	return regexp.MustCompile(`^[^+\s]+\+[0-9a-f]{8}\+B[A-Za-z0-9+/]{43}=*$`).MatchString(s)
}
