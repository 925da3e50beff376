package keep

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"tagout/internal/audit"
	"tagout/sandboxd/image/oci"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/image/unpack"
)

// log keeps records in memory.
type log struct {
	full    error
	records []audit.Record
}

func (l *log) Log(r audit.Record) { l.records = append(l.records, r) }
func (l *log) Err() error         { return l.full }

// take returns "EVENT OUTCOME REASON IMAGE ACTOR" of what was recorded since the last call.
func (l *log) take() string {
	var out []string
	for _, r := range l.records {
		out = append(out, fmt.Sprintf("%s %s %s %s %s", r.Event, r.Outcome, r.Reason, r.Fields["image"], r.Actor))
	}
	l.records = nil
	return strings.Join(out, "; ")
}

// source gives a small image, or fails.
type source struct{ err error }

func (s source) Unpack(ctx context.Context, u *unpack.Unpacker, _ string, m *store.Manifest) error {
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	err := tw.WriteHeader(&tar.Header{Name: "hello", Mode: 0o644, Size: 1, Typeflag: tar.TypeReg})
	if err == nil {
		_, err = tw.Write([]byte("x"))
	}
	m.Kind, m.Source, m.Digest = store.KindRootfs, "test", "sha256:00"
	return errors.Join(err, tw.Close(), u.Layer(ctx, &out), s.err)
}

func TestEveryChangeIsOnRecord(t *testing.T) {
	kids, l := t.TempDir(), &log{}
	s, err := store.Open(filepath.Join(t.TempDir(), "images"), kids)
	if err != nil {
		t.Fatal(err)
	}
	k := &Keeper{Store: s, Audit: l}
	want := func(records string) {
		t.Helper()
		if got := l.take(); got != records {
			t.Errorf("recorded %q, want %q", got, records)
		}
	}
	add := func(name string, fail error) (store.Manifest, error) {
		return k.Add(t.Context(), Wish{Name: name, Actor: "uid:0", Way: "import", Source: "x.tar", Limits: unpack.DefaultLimits()}, source{fail})
	}
	m, err := add("tools", nil)
	if err != nil {
		t.Fatal(err)
	}
	if f := l.records[0].Fields; f["digest"] != m.Digest || f["size"] != "1" || f["id"] != m.ID || f["source"] != "test" {
		t.Errorf("the record says %v", f)
	}
	want("image.added ok ok tools uid:0")
	for reason, fail := range map[string]error{
		"deny digest-mismatch": fmt.Errorf("layer 1: %w", oci.ErrDigest), "deny digest-mismatch ": store.ErrForged, "fail capacity": &os.PathError{Op: "write", Err: unix.ENOSPC},
		"fail too-large": unpack.ErrLimit, "fail source-failed": errors.New("connection refused"), "fail ok": context.Canceled,
	} {
		if _, err := add("other", fail); !errors.Is(err, fail) {
			t.Errorf("%v instead of %v", err, fail)
		}
		want("image.refused " + strings.TrimSpace(reason) + " other uid:0")
	}
	if _, err := add("Not a name", nil); !errors.Is(err, store.ErrName) {
		t.Error(err)
	}
	want("image.refused fail malformed Not a name uid:0")
	kid := filepath.Join(kids, "k1")
	if err := os.Mkdir(kid, 0o700); err != nil {
		t.Fatal(err)
	}
	if _, _, err := s.Use("tools", kid); err != nil {
		t.Fatal(err)
	}
	if err := k.Remove("tools", "uid:0"); !errors.Is(err, store.ErrInUse) {
		t.Error(err)
	}
	want("image.refused fail image-in-use tools uid:0")
	if _, err := add("tools", nil); err != nil {
		t.Fatal(err)
	}
	want("image.added ok ok tools uid:0")
	if err := os.RemoveAll(kid); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Sweep("sandboxd"); err != nil {
		t.Fatal(err)
	}
	want("image.removed ok ok tools sandboxd")
	if _, err := add("tools", nil); err != nil { // the one before goes with it
		t.Fatal(err)
	}
	want("image.removed ok ok tools uid:0; image.added ok ok tools uid:0")
	if err := k.Remove("tools", "key:ci"); err != nil {
		t.Fatal(err)
	}
	want("image.removed ok ok tools key:ci")
	if err := k.Remove("tools", "key:ci"); !errors.Is(err, store.ErrUnknown) {
		t.Error(err)
	}
	want("image.refused fail ok tools key:ci")
}

// TestNothingChangesWithoutARecord: while the audit log takes nothing, no image comes or goes.
func TestNothingChangesWithoutARecord(t *testing.T) {
	l := &log{}
	s, err := store.Open(filepath.Join(t.TempDir(), "images"), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	k := &Keeper{Store: s, Audit: l}
	names := func() (out []string) {
		list, err := s.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range list {
			out = append(out, i.Name)
		}
		return out
	}
	change := func() (errs []error) {
		_, err := k.Add(t.Context(), Wish{Name: "new", Limits: unpack.DefaultLimits()}, source{})
		_, sweep := k.Sweep("x")
		return []error{err, k.Remove("old", "x"), sweep}
	}
	if _, err := k.Add(t.Context(), Wish{Name: "old", Limits: unpack.DefaultLimits()}, source{}); err != nil {
		t.Fatal(err)
	}
	l.full = errors.New("no space left")
	for _, err := range change() {
		if !errors.Is(err, ErrUnrecorded) {
			t.Errorf("with a full log: %v", err)
		}
	}
	if got := names(); len(got) != 1 || got[0] != "old" {
		t.Errorf("with a full log there are %v", got)
	}
	l.full = nil // the control: now the same goes through
	if err := errors.Join(change()...); err != nil {
		t.Error(err)
	}
	if got := names(); len(got) != 1 || got[0] != "new" {
		t.Errorf("with a log again there are %v", got)
	}
}
