package oci

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"tagout/sandboxd/image/unpack"
)

// flood is a registry with one image, whose configuration is as long as its reader lets it be, up to 64 MiB. It returns how
// many bytes of that were sent.
func flood(t *testing.T, size int64) (ref string, sent *atomic.Int64) {
	t.Helper()
	sent = &atomic.Int64{}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v2/{$}", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v2/x/manifests/1", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/vnd.oci.image.manifest.v1+json")
		fmt.Fprintf(w, `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json","layers":[],
			"config":{"mediaType":"application/vnd.oci.image.config.v1+json","size":%d,"digest":"sha256:%s"}}`, size, strings.Repeat("0", 64))
	})
	mux.HandleFunc("GET /v2/x/blobs/{digest}", func(w http.ResponseWriter, _ *http.Request) {
		for part := make([]byte, 1<<20); sent.Load() < 64<<20; {
			n, err := w.Write(part)
			sent.Add(int64(n))
			if err != nil {
				return
			}
		}
	})
	srv := httptest.NewServer(mux)
	t.Cleanup(srv.Close)
	return strings.TrimPrefix(srv.URL, "http://") + "/x:1", sent
}

// TestAConfigurationFitsIntoMemory: a registry says how long it is, and is not believed. The library itself, asked for it,
// reads all of it: that is the control.
func TestAConfigurationFitsIntoMemory(t *testing.T) {
	for _, size := range []int64{-1, maxDocument + 1, 1 << 62} {
		ref, sent := flood(t, size)
		_, _, _, err := addFrom(t, Pulled{Ref: ref, Transport: http.DefaultTransport})
		if !errors.Is(err, unpack.ErrLimit) || sent.Load() > 0 {
			t.Errorf("size %d: %v after %d bytes", size, err, sent.Load())
		}
	}
	ref, sent := flood(t, -1)
	parsed, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	img, err := remote.Image(parsed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := img.RawConfigFile(); err == nil || errors.Is(err, io.ErrUnexpectedEOF) || sent.Load() < 64<<20 {
		t.Errorf("the control: %v after %d bytes: nothing is shown", err, sent.Load())
	}
}
