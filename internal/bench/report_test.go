package bench

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestPercentile(t *testing.T) {
	var ds []time.Duration
	for i := 20; i >= 1; i-- {
		ds = append(ds, time.Duration(i)*time.Millisecond)
	}
	for p, want := range map[float64]float64{0: 1, 50: 10, 95: 19, 99: 20, 100: 20} {
		if got := Percentile(ds, p); got != want {
			t.Errorf("p%v is %v, want %v", p, got, want)
		}
	}
	if ds[0] != 20*time.Millisecond {
		t.Error("the caller's list was sorted")
	}
	if Percentile(nil, 50) != 0 {
		t.Error("an empty list has a percentile")
	}
}

func TestAMissedTargetStaysInSight(t *testing.T) {
	missed := AtMost("stop", 12, "ms", 5).Beside("runc kill", 6)
	missed.Limits = "the scheduler"
	metrics := []Metric{AtMost("spawn", 4, "ms", 5), missed}
	var out bytes.Buffer
	if err := Print(&out, metrics); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"NO", "the scheduler", "runc kill", "yes"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, out.String())
		}
	}
	dir := t.TempDir()
	if err := Write(filepath.Join(dir, "bench"), "x", metrics); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(filepath.Join(dir, "bench", "x.json"))
	if err != nil {
		t.Fatal(err)
	}
	var back []map[string]any
	if err := json.Unmarshal(raw, &back); err != nil || len(back) != 2 {
		t.Fatal(err, back)
	}
	for _, key := range []string{"metric", "value", "unit", "target", "met", "peer", "peer_value", "ratio"} {
		if _, ok := back[1][key]; !ok {
			t.Errorf("key %s is missing", key)
		}
	}
	if back[1]["met"] != false || back[1]["ratio"] != 2.0 {
		t.Errorf("got %v", back[1])
	}
}
