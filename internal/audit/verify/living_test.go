package verify

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"tagout/internal/audit"
)

// TestALivingLogVerifies, at any moment, while it is written to and its files change.
func TestALivingLogVerifies(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	must(t, os.Mkdir(filepath.Join(dir, "x"), 0o700))
	l, err := audit.OpenWith(filepath.Join(dir, "x", "x.jsonl"), "test", "x", audit.Options{ShardBytes: 50_000})
	must(t, err)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			l.Log(audit.Record{Event: audit.EventLookup, Kid: "k"})
			if n%50 == 0 && l.Sync(t.Context()) != nil {
				return
			}
		}
	}()
	rounds, most := 0, uint64(0)
	for deadline := time.Now().Add(2 * time.Second); time.Now().Before(deadline); rounds++ {
		r, err := Run(dir, Options{})
		if err != nil || !r.OK {
			t.Errorf("round %d: %v %s", rounds, err, texts(r))
			break
		}
		most = max(most, r.Logs[0].Records)
	}
	close(stop)
	<-ended
	must(t, l.Close())
	if rounds < 3 || most < 1000 {
		t.Errorf("%d rounds over %d records show nothing", rounds, most)
	}
}
