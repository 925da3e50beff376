package alert

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"tagout/internal/alert/alerttest"
	"tagout/internal/audit"
)

// TestKidsAreServedInTurn: hundreds of destinations of one kid wait for a slow receiver; the first alert of another kid
// overtakes them, and theirs all arrive as well.
func TestKidsAreServedInTurn(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	hook.Answer(func(alerttest.Posted) int {
		time.Sleep(10 * time.Millisecond) // a receiver far away
		return http.StatusNoContent
	})
	sink := hookSink("a", hook)
	sink.Window = time.Hour
	b := newBench(t, sink)
	defer b.run()()
	const many = 200
	for port := range many {
		b.deny("flood", 1000+port, 0)
	}
	until(t, "they wait", func() bool { n, _ := told(hook); return n > 2 })
	b.deny("calm", 80, 0)
	untilTold(t, hook, many+1)
	got, _ := hook.Got()
	at, before := -1, 0
	for i, p := range got {
		if p.Kid == "calm" {
			at = i
		}
	}
	calm, _, err := audit.Timeline(b.cfg.Dir, func(r *audit.Record) bool { return r.Kid == "calm" })
	if err != nil || len(calm) != 1 || at < 0 {
		t.Fatalf("the calm kid's record: %+v, %v; alert %d", calm, err, at)
	}
	if before = at; before > many/2 {
		t.Errorf("%d alerts of another kid came first", before)
	}
}

// TestFullQueueIsSharedFairly: where there is no room, it is the kid with the most alerts that loses some, with their
// number.
func TestFullQueueIsSharedFairly(t *testing.T) {
	hook := alerttest.StartHook(t, "")
	sink := hookSink("a", hook)
	sink.Queue, sink.Window = 16, time.Hour
	b := newBench(t, sink)
	f, err := New(b.cfg)
	if err != nil {
		t.Fatal(err)
	}
	l, now := f.lanes[0], time.Now()
	add := func(kid string, n int) {
		for i := range n {
			l.add(&audit.Record{Kid: kid, Dst: &audit.Dst{Name: fmt.Sprintf("x%d.test", i)}}, place{"log", 0}, now)
		}
	}
	add("flood", 100)
	add("calm", 5)
	add("other", 50)
	waiting := map[string]int{}
	for _, a := range l.queue {
		waiting[a.key.kid]++
	}
	if len(l.queue) != 16 || waiting["calm"] != 5 || waiting["other"] < 5 || l.dropped != 155-16 || len(l.queued) != 16 {
		t.Errorf("%v wait, %d attempts dropped", waiting, l.dropped)
	}
	order := ""
	for range 6 {
		order += l.pop().key.kid[:1]
		l.flight = nil
	}
	if order != "fcofco" {
		t.Errorf("served in the order %s", order)
	}
}
