package e2e

import (
	"errors"
	"testing"
	"time"

	"tagout/internal/audit"
	"tagout/internal/practice"
	"tagout/internal/reason"
	"tagout/internal/wire"
)

// TestUngrantCutsWhatLivesOnIt: a stream that runs on a grant ends when the grant is taken back, with a record that says
// why. The control is the stream beside it, through the same proxy to the same server on another grant, which nobody
// takes back: it goes on.
func TestUngrantCutsWhatLivesOnIt(t *testing.T) {
	t.Parallel()
	box := start(t)
	box.Net.DNS.SetHost("other.vendor.test", box.Net.TicksAddr())
	kid := box.Spawn(bareCard, nil)
	opened := map[string]wire.Grant{}
	ended := map[string]<-chan string{}
	for host, stream := range map[string]string{practice.NameTicks: "gone", "other.vendor.test": "stays"} {
		g, err := grant(t, box, kid.Name, wire.GrantRequest{Host: host, Port: practice.PortTicks, Protocol: "tcp", For: time.Hour})
		if err != nil {
			t.Fatal(err)
		}
		opened[stream] = g
		done := running(t, box, kid.Name, "/bin/bash", "-c", "exec 3<>/dev/tcp/"+host+"/7000; echo ticks "+stream+" >&3; i=0; while echo $((i++)) >&3; do sleep 0.01; done; echo cut")
		said := make(chan string, 1)
		go func() { said <- (<-done).Stdout }()
		ended[stream] = said
	}
	flows := func(stream string, after time.Duration) {
		t.Helper()
		box.Until(soon, stream+" flows", func() error {
			if box.Net.Sink.LastByte(stream) <= after {
				return errors.New("no new tick")
			}
			return nil
		})
	}
	flows("gone", 0)
	flows("stays", 0)
	box.Must("ungrant", kid.Name, opened["gone"].ID, "--key", box.KeyFile(practice.Authority), "--reason", "done")
	acked := practice.Now()
	select {
	case <-ended["gone"]:
	case <-time.After(soon):
		t.Fatal("the stream goes on without its grant")
	}
	rec := box.WaitRecord("the cut", func(r *audit.Record) bool {
		return r.Kid == kid.Name && r.Event == audit.EventConnClosed && r.Dst != nil && r.Dst.Name == practice.NameTicks
	})
	if rec.Reason != reason.PolicyChanged || rec.Bytes == nil || rec.Bytes.Up == 0 {
		t.Errorf("the cut stream's record: %v %+v", rec.Reason, rec)
	}
	// What the server had in its buffers it may still read; then there is nothing, while the other one goes on.
	flows("stays", acked+time.Second)
	if last := box.Net.Sink.LastByte("gone"); last > acked+500*time.Millisecond {
		t.Errorf("a byte came %v after the answer", last-acked)
	}
	if reopened := box.Exec(kid.Name, "/bin/bash", "-c", "exec 3<>/dev/tcp/"+practice.NameTicks+"/7000"); reopened.Exit.Code == 0 {
		t.Error("the host is still looked up")
	}
	select {
	case out := <-ended["stays"]:
		t.Errorf("the other stream ended: %q", out)
	default:
	}
}
