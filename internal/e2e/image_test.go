package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"tagout/internal/audit"
	"tagout/internal/reason"
	"tagout/internal/testenv"
)

// toolTar is a root filesystem with one program in it: the operator's own CLI, which is static.
func toolTar(t *testing.T, box *testenv.Box, note string) []byte {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(box.Bin, "tagout"))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for file, content := range map[string][]byte{"bin/tagout": raw, "note": []byte(note)} {
		err := tw.WriteHeader(&tar.Header{Name: file, Mode: 0o755, Size: int64(len(content)), Typeflag: tar.TypeReg})
		if err == nil {
			_, err = tw.Write(content)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func imageCard(image string) string {
	return strings.Replace(bareCard, "image: host", "image: "+image, 1)
}

// images lists what `tagout image ls` shows, and how many leftovers lie in the store.
func images(t *testing.T, box *testenv.Box) string {
	t.Helper()
	var list []struct {
		Name    string
		Current bool
		UsedBy  []string `json:"used_by"`
	}
	if err := json.Unmarshal([]byte(box.Must("image", "ls", "--json")), &list); err != nil {
		t.Fatal(err)
	}
	out := ""
	for _, i := range list {
		out += fmt.Sprintf("%s %v %d, ", i.Name, i.Current, len(i.UsedBy))
	}
	left, err := os.ReadDir(filepath.Join(box.Inst.ImageDir(), "tmp"))
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(out, len(left), " leftovers")
}

// TestImageLife: an operator imports an image, kids run on it, it stays while one does, and a newer one takes its name.
func TestImageLife(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	file := filepath.Join(t.TempDir(), "tool.tar")
	if err := os.WriteFile(file, toolTar(t, box, "first"), 0o600); err != nil {
		t.Fatal(err)
	}
	if out := box.Must("image", "import", file); !strings.HasPrefix(out, "image tool: sha256:") {
		t.Errorf("import: %s", out)
	}
	kid := box.Spawn(imageCard("tool"), nil).Name
	if out := box.Exec(kid, "/bin/tagout", "version"); !strings.HasPrefix(out.Stdout, "tagout ") {
		t.Errorf("a program of the image: %+v", out)
	}
	if out := box.Exec(kid, "/bin/sh", "-c", "true"); out.Exit.Code != 126 && out.Exit.Code != 127 {
		t.Errorf("the machine's shell is in the kid: %+v", out)
	}
	if out := box.Exec(kid, "/bin/tagout", "list"); out.Exit.Code == 0 {
		t.Errorf("a kid's own tagout finds something to talk to: %+v", out)
	}
	if r := box.Tagout("image", "rm", "tool"); r.Code != 3 || !strings.Contains(r.Stderr, kid) {
		t.Errorf("rm while a kid uses it: %+v", r)
	}
	if err := os.WriteFile(file, toolTar(t, box, "second"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := box.Tagout("doctor"); !strings.Contains(r.Stdout, "older than its source: tool") {
		t.Errorf("doctor says nothing about an image older than its source: %s", r.Stdout)
	}
	box.Must("image", "import", file)
	if got := images(t, box); got != "tool true 0, tool false 1, 0 leftovers" {
		t.Errorf("after the second import: %s", got)
	}
	if r := box.Tagout("doctor"); strings.Contains(r.Stdout, "older than its source") || !strings.Contains(r.Stdout, "newer build of tool than "+kid) {
		t.Errorf("doctor about a kid on a replaced image: %s", r.Stdout)
	}
	box.Destroy(kid)
	box.Must("image", "gc")
	if got := images(t, box); got != "tool true 0, 0 leftovers" {
		t.Errorf("after the kid: %s", got)
	}
	box.Must("image", "rm", "tool")
	if got, want := imageRecords(box), "image.added import; image.refused remove image-in-use; image.added import; image.removed; image.removed"; got != want {
		t.Errorf("on record: %s, want %s", got, want)
	}
	if r := box.Tagout("image", "rm", "tool"); r.Code != 2 {
		t.Errorf("rm again: %+v", r)
	}
	if _, err := box.TrySpawn("", imageCard("tool"), nil); err == nil || !strings.Contains(err.Error(), "tagout image ls") {
		t.Errorf("spawning on an image that is gone: %v", err)
	}
}

// imageRecords lists what the audit logs say about images, in order.
func imageRecords(box *testenv.Box) string {
	var out []string
	for _, r := range box.Records(func(r *audit.Record) bool { return strings.HasPrefix(r.Event, "image.") }) {
		text := r.Event
		switch {
		case r.Event == audit.EventImageAdded:
			text += " " + r.Fields["way"]
		case r.Event == audit.EventImageRefused:
			text += " " + r.Fields["what"] + " " + r.Reason.String()
		}
		out = append(out, text)
	}
	return strings.Join(out, "; ")
}

// shop is a registry whose blobs can be spoilt or stopped half-way.
type shop struct {
	http.Handler
	spoil, stall atomic.Bool
	stalled      chan struct{}
}

func (s *shop) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || !strings.Contains(r.URL.Path, "/blobs/") || !s.spoil.Load() && !s.stall.Load() {
		s.Handler.ServeHTTP(w, r)
		return
	}
	rec := httptest.NewRecorder()
	s.Handler.ServeHTTP(rec, r)
	body := rec.Body.Bytes()
	if len(body) < 1<<20 { // the configuration
		w.Write(body) // the client is gone
		return
	}
	if s.spoil.Load() {
		body[len(body)/2] ^= 1
		w.Write(body) // the client is gone
		return
	}
	w.Header().Set("Content-Length", fmt.Sprint(len(body)))
	w.Write(body[:len(body)/2]) // as above
	http.NewResponseController(w).Flush()
	close(s.stalled)
	<-r.Context().Done()
}

// openShop puts an image into a registry and the registry onto the practice internet, at registry.vendor.test.
func openShop(t *testing.T, box *testenv.Box) (*shop, v1.Image) {
	t.Helper()
	raw := toolTar(t, box, "pulled")
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(raw)), nil })
	var img v1.Image
	if err == nil {
		img, err = mutate.AppendLayers(empty.Image, layer)
	}
	if err != nil {
		t.Fatal(err)
	}
	s := &shop{Handler: registry.New(), stalled: make(chan struct{})}
	s.push(t, img)
	box.Net.Shelf.Handle("/v2/", s)
	return s, img
}

