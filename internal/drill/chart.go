package drill

import (
	"fmt"
	"time"

	"tagout/internal/wire"
)

// Geometry of a chart, in the units of its viewBox.
const (
	chartLeft   = 128 // where 0 lies; the techniques' names are left of it
	chartPlot   = 560 // from 0 to the end of the scale
	chartRight  = 152 // for the figures
	chartRow    = 22
	chartTop    = 34
	chartBottom = 10
	chartBeyond = 1.12 // the scale ends at so many times the SLA
)

// chart shows, for one layer, how long each technique held out against the SLA.
type chart struct {
	Layer                    wire.Layer
	SLA                      time.Duration
	Width, Height            int
	Left, End, Bottom, Limit float64 // End: of the scale; Limit: of the SLA
	Ticks                    []tick
	Rows                     []chartRowOf
}

type tick struct {
	X    float64
	Text string
}

type chartRowOf struct {
	Y      float64
	Name   string
	Marks  []mark
	Figure string // max, alone / together
}

// mark is one case of a row: a line from the p50 to the maximum, and a point at the maximum.
type mark struct {
	Y, From, To float64
	Together    bool
	Bad         bool   // beyond the SLA, or never
	Path        string // of the point
	Title       string
}

func newChart(l wire.Layer, sla time.Duration, sums []Summary) chart {
	c := chart{Layer: l, SLA: sla, Width: chartLeft + chartPlot + chartRight, Left: chartLeft, End: chartLeft + chartPlot}
	c.Limit = c.x(sla)
	for i := range 5 {
		d := sla * time.Duration(i) / 4
		c.Ticks = append(c.Ticks, tick{c.x(d), fmt.Sprintf("%g", float64(d.Microseconds())/1000)})
	}
	at := map[string]int{}
	for _, s := range sums {
		if s.Layer != l {
			continue
		}
		i, ok := at[s.Technique]
		if !ok {
			i = len(c.Rows)
			at[s.Technique] = i
			c.Rows = append(c.Rows, chartRowOf{Y: chartTop + chartRow*float64(i) + chartRow/2, Name: s.Technique})
		}
		c.Rows[i].add(c, s)
	}
	c.Bottom = chartTop + chartRow*float64(len(c.Rows))
	c.Height = int(c.Bottom) + chartBottom
	return c
}

// x is where a time lies; what is beyond the scale lies at its end.
func (c chart) x(d time.Duration) float64 {
	if c.SLA <= 0 {
		return chartLeft
	}
	return chartLeft + chartPlot*min(1, float64(d)/(float64(c.SLA)*chartBeyond))
}

func (r *chartRowOf) add(c chart, s Summary) {
	m := mark{Together: s.Case == Together().Name, Y: r.Y - 4, From: c.x(s.P50), To: c.x(s.Max), Bad: s.Verdict != Pass}
	if m.Together {
		m.Y = r.Y + 4
	}
	if s.Stopped < s.Runs {
		m.From, m.To = c.End, c.End
	}
	m.Path = point(m)
	m.Title = fmt.Sprintf("%s, %s: p50 %s, p99 %s, max %s of %d: %s", s.Technique, s.Case, millis(s.P50), millis(s.P99), millis(s.Max), s.Runs, s.Verdict)
	r.Marks = append(r.Marks, m)
	if r.Figure != "" {
		r.Figure += " / "
	}
	r.Figure += s.worst()
}

// point is a diamond for all together, a triangle for alone and a cross for what is beyond: shapes, so that nobody
// depends on the colours.
func point(m mark) string {
	const r = 4.0
	x, y := m.To, m.Y
	switch {
	case m.Bad:
		return fmt.Sprintf("M%.1f %.1fL%.1f %.1fM%.1f %.1fL%.1f %.1f", x-r, y-r, x+r, y+r, x-r, y+r, x+r, y-r)
	case m.Together:
		return fmt.Sprintf("M%.1f %.1fL%.1f %.1fL%.1f %.1fL%.1f %.1fZ", x, y-r, x+r, y, x, y+r, x-r, y)
	}
	return fmt.Sprintf("M%.1f %.1fL%.1f %.1fL%.1f %.1fZ", x, y-r, x+r, y+r, x-r, y+r)
}
