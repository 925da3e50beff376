package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/testenv"
	"tagout/internal/wire"
	"tagout/sandboxd/api"
	"tagout/sandboxd/image/store"
)

// upload sends an archive, as PUT /v1/images/NAME, and returns the image that came of it.
func upload(t *testing.T, c *control.Client, name string, archive io.Reader) (store.Manifest, error) {
	t.Helper()
	resp, err := c.Do(t.Context(), http.MethodPut, "/v1/images/"+name, archive, "application/x-tar")
	if err != nil {
		return store.Manifest{}, err
	}
	defer resp.Body.Close() // read whole
	var m store.Manifest
	return m, json.NewDecoder(resp.Body).Decode(&m)
}

// makeImage asks for an image and returns how that ended, and how many lines of progress came before.
func makeImage(t *testing.T, c *control.Client, route string, in any) (m *store.Manifest, progress int, err error) {
	t.Helper()
	err = c.Each(t.Context(), http.MethodPost, route, in, func(raw json.RawMessage) error {
		var f api.ImageFrame
		if err := json.Unmarshal(raw, &f); err != nil {
			return err
		}
		if f.Problem != nil {
			return &control.Error{Problem: *f.Problem}
		}
		if m = f.Image; m == nil {
			progress++
		}
		return nil
	})
	return m, progress, err
}

// TestImagesOverHTTP: images come by each way, are listed, used and removed over the API, each on record with who asked;
// what is refused or broken off leaves nothing.
func TestImagesOverHTTP(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	c := box.Client(instance.Sandboxd)
	if m, err := upload(t, c, "tool", bytes.NewReader(toolTar(t, box, "first"))); err != nil || m.Name != "tool" || m.Kind != store.KindRootfs {
		t.Errorf("import: %+v %v", m, err)
	}
	openShop(t, box)
	pull := wire.PullRequest{Name: "pulled", Ref: "registry.vendor.test/tools/tool:1.2"}
	if m, progress, err := makeImage(t, c, "/v1/images/pull", pull); err != nil || m == nil || m.Kind != store.KindPulled || progress == 0 {
		t.Errorf("pull: %+v %d %v", m, progress, err)
	}
	m := openMirror(t, box)
	build := wire.BuildRequest{Name: "built", Suite: suite, Mirror: practiceMirror, Keyring: m.key, Space: 256 << 20}
	keyed := c.With("Idempotency-Key", "k")
	first, progress, err := makeImage(t, keyed, "/v1/images/build", build)
	if err != nil || first == nil || first.Kind != store.KindBuilt || progress == 0 {
		t.Fatalf("build: %+v %d %v", first, progress, err)
	}
	if again, progress, err := makeImage(t, keyed, "/v1/images/build", build); err != nil || again == nil || again.ID != first.ID || progress != 0 {
		t.Errorf("a repeat: %+v %d %v", again, progress, err)
	}
	var list []store.Image
	if err := c.Call(t.Context(), http.MethodGet, "/v1/images", nil, &list); err != nil || len(list) != 3 || list[0].Name != "built" || list[1].Name != "pulled" || list[2].Name != "tool" {
		t.Errorf("the list: %+v %v", list, err)
	}
	removeOverHTTP(t, box, c)
	refusedOverHTTP(t, box, c)
	for _, way := range []string{"import", "pull", "build"} {
		box.WaitRecord("an image came by "+way, func(r *audit.Record) bool {
			return r.Event == audit.EventImageAdded && r.Actor == "uid:0" && r.Fields["way"] == way
		})
	}
}