// push puts the image into the registry, as tools/tool:1.2.
func (s *shop) push(t *testing.T, img v1.Image) {
	t.Helper()
	srv := httptest.NewServer(s)
	defer srv.Close()
	ref, err := name.ParseReference(strings.TrimPrefix(srv.URL, "http://")+"/tools/tool:1.2", name.Insecure)
	if err == nil {
		err = remote.Write(ref, img)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestImagePull fetches an image over TLS from a registry of the practice internet. What is spoilt is refused, and what is
// interrupted, also by a kill, leaves nothing.
func TestImagePull(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	s, img := openShop(t, box)
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	const ref = "registry.vendor.test/tools/tool"
	s.spoil.Store(true)
	if r := box.Tagout("image", "pull", ref+":1.2"); r.Code == 0 {
		t.Errorf("a spoilt layer was taken: %s", r.Stdout)
	}
	if got := images(t, box); got != "0 leftovers" {
		t.Errorf("after a spoilt pull: %s", got)
	}
	s.spoil.Store(false)
	box.WaitRecord("a spoilt pull, denied", func(r *audit.Record) bool {
		return r.Event == audit.EventImageRefused && r.Outcome == audit.OutcomeDeny && r.Reason == reason.DigestMismatch && r.Fields["source"] == ref+":1.2"
	})
	for _, bad := range []string{ref + ":nosuch", ref + "@sha256:" + strings.Repeat("0", 64), "registry.vendor.test/nosuch/image:1", "nosuch.vendor.test/x:1", "mirror.vendor.test:80/x:1"} {
		if r := box.Tagout("image", "pull", "--name", "x", bad); r.Code == 0 {
			t.Errorf("pull %s: no error", bad)
		}
	}
	box.Must("image", "pull", ref+":1.2")
	box.Must("image", "pull", "--name", "pinned", ref+"@"+digest.String())
	if got := images(t, box); got != "pinned true 0, tool-1.2 true 0, 0 leftovers" {
		t.Errorf("after the pulls: %s", got)
	}
	kid := box.Spawn(imageCard("tool-1.2"), nil).Name
	if out := box.Exec(kid, "/bin/tagout", "version"); !strings.HasPrefix(out.Stdout, "tagout ") {
		t.Errorf("a program of the image: %+v", out)
	}
	if r := box.Tagout("doctor"); !strings.Contains(r.Stdout, "2 images, none older than its source") {
		t.Errorf("doctor: %s", r.Stdout)
	}
	newer, err := mutate.Time(img, time.Unix(1_700_000_000, 0))
	if err != nil {
		t.Fatal(err)
	}
	s.push(t, newer)
	if r := box.Tagout("doctor"); !strings.Contains(r.Stdout, "its registry has a newer build: tool-1.2;") && !strings.Contains(r.Stdout, "a newer build: tool-1.2; costs") {
		t.Errorf("doctor about an image with a newer build: %s", r.Stdout)
	}
	killPull(t, box, s, ref+":1.2")
}

// killPull kills a pull in the middle of a layer.
func killPull(t *testing.T, box *testenv.Box, s *shop, ref string) {
	t.Helper()
	s.stall.Store(true)
	defer s.stall.Store(false)
	before := images(t, box)
	cmd := exec.CommandContext(t.Context(), filepath.Join(box.Bin, "tagout"), "--instance", box.Inst.Name(), "image", "pull", "--name", "half", ref)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-s.stalled:
	case <-time.After(soon):
		t.Error("the pull did not get to its layer")
	}
	box.Until(soon, "the layer is being unpacked", func() error {
		if images(t, box) == before {
			return errors.New("nothing is in the making")
		}
		return nil
	})
	cmd.Process.Kill() // as is meant
	cmd.Wait()         // it was killed
	var swept struct{ Leftovers int }
	if err := json.Unmarshal([]byte(box.Must("image", "gc", "--json")), &swept); err != nil || swept.Leftovers != 1 {
		t.Errorf("gc after the kill: %+v, %v", swept, err)
	}
	if after := images(t, box); after != before {
		t.Errorf("before the killed pull: %s, after: %s", before, after)
	}
}
