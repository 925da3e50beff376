package kids

import (
	"context"
	"encoding/hex"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/lessons"
)

// TestDestroyKeepsALesson: the note is there before the kid goes, once, without the kid's tokens; where it cannot be
// kept the kid stays. Control: a plain destroy keeps none.
func TestDestroyKeepsALesson(t *testing.T) {
	b := newBox(t, "tsblesson")
	store, err := lessons.Open(b.inst.StateDir(), b.inst.AuditDir())
	if err != nil {
		t.Fatal(err)
	}
	learn := func(kid, text string) (string, error) {
		return b.DestroyWithLesson(t.Context(), kid, "test", "done", text)
	}
	there := func(kid string) bool {
		_, err := b.Get(t.Context(), kid)
		return err == nil
	}
	k := b.spawn("k1", plan())
	if _, err := learn("k1", "text"); KindOf(err) != Unavailable || !there("k1") {
		t.Errorf("nobody keeps lessons: %v", err)
	}
	b.cfg.Lessons = store
	for _, text := range []string{" ", strings.Repeat("x", wire.MaxLesson+1)} {
		if _, err := learn("k1", text); KindOf(err) != Invalid || !there("k1") {
			t.Errorf("%d bytes: %v", len(text), err)
		}
	}
	if _, err := b.DestroyWithLesson(t.Context(), "k1", "test", " ", "text"); KindOf(err) != Invalid || !there("k1") {
		t.Errorf("no reason: %v", err)
	}
	killed := errors.New("killed")
	b.fault = func(step string, _ bool) error {
		if step == "lesson" {
			return killed
		}
		return nil
	}
	if _, err := learn("k1", "first"); !errors.Is(err, killed) || !there("k1") {
		t.Fatalf("a kill between the note and the destroy: %v", err)
	}
	b.fault = nil
	token := "tgo_" + strings.Repeat("a", 32) // what the fake credd gave
	file, err := learn("k1", "second "+token)
	if err != nil || there("k1") {
		t.Fatalf("destroyed: %v", err)
	}
	all, err := store.List(nil)
	if err != nil || len(all) != 1 || all[0].Name != file || all[0].Text != "first" || strings.Join(all[0].Unused, ",") != "vendor_api" || all[0].Session != k.Session || all[0].State != wire.KidRunning {
		t.Errorf("notes: %+v, %v", all, err)
	}
	if n := b.audit.count(audit.EventLessonKept, audit.OutcomeOK); n != 2 {
		t.Errorf("%d records of a kept lesson", n)
	}
	if _, err := learn("k1", "text"); KindOf(err) != NotFound || ReasonOf(err) != reason.UnknownSession {
		t.Errorf("of a kid that is gone: %v", err)
	}
	b.spawn("k1", plan()) // another session
	if file, err = learn("k1", "hex "+hex.EncodeToString([]byte(token))+", clear "+token); err != nil {
		t.Fatal(err)
	}
	if l, err := store.Get(file); err != nil || l.Text != "hex "+audit.Redacted+", clear "+audit.Redacted {
		t.Errorf("the kid's token: %q, %v", l.Text, err)
	}
	b.spawn("k2", plan())
	if err := b.Destroy(t.Context(), "k2", "test", "done"); err != nil {
		t.Fatal(err)
	}
	if all, err := store.List(nil); err != nil || len(all) != 2 {
		t.Errorf("control: %d notes, %v", len(all), err)
	}
	b.wantNothingLeft()
	if files, err := filepath.Glob(filepath.Join(b.inst.StateDir(), lessons.Dir, "*")); err != nil || len(files) != 2 {
		t.Errorf("files: %v, %v", files, err)
	}
}

// TestALessonFromEveryState: also of a kid that is just being made, frozen, or somebody's case.
func TestALessonFromEveryState(t *testing.T) {
	b := newBox(t, "tsblstate")
	store, err := lessons.Open(b.inst.StateDir(), b.inst.AuditDir())
	if err != nil {
		t.Fatal(err)
	}
	b.cfg.Lessons = store
	learn := func(kid string, want wire.KidState) {
		t.Helper()
		file, err := b.DestroyWithLesson(t.Context(), kid, "test", "done", "text")
		if err != nil {
			t.Fatal(err)
		}
		if l, err := store.Get(file); err != nil || l.State != want || l.Kid != kid || l.Session == "" {
			t.Errorf("%s: %+v, %v, want it %s", kid, l, err, want)
		}
	}
	b.spawn("paused", plan())
	if err := b.Pause(t.Context(), "paused", "test", ""); err != nil {
		t.Fatal(err)
	}
	learn("paused", wire.KidPaused)
	k := b.spawn("stopped", plan())
	b.guards.tag(wire.Tag{Marks: []uint32{k.Mark}})
	b.List(t.Context()) // sees the stop
	learn("stopped", wire.KidStopped)

	reached, kept, spawned := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	b.fault = func(step string, done bool) error {
		switch {
		case step == "files" && done:
			close(reached)
			<-kept
		case step == "lesson":
			close(kept)
		}
		return nil
	}
	go func() {
		_, err := b.Spawn(context.WithoutCancel(t.Context()), Request{Name: "new", Plan: plan()})
		spawned <- err
	}()
	<-reached
	learn("new", wire.KidSpawning)
	if err := <-spawned; err == nil {
		t.Error("the spawn that was called off succeeded")
	}
	b.fault = nil
	b.wantNothingLeft()
}
