// Package bench measures what the documentation promises, beside something that does the same work in the
// same run, and writes it down in one form for all benchmarks.
package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"
)

// Metric is one measured figure. Every value is in Unit; a Target of 0 means that none is set.
type Metric struct {
	Metric    string  `json:"metric"`
	Value     float64 `json:"value"`
	Unit      string  `json:"unit"`
	Target    float64 `json:"target"`
	Met       bool    `json:"met"`
	Peer      string  `json:"peer"`
	PeerValue float64 `json:"peer_value"`
	Ratio     float64 `json:"ratio"`            // value / peer value; 0 without a peer
	Limits    string  `json:"limits,omitempty"` // where a target is missed: what limits it
}

// AtMost returns the metric of a figure that should be at most target.
func AtMost(name string, value float64, unit string, target float64) Metric {
	return Metric{Metric: name, Value: value, Unit: unit, Target: target, Met: target == 0 || value <= target}
}

// Beside adds the peer's figure for the same work.
func (m Metric) Beside(peer string, value float64) Metric {
	m.Peer, m.PeerValue = peer, value
	if value != 0 {
		m.Ratio = m.Value / value
	}
	return m
}

// Print writes the metrics as a table.
func Print(w io.Writer, metrics []Metric) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "METRIC\tVALUE\tTARGET\tMET\tBESIDE\tITS VALUE\tRATIO")
	for _, m := range metrics {
		target, met, peer, ratio := "-", "-", "-", "-"
		peerValue := "-"
		if m.Target != 0 {
			target, met = number(m.Target)+" "+m.Unit, map[bool]string{true: "yes", false: "NO"}[m.Met]
		}
		if m.Peer != "" {
			peer, peerValue, ratio = m.Peer, number(m.PeerValue)+" "+m.Unit, number(m.Ratio)
		}
		fmt.Fprintf(t, "%s\t%s %s\t%s\t%s\t%s\t%s\t%s\n", m.Metric, number(m.Value), m.Unit, target, met, peer, peerValue, ratio)
		if m.Limits != "" {
			fmt.Fprintf(t, "  limited by: %s\t\t\t\t\t\t\n", m.Limits)
		}
	}
	return t.Flush()
}

func number(v float64) string {
	if v >= 100 {
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// Write writes the metrics to dir/name.json, making the directory.
func Write(dir, name string, metrics []Metric) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("writing the figures: %w", err)
	}
	raw, err := json.MarshalIndent(metrics, "", "  ")
	if err != nil {
		return fmt.Errorf("writing the figures: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(raw, '\n'), 0o644); err != nil {
		return fmt.Errorf("writing the figures: %w", err)
	}
	return nil
}

// Percentile returns the p-th percentile (0 to 100) of the durations in milliseconds, by the nearest-rank
// method; 0 for an empty list.
func Percentile(ds []time.Duration, p float64) float64 {
	if len(ds) == 0 {
		return 0
	}
	sorted := slices.Clone(ds)
	slices.Sort(sorted)
	rank := int(float64(len(sorted))*p/100+0.9999999) - 1
	return float64(sorted[min(max(rank, 0), len(sorted)-1)]) / float64(time.Millisecond)
}
