package drillhistory

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
)

func add(t *testing.T, dir string, e Entry) {
	t.Helper()
	if err := Add(dir, e); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyAWholeDrillThatPassedCounts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "history")
	if _, ok := LastPassed(dir); ok {
		t.Error("a drill passed where there is no history")
	}
	day := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	add(t, dir, Entry{Started: day, Verdict: "PASS", Whole: true})
	add(t, dir, Entry{Started: day.AddDate(0, 0, 1), Verdict: "PASS"}) // a part of one
	add(t, dir, Entry{Started: day.AddDate(0, 0, 2), Verdict: "FAIL", Whole: true})
	add(t, dir, Entry{Started: day.AddDate(0, 0, 3), Verdict: "VOID", Whole: true})
	add(t, dir, Entry{Started: day.AddDate(0, 0, 4), Verdict: "PASS", Whole: true, Skipped: []string{"clock-stepped: not allowed"}})
	if at, ok := LastPassed(dir); !ok || !at.Equal(day) {
		t.Errorf("last passed %v %t, want %v", at, ok, day)
	}
	all, err := List(dir)
	if err != nil || len(all) != 5 || all[0].Started != day || all[3].Verdict != "VOID" {
		t.Errorf("%v %+v, want the five in their order", err, all)
	}
}

func TestDamageHidesNothingElse(t *testing.T) {
	dir := t.TempDir()
	add(t, dir, Entry{Started: time.Now(), Verdict: "PASS", Whole: true})
	all, err := List(dir)
	if err != nil {
		t.Fatal(err)
	}
	torn := filepath.Join(dir, "01ARZ3NDEKTSV4RRFFQ69G5FAV.json")
	if err := errors.Join(
		os.WriteFile(torn, []byte(`{"started":`), 0o600),
		os.WriteFile(filepath.Join(dir, "key"), []byte("no entry"), 0o600),
	); err != nil {
		t.Fatal(err)
	}
	again, err := List(dir)
	if err == nil || len(again) != 1 || again[0].ID != all[0].ID {
		t.Errorf("%v %+v, want the whole entry and an error about the torn one", err, again)
	}
	if _, ok := LastPassed(dir); !ok {
		t.Error("the torn entry hides the one that passed")
	}
}

func TestTheOldestGoAndTheLastThatPassedStays(t *testing.T) {
	dir := t.TempDir()
	day := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	add(t, dir, Entry{Started: day, Verdict: "PASS", Whole: true})
	for i := range Keep + 5 {
		raw := fmt.Sprintf(`{"started":%q,"verdict":"FAIL","whole":true}`, day.AddDate(0, 0, i+1).Format(time.RFC3339))
		if err := os.WriteFile(filepath.Join(dir, ulid.Make().String()+suffix), []byte(raw), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	add(t, dir, Entry{Started: day.AddDate(2, 0, 0), Verdict: "FAIL", Whole: true})
	all, err := List(dir)
	if err != nil || len(all) != Keep+1 {
		t.Errorf("%v, %d entries, want %d and the one that passed", err, len(all), Keep)
	}
	if at, ok := LastPassed(dir); !ok || !at.Equal(day) {
		t.Errorf("last passed %v %t, want %v", at, ok, day)
	}
}