// removeOverHTTP: an image stays while a kid uses it.
func removeOverHTTP(t *testing.T, box *testenv.Box, c *control.Client) {
	t.Helper()
	kid := box.Spawn(imageCard("tool"), nil).Name
	if out := box.Exec(kid, "/bin/tagout", "version"); !strings.HasPrefix(out.Stdout, "tagout ") {
		t.Errorf("a program of the image: %+v", out)
	}
	remove := func() error { return c.Call(t.Context(), http.MethodDelete, "/v1/images/tool", nil, nil) }
	if err := remove(); control.Status(err) != http.StatusConflict || !strings.Contains(err.Error(), kid) {
		t.Errorf("rm while a kid uses it: %v", err)
	}
	if _, err := upload(t, c, "tool", bytes.NewReader(toolTar(t, box, "second"))); err != nil {
		t.Error(err)
	}
	box.Destroy(kid)
	var swept store.Swept
	if err := c.Call(t.Context(), http.MethodPost, "/v1/images/gc", nil, &swept); err != nil || len(swept.Images) != 1 || swept.Images[0].Name != "tool" {
		t.Errorf("gc: %+v %v", swept, err)
	}
	for range 2 { // the second time it is gone already
		if err := remove(); err != nil {
			t.Errorf("rm: %v", err)
		}
	}
	if err := c.Call(t.Context(), http.MethodGet, "/v1/images/tool", nil, nil); control.Status(err) != http.StatusNotFound {
		t.Errorf("after rm: %v", err)
	}
}

// refusedOverHTTP: each refusal has its status and leaves nothing.
func refusedOverHTTP(t *testing.T, box *testenv.Box, c *control.Client) {
	t.Helper()
	const left = "built true 0, pulled true 0, 0 leftovers"
	raw := toolTar(t, box, "bad")
	for name, u := range map[string]struct {
		route   string
		archive io.Reader
		status  int
	}{
		"half an archive":      {"bad", bytes.NewReader(raw[:len(raw)/2]), http.StatusUnprocessableEntity},
		"no archive":           {"bad", strings.NewReader(strings.Repeat("no archive ", 1000)), http.StatusUnprocessableEntity},
		"nothing":              {"bad", strings.NewReader(""), http.StatusUnprocessableEntity},
		"a name that is none":  {"BAD", bytes.NewReader(raw), http.StatusUnprocessableEntity},
		"the machine's name":   {"host", bytes.NewReader(raw), http.StatusUnprocessableEntity},
		"more bytes than may":  {"bad?max_bytes=1000", bytes.NewReader(raw), http.StatusRequestEntityTooLarge},
		"more files than may":  {"bad?max_files=1", bytes.NewReader(raw), http.StatusRequestEntityTooLarge},
		"a stream without end": {"bad?max_bytes=1000&max_files=10", endless{}, http.StatusRequestEntityTooLarge},
	} {
		if _, err := upload(t, c, u.route, u.archive); control.Status(err) != u.status {
			t.Errorf("%s: %v, want %d", name, err, u.status)
		}
	}
	if _, err := upload(t, c, "bad", io.MultiReader(bytes.NewReader(raw[:1<<20]), broken{})); err == nil {
		t.Error("a client that went away got an image")
	}
	for _, ref := range []string{"registry.vendor.test/tools/tool:nosuch", "nosuch.vendor.test/x:1"} {
		if _, _, err := makeImage(t, c, "/v1/images/pull", wire.PullRequest{Name: "bad", Ref: ref}); control.Status(err) != http.StatusBadGateway {
			t.Errorf("pull %s: %v", ref, err)
		}
	}
	if _, _, err := makeImage(t, c, "/v1/images/pull", wire.PullRequest{Name: "bad", Ref: "a b"}); control.Status(err) != http.StatusUnprocessableEntity {
		t.Errorf("a reference that is none: %v", err)
	}
	if _, _, err := makeImage(t, c, "/v1/images/build", wire.BuildRequest{Name: "bad", Suite: "--help"}); control.Status(err) != http.StatusUnprocessableEntity {
		t.Errorf("a suite that is none: %v", err)
	}
	box.Until(soon, "nothing is left", func() error {
		if got := images(t, box); got != left {
			return errors.New(got)
		}
		return nil
	})
}

// endless is a stream of bytes that never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// broken is a source that breaks off.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("the test breaks it off") }
