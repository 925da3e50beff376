// Package leaks finds what looks like a long-lived key in text: gitleaks' detector with its default rules.
//
// It promises that a finding never carries the text that was found, and that nothing in the text can switch the
// search off: gitleaks' own "allow" comments are not heeded. It does not promise that every key is found: a key that
// looks like any other text has no rule.
package leaks

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/rs/zerolog"
	"github.com/zricethezav/gitleaks/v8/detect"
	"github.com/zricethezav/gitleaks/v8/logging"
	"github.com/zricethezav/gitleaks/v8/report"
)

// decodeDepth is how often what is encoded (base64, hex, percent) is looked at decoded.
const decodeDepth = 2

// placeholder is a session's own token. It opens nothing outside its session, and is what should stand where a key would.
var placeholder = regexp.MustCompile(`^tgo_[a-z2-7]{32}$`)

// Finding says where something looks like a key. Start and End are byte offsets into the text, End behind the last.
type Finding struct {
	Rule       string // gitleaks' id, such as aws-access-token
	Line       int    // from 1
	Start, End int
}

// Detector finds keys. It is safe for concurrent use.
type Detector struct {
	plain, decoding *detect.Detector
	rules           map[string]bool
	known           known
}

// making guards gitleaks' setting-up, which goes through globals.
var making sync.Mutex

// New returns a detector with gitleaks' default rules. It takes some 50 ms and keeps some 15 MB: make one a process.
func New() (*Detector, error) {
	making.Lock()
	defer making.Unlock()
	logging.Logger = zerolog.Nop() // it would quote what it found
	d, err := detect.NewDetectorDefaultConfig()
	if err != nil {
		return nil, fmt.Errorf("loading gitleaks' default rules: %w", err)
	}
	d.IgnoreGitleaksAllow = true
	decoding := detect.NewDetector(d.Config)
	decoding.IgnoreGitleaksAllow = true
	decoding.MaxDecodeDepth = decodeDepth
	rules := make(map[string]bool, len(d.Config.Rules))
	for id := range d.Config.Rules {
		rules[id] = true
	}
	return &Detector{plain: d, decoding: decoding, rules: rules}, nil
}

// Knows says whether there is a rule of that id.
func (d *Detector) Knows(rule string) bool { return d.rules[rule] }

// Find returns what looks like a key in text, in the order of the text. Each place where a key stands is a finding.
func (d *Detector) Find(text string) []Finding {
	lines := newlines{text: text}
	var out []Finding
	add := func(found []report.Finding, from, to int) {
		for _, f := range found {
			if placeholder.MatchString(f.Secret) {
				continue
			}
			for _, s := range places(text[from:to], f) {
				out = append(out, Finding{Rule: f.RuleID, Line: lines.of(from + s.start), Start: from + s.start, End: from + s.end})
			}
		}
	}
	for from, to := range windows(text) {
		add(d.plain.DetectString(text[from:to]), from, to)
	}
	for _, h := range hidden(text) {
		add(d.decoding.DetectString(text[h.start:h.end]), h.start, h.end)
	}
	slices.SortFunc(out, func(a, b Finding) int {
		return cmp.Or(a.Start-b.Start, b.End-a.End, strings.Compare(a.Rule, b.Rule))
	})
	return slices.Compact(out)
}

type span struct{ start, end int }

// places returns where a finding's key stands in text: everywhere it is repeated, or, where it was found decoded,
// what it was decoded from.
func places(text string, f report.Finding) []span {
	var out []span
	if f.Secret != "" {
		for at := 0; ; {
			i := strings.Index(text[at:], f.Secret)
			if i < 0 {
				break
			}
			out = append(out, span{at + i, at + i + len(f.Secret)})
			at += i + len(f.Secret)
		}
	}
	if len(out) > 0 {
		return out
	}
	// gitleaks counts columns from the line feed before the line, and from 1 on the first.
	lines := newlines{text: text}
	start := min(max(lines.before(f.StartLine)+f.StartColumn-1, 0), len(text))
	end := min(max(lines.before(f.EndLine)+f.EndColumn, start), len(text))
	return []span{{start, end}}
}

// newlines knows where lines begin. It looks only once there is something to say.
type newlines struct {
	text   string
	looked bool
	feeds  []int // offsets of line feeds
}

func (n *newlines) look() {
	if n.looked {
		return
	}
	n.looked = true
	for i := range len(n.text) {
		if n.text[i] == '\n' {
			n.feeds = append(n.feeds, i)
		}
	}
}

// before returns the offset of the line feed before the line, which counts from 0; 0 for the first line.
func (n *newlines) before(line int) int {
	n.look()
	if line <= 0 || len(n.feeds) == 0 {
		return 0
	}
	return n.feeds[min(line, len(n.feeds))-1]
}

// of returns the line of an offset, from 1.
func (n *newlines) of(offset int) int {
	n.look()
	i, _ := slices.BinarySearch(n.feeds, offset)
	return i + 1
}
