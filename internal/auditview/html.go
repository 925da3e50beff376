package auditview

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"tagout/internal/audit"
)

//go:embed timeline.html.tmpl
var pageText string

var page = template.Must(template.New("timeline").Parse(pageText))

// pageView is what the page shows.
type pageView struct {
	Title, Kind, Who string
	Instances        string
	Kids, Sessions   string
	From, To         string
	Total            int
	Tiles            []tile
	Stops            []stopView
	Denied           []deniedView
	Chart            template.HTML // of numbers and fixed words alone
	Topics           []string
	Rows             []row
	Notes            []string
}

type tile struct {
	Name  string
	Count int
	Class string
}

type stopView struct{ Stop, By, Why, State, At string }

type deniedView struct {
	What, Reason string
	Count        uint64
}

type row struct {
	Break                                          string // a line of its own before the row
	At, ISO, Daemon, Event, Topic, Outcome, Reason string
	Kid, What, ID                                  string
	ShowKid                                        bool
}

// HTML writes the story as one page that needs nothing else: no script, no font, no picture from anywhere.
func (s *Story) HTML(w io.Writer) error {
	var b bytes.Buffer
	if err := page.Execute(&b, s.view()); err != nil {
		return fmt.Errorf("writing the page: %w", err)
	}
	_, err := b.WriteTo(w)
	return err
}

func (s *Story) view() pageView {
	v := pageView{
		Title: fmt.Sprintf("Timeline of %s %s", s.Kind, OneLine(s.Who)), Kind: s.Kind, Who: OneLine(s.Who), Kids: names(s.Kids), Sessions: names(s.Sessions), Total: len(s.Lines),
		Topics: Topics(), Chart: template.HTML(s.chart()), Stops: s.stopViews(), Denied: s.deniedViews(),
	}
	from, to := s.Span()
	v.From, v.To = from.UTC().Format("2006-01-02 15:04:05.000"), to.UTC().Format("2006-01-02 15:04:05.000")
	counts, instances, missing := map[string]int{}, map[string]bool{}, uint64(0)
	w := Writer{}
	for i := range s.Lines {
		l := &s.Lines[i]
		counts[Topic(l.Event)]++
		instances[l.Instance] = true
		if l.Event == audit.EventGap && l.Fields[audit.FieldCounted] == "" {
			missing += max(l.Count, 1)
		}
		v.Rows = append(v.Rows, rowOf(l, &w, len(s.Kids) > 1))
	}
	for _, t := range Topics() {
		v.Tiles = append(v.Tiles, tile{t, counts[t], t})
	}
	v.Instances = names(slices.Sorted(maps.Keys(instances)))
	if missing > 0 {
		v.Notes = append(v.Notes, fmt.Sprintf("%d records of this time are missing from the logs; the rows named audit.gap say from which, and why.", missing))
	}
	if s.Stats.Unreadable > 0 {
		v.Notes = append(v.Notes, fmt.Sprintf("%d lines of the logs are no records.", s.Stats.Unreadable))
	}
	if s.Stats.Sealed > 0 {
		v.Notes = append(v.Notes, fmt.Sprintf("%d encrypted pieces of the logs were not read.", s.Stats.Sealed))
	}
	return v
}

func rowOf(l *Line, w *Writer, kids bool) row {
	r := row{
		At: l.Time.UTC().Format("15:04:05.000"), ISO: l.Time.UTC().Format(time.RFC3339Nano), Daemon: OneLine(l.Daemon), Event: OneLine(l.Event), Topic: Topic(l.Event),
		Outcome: OneLine(l.Outcome), Kid: OneLine(l.Kid), What: What(l), ID: l.ID, ShowKid: kids,
	}
	if l.Reason != 0 {
		r.Reason = l.Reason.String()
	}
	if day := l.Time.UTC().Format(time.DateOnly); day != w.day {
		w.day, r.Break = day, day+" UTC"
	}
	if l.BootID != w.boot {
		if w.boot != "" {
			r.Break = strings.TrimPrefix(r.Break+": the machine was started again", ": ")
		}
		w.boot = l.BootID
	}
	return r
}

func names(list []string) string {
	if len(list) == 0 {
		return "-"
	}
	const most = 20
	if len(list) > most {
		return OneLine(strings.Join(list[:most], ", ")) + fmt.Sprintf(" and %d more", len(list)-most)
	}
	return OneLine(strings.Join(list, ", "))
}

