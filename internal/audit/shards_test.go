package audit

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func TestShardsAreListedInOrder(t *testing.T) {
	dir := t.TempDir()
	header := func(first int) string {
		return fmt.Sprintf(`{"v":1,"event":"audit.shard","fields":{"first":"%d"}}`+"\n", first)
	}
	put(t, filepath.Join(dir, "proxy", "proxy.jsonl"), header(7)+"live\n")
	put(t, filepath.Join(dir, "proxy", "shards", "000000000000-20260101T000000Z.jsonl.age"), "sealed")
	put(t, filepath.Join(dir, "proxy", "shards", "000000000003-20260102T000000Z.jsonl"), header(3)+"a\nb\nc\n")
	put(t, filepath.Join(dir, "proxy", "shards", "000000000003-20260102T000000Z.jsonl.age"), "unfinished")
	put(t, filepath.Join(dir, "proxy", "shards", "3-x.jsonl"), "not one")
	put(t, filepath.Join(dir, "credd", "credd.jsonl"), "today's layout\n")
	put(t, filepath.Join(dir, "file"), "")
	shards, err := Shards(dir)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range shards {
		text := ""
		if r, err := s.Open(); err == nil {
			raw, _ := io.ReadAll(r)
			text = string(raw[strings.LastIndexByte(strings.TrimRight(string(raw), "\n"), '\n')+1:])
			r.Close()
		} else if !errors.Is(err, ErrSealed) {
			t.Error(err)
		}
		got = append(got, fmt.Sprintf("%s %d live=%v sealed=%v %q", s.Daemon, s.First, s.Live, s.Sealed, text))
	}
	want := []string{
		`credd 0 live=true sealed=false "today's layout\n"`, `proxy 0 live=false sealed=true ""`,
		`proxy 3 live=false sealed=false "c\n"`, `proxy 7 live=true sealed=false "live\n"`,
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	r, err := shards[1].Open(func(r io.Reader) (io.Reader, error) { return nil, errors.New("wrong key") }, func(r io.Reader) (io.Reader, error) { return r, nil })
	if err != nil {
		t.Fatal(err)
	}
	raw, _ := io.ReadAll(r)
	if string(raw) != "sealed" || r.Close() != nil {
		t.Errorf("unsealed %q", raw)
	}
}

// TestALiveShardIsReadWhereItWent: between the listing and the opening it was closed, and another is live.
func TestALiveShardIsReadWhereItWent(t *testing.T) {
	dir := t.TempDir()
	live := filepath.Join(dir, "x", "x.jsonl")
	put(t, live, "old\n")
	shards, err := Shards(dir)
	if err != nil || len(shards) != 1 {
		t.Fatal(shards, err)
	}
	put(t, filepath.Join(dir, "x", "shards", "000000000000-20260101T000000Z.jsonl"), "old\n")
	read := func() string {
		t.Helper()
		r, err := shards[0].Open()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		raw, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		return string(raw)
	}
	put(t, live, `{"v":1,"event":"audit.shard","fields":{"first":"1"}}`+"\nnew\n")
	if got := read(); got != "old\n" {
		t.Errorf("after the change: %q", got)
	}
	os.Remove(live)
	if got := read(); got != "old\n" {
		t.Errorf("amid the change: %q", got)
	}
}
