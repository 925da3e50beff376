package session

import (
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"tagout/internal/policy"
)

func sample(kid string) *Session {
	return &Session{
		Version: Version, ID: "01J", Kid: kid, Mark: 7, Addr: netip.MustParseAddr("198.19.0.3"), HostAddr: netip.MustParseAddr("198.19.0.2"),
		Cgroup: "/c", CgroupID: 5, Generation: 2, Stop: Stop{Authority: "Ada", MaxTime: time.Minute}, Created: time.Unix(1, 0).UTC(),
		Egress: policy.Spec{Allow: []policy.Rule{{Host: "a.test", Ports: []uint16{443}, Protocol: policy.TLS}}, Deny: []policy.DenyRule{{Address: netip.MustParsePrefix("10.0.0.0/8")}}},
	}
}

func TestSweepRemovesWhatWasNeverFinished(t *testing.T) {
	dir := t.TempDir()
	st := NewStore(dir)
	if err := st.Put(sample("k"), os.Getgid()); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, newPrefix+"123"), []byte(`{"ver`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := st.Sweep(); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "k.json" {
		t.Errorf("left: %v %v", left, err)
	}
}

func TestRoundTrip(t *testing.T) {
	st := NewStore(t.TempDir())
	want := sample("k")
	if err := st.Put(want, os.Getgid()); err != nil {
		t.Fatal(err)
	}
	got, err := st.Get("k")
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v, %v", got, err)
	}
	if err := errors.Join(st.Delete("k"), st.Delete("k")); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Get("k"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("got %v", err)
	}
}

func TestLoadLeavesOutWhatItCannotRead(t *testing.T) {
	dir := t.TempDir()
	st := NewStore(dir)
	if err := st.Put(sample("good"), os.Getgid()); err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{"half.json": `{"version":1,"id":"0`, "old.json": `{"version":0,"id":"x","kid":"old"}`, ".new-1": "", "empty.json": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(body), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	got, err := st.Load()
	if len(got) != 1 || got[0].Kid != "good" || err == nil {
		t.Fatalf("loaded %d sessions, error %v; want the good one and an error for the rest", len(got), err)
	}
}

func TestIncompleteSessionsAreNotStored(t *testing.T) {
	dir := t.TempDir()
	s := sample("k")
	s.Mark = 0
	if NewStore(dir).Put(s, os.Getgid()) == nil {
		t.Fatal("a session without a mark was stored")
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Fatalf("left behind: %v", left)
	}
}