// stopViews are the stops of the story with who ordered them and how they ended.
func (s *Story) stopViews() []stopView {
	byID := map[string]*stopView{}
	var order []string
	for i := range s.Lines {
		l := &s.Lines[i]
		id := l.Fields[fieldStop]
		if id == "" {
			continue
		}
		v := byID[id]
		if v == nil {
			v = &stopView{Stop: OneLine(id), At: l.Time.UTC().Format("2006-01-02 15:04:05.000")}
			byID[id] = v
			order = append(order, id)
		}
		switch l.Event {
		case audit.EventStopReceived:
			v.By, v.Why = OneLine(l.Actor), OneLine(l.Detail)
		case audit.EventStopCompleted:
			v.State = OneLine(l.Fields["state"])
		case audit.EventTagReleased:
			v.State += ", released by " + OneLine(l.Actor)
		}
	}
	var out []stopView
	for _, id := range order {
		out = append(out, *byID[id])
	}
	return out
}

// deniedViews are the destinations that were refused most often.
func (s *Story) deniedViews() []deniedView {
	type key struct{ what, reason string }
	sums := map[key]uint64{}
	for i := range s.Lines {
		l := &s.Lines[i]
		if l.Outcome != audit.OutcomeDeny || Topic(l.Event) != Network {
			continue
		}
		sums[key{OneLine(orDash(Destination(&l.Record))), l.Reason.String()}] += max(l.Count, 1)
	}
	var out []deniedView
	for k, n := range sums {
		out = append(out, deniedView{k.what, k.reason, n})
	}
	slices.SortFunc(out, func(a, b deniedView) int {
		if a.Count != b.Count {
			return int(b.Count) - int(a.Count)
		}
		return strings.Compare(a.What+a.Reason, b.What+b.Reason)
	})
	return out[:min(len(out), 15)]
}

const (
	chartWidth, laneHeight, labelWidth = 960, 22, 90
	chartBuckets                       = 120
)

// chart draws how many records each topic had over the time, as SVG.
func (s *Story) chart() string {
	from, to := s.Span()
	whole := to.Sub(from)
	if len(s.Lines) < 2 || whole <= 0 {
		return ""
	}
	counts := map[string]*[chartBuckets]int{}
	bad := map[string]*[chartBuckets]bool{}
	for _, t := range Topics() {
		counts[t], bad[t] = new([chartBuckets]int), new([chartBuckets]bool)
	}
	most := 1
	for i := range s.Lines {
		l := &s.Lines[i]
		n := min(chartBuckets-1, int(float64(l.Time.Sub(from))/float64(whole)*chartBuckets))
		t := Topic(l.Event)
		counts[t][n]++
		most = max(most, counts[t][n])
		bad[t][n] = bad[t][n] || l.Outcome == audit.OutcomeDeny || l.Outcome == audit.OutcomeFail
	}
	var b strings.Builder
	height := laneHeight*len(Topics()) + 20
	fmt.Fprintf(&b, `<svg viewBox="0 0 %d %d" role="img" aria-label="records over time, by topic">`, chartWidth, height)
	step := float64(chartWidth-labelWidth) / chartBuckets
	for lane, t := range Topics() {
		base := (lane+1)*laneHeight - 3
		fmt.Fprintf(&b, `<text x="0" y="%d" class="lane">%s</text><line x1="%d" y1="%d" x2="%d" y2="%d" class="axis"/>`, base-4, t, labelWidth, base, chartWidth, base)
		for n, c := range counts[t] {
			if c == 0 {
				continue
			}
			h := max(2, (laneHeight-6)*c/most)
			class := "bar " + t
			if bad[t][n] {
				class += " bad"
			}
			fmt.Fprintf(&b, `<rect x="%.1f" y="%d" width="%.1f" height="%d" class="%s"/>`, labelWidth+float64(n)*step, base-h, max(1.5, step-1), h, class)
		}
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" class="tick">%s</text><text x="%d" y="%d" class="tick end">%s</text></svg>`,
		labelWidth, height-4, from.UTC().Format("15:04:05.000"), chartWidth, height-4, to.UTC().Format("15:04:05.000"))
	return b.String()
}
