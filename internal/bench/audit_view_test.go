package bench

import (
	"os"
	"testing"
)

func TestSearchesAreMeasuredAndLeaveNothing(t *testing.T) {
	dir := t.TempDir()
	metrics, err := MeasureAuditView(t.Context(), AuditView{Dir: dir, Records: 40_000, Runs: 2})
	if err != nil || len(metrics) != 2 || metrics[0].Value <= 0 || metrics[1].Peer == "" {
		t.Errorf("%+v %v", metrics, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("%v %v", left, err)
	}
}
