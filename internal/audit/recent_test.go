package audit

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func TestRecent(t *testing.T) {
	dir := t.TempDir()
	for _, daemon := range []string{"a", "b"} {
		if err := os.MkdirAll(filepath.Join(dir, daemon), 0o700); err != nil {
			t.Fatal(err)
		}
		l, err := Open(filepath.Join(dir, daemon, daemon+".jsonl"), "test", daemon)
		if err != nil {
			t.Fatal(err)
		}
		for i := range 10 {
			l.Log(Record{Event: EventLookup, Kid: "k", Session: "s1", Detail: fmt.Sprint(daemon, i)})
		}
		l.Log(Record{Event: EventLookup, Kid: "k", Session: "s2"})
		l.Log(Record{Event: EventLookup, Kid: "other", Detail: `"session":"s1"`})
		l.Log(Record{Event: EventTagReleased, Kid: "k", Detail: "no session"})
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	details := func(since time.Time, most int64) (string, bool) {
		t.Helper()
		records, cut, err := Recent(dir, "k", "s1", since, most)
		if err != nil {
			t.Fatal(err)
		}
		var out []string
		for _, r := range records {
			out = append(out, r.Detail)
		}
		return strings.Join(out, " "), cut
	}
	all := "a0 a1 a2 a3 a4 a5 a6 a7 a8 a9 no session b0 b1 b2 b3 b4 b5 b6 b7 b8 b9 no session"
	if got, cut := details(time.Time{}, 1<<20); got != all || cut {
		t.Errorf("all: %s, cut %v", got, cut)
	}
	if got, _ := details(time.Now().Add(time.Hour), 1<<20); strings.Contains(got, "no session") || !strings.Contains(got, "a0") {
		t.Errorf("of a session that begins later: %s", got)
	}
	if got, cut := details(time.Time{}, 2000); !cut || strings.Contains(got, "a0") || !strings.Contains(got, "a9") || !strings.Contains(got, "b9") {
		t.Errorf("the last 2000 bytes: %s, cut %v", got, cut)
	}
}
