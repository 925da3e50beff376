package bench

import (
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"
)

func TestAuditFiguresAreProduced(t *testing.T) {
	work, out := t.TempDir(), t.TempDir()
	metrics, err := RunAudit(t.Context(), AuditConfig{Work: work, Out: out, Records: 4000, Plain: 50 * time.Millisecond, View: 8000, Runs: 1, Print: io.Discard})
	if err != nil || len(metrics) != 10 {
		t.Fatalf("%+v %v", metrics, err)
	}
	for _, m := range metrics {
		if m.Value <= 0 || m.Peer != "" && m.PeerValue <= 0 {
			t.Errorf("%+v", m)
		}
	}
	if left, err := os.ReadDir(work); err != nil || len(left) != 0 {
		t.Errorf("%v %v", left, err)
	}
	raw, err := os.ReadFile(filepath.Join(out, "audit.json"))
	var again []Metric
	if err == nil {
		err = json.Unmarshal(raw, &again)
	}
	if err != nil || len(again) != len(metrics) {
		t.Errorf("%+v %v", again, err)
	}
}
