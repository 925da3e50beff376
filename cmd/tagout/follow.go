package main

import (
	"context"
	"encoding/json"
	"time"

	"tagout/internal/audit"
	"tagout/internal/auditview"
	"tagout/internal/logtail"
)

// followEvery is how often the logs are looked at.
const followEvery = 200 * time.Millisecond

// storyFollower shows the records that a story gets.
type storyFollower struct {
	story *auditview.Story
	shown map[string]bool // by id
	want  func(*auditview.Line) bool
	show  func(*auditview.Line) error

	waiting map[string][]auditview.Line // by stop: what is said of stops that are not of the story so far
	gone    bool
	failed  error
}

// mostWaiting bounds what is kept of stops that may turn out to be of the story.
const mostWaiting = 1024

// run shows the records that come, but those that are shown already, until the story's kid is gone or ctx ends.
func (f *storyFollower) run(ctx context.Context, dir string, from map[string]logtail.Mark) error {
	f.waiting = map[string][]auditview.Line{}
	needles := [][]byte{[]byte(`"stop":"`)} // a stop of everybody names no kid at first
	for _, list := range [][]string{f.story.Kids, f.story.Sessions} {
		for _, s := range list {
			needle, err := json.Marshal(s)
			if err != nil {
				return err
			}
			needles = append(needles, needle)
		}
	}
	tail := logtail.New(dir, from, needles...)
	look := time.NewTicker(followEvery)
	defer look.Stop()
	for {
		tail.Poll(ctx, logtail.Handler{Line: f.line}) // a log that cannot be read is tried again
		if f.failed != nil || f.gone {
			return f.failed
		}
		select {
		case <-look.C:
		case <-ctx.Done():
			return &coded{code: exitInterrupted} // as it is meant to end
		}
	}
}

func (f *storyFollower) line(raw []byte, _ string, _ int64) {
	l, ok := auditview.Decode(raw)
	if !ok || f.failed != nil || f.shown[l.ID] {
		return
	}
	if !f.story.Belongs(&l.Record) {
		if stop := l.Fields["stop"]; l.Kid == "" && stop != "" && len(f.waiting) < mostWaiting {
			f.waiting[stop] = append(f.waiting[stop], l)
		}
		return
	}
	if stop := f.story.Meet(&l.Record); stop != "" {
		for _, earlier := range f.waiting[stop] {
			f.tell(earlier)
		}
		delete(f.waiting, stop)
	}
	f.tell(l)
}

func (f *storyFollower) tell(l auditview.Line) {
	f.shown[l.ID] = true
	if f.failed == nil && f.want(&l) {
		f.failed = f.show(&l)
	}
	f.gone = f.gone || l.Event == audit.EventKidDestroyed && isGone(&l.Record) && len(f.story.Kids) == 1
}
