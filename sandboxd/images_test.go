package sandboxd

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"net/netip"
	"path/filepath"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/wire"
	"tagout/sandboxd/image"
	"tagout/sandboxd/image/keep"
	"tagout/sandboxd/image/store"
	"tagout/sandboxd/kids"
)

// heard is an audit log that says of each record that it came.
type heard chan audit.Record

func (h heard) Log(r audit.Record)        { h <- r }
func (h heard) Err() error                { return nil }
func (h heard) Redact(text string) string { return text }

// TestSoManyImagesComeAtOnce: beyond that an import is refused, on record, and once one has ended there is a place again.
func TestSoManyImagesComeAtOnce(t *testing.T) {
	s, err := store.Open(filepath.Join(t.TempDir(), "images"), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	records := make(heard, 100)
	i := &imageSet{keeper: &keep.Keeper{Store: s, Audit: records}, places: make(chan struct{}, maxArrivals)}
	var archive bytes.Buffer
	tw := tar.NewWriter(&archive)
	if err := errors.Join(tw.WriteHeader(&tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}), tw.Close()); err != nil {
		t.Fatal(err)
	}
	load := func(from io.Reader) error {
		_, err := i.Import(t.Context(), "a", "key:ci", wire.ImageLimits{}, from)
		return err
	}
	done := make(chan error, maxArrivals)
	var ends []*io.PipeWriter
	for range maxArrivals {
		r, w := io.Pipe()
		ends = append(ends, w)
		go func() { done <- load(r) }()
		if _, err := w.Write(archive.Bytes()); err != nil { // it is being read: the place is taken
			t.Fatal(err)
		}
	}
	if err := load(bytes.NewReader(archive.Bytes())); !errors.Is(err, keep.ErrBusy) {
		t.Errorf("one more: %v, want %v", err, keep.ErrBusy)
	}
	if r := <-records; r.Event != audit.EventImageRefused || r.Reason != reason.Capacity || r.Actor != "key:ci" {
		t.Errorf("on record: %+v", r)
	}
	for _, w := range ends {
		w.Close() // never fails
	}
	for range maxArrivals {
		if err := <-done; err != nil {
			t.Errorf("one of those that had a place: %v", err)
		}
	}
	if err := load(bytes.NewReader(archive.Bytes())); err != nil { // the control
		t.Errorf("with a place: %v", err)
	}
}

// TestAnImageThatGoesMeanwhile: a card that names no image is the caller's fault, also where the image was removed between the
// spawn's first look and the making of its root filesystem.
func TestAnImageThatGoesMeanwhile(t *testing.T) {
	state := t.TempDir()
	s, err := store.Open(filepath.Join(state, "images"), state)
	if err != nil {
		t.Fatal(err)
	}
	stored, _ := image.NewStored(t.Context(), nil, s, state) // whether owners can be shifted does not matter
	i := &imageSet{stored: stored, keeper: &keep.Keeper{Store: s, Audit: make(heard, 100)}, places: make(chan struct{}, 1)}
	if _, err := i.get("a", ""); kids.KindOf(err) != kids.Invalid {
		t.Errorf("before it came: %v", err)
	}
	var archive bytes.Buffer
	tw := tar.NewWriter(&archive)
	if err := errors.Join(tw.WriteHeader(&tar.Header{Name: "d/", Typeflag: tar.TypeDir, Mode: 0o755}), tw.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := i.Import(t.Context(), "a", "uid:0", wire.ImageLimits{}, &archive); err != nil {
		t.Fatal(err)
	}
	img, err := i.get("a", "")
	if err != nil {
		t.Fatal(err) // the control
	}
	if err := i.Remove("a", "uid:0"); err != nil {
		t.Fatal(err)
	}
	if _, err := img.Root(filepath.Join(state, "root"), "kid", netip.Addr{}); kids.KindOf(err) != kids.Invalid || kids.ReasonOf(err) != reason.Malformed {
		t.Errorf("after it went: %v", err)
	}
}
