package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"tagout/internal/audit"
	"tagout/internal/config"
	"tagout/internal/control"
	"tagout/internal/instance"
	"tagout/internal/reason"
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

// TestImagesOverTCP: a key with the role images adds and removes them, and no other; nobody reaches a private address by way
// of a reference; an AI agent changes nothing. A box on which kids are signed for builds none.
func TestImagesOverTCP(t *testing.T) {
	t.Parallel()
	addr := freePort(t)
	box := testenv.StartWith(t, func(b *config.Box) { b.API.Listen, b.SpawnSigned = addr, true })
	reader := strings.TrimSpace(box.Must("apikey", "add", "reader", "--role", "read,spawn,exec,files,destroy"))
	keeper := strings.TrimSpace(box.Must("apikey", "add", "keeper", "--role", "images,read"))
	call := func(key, method, route, agent string, body io.Reader) (int, string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+addr.String()+route, body)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+key)
		req.Header.Set("Content-Type", "application/json")
		if agent != "" {
			req.Header.Set("Tagout-Agent", agent)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close() // read whole
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(raw)
	}
	openShop(t, box)
	raw := toolTar(t, box, "uploaded") // more than a request with JSON may have
	if code, body := call(keeper, "PUT", "/v1/images/tool", "", bytes.NewReader(raw)); code != http.StatusOK {
		t.Errorf("import: %d %s", code, body)
	}
	if code, body := call(keeper, "POST", "/v1/images/pull", "", strings.NewReader(`{"name":"pulled","ref":"registry.vendor.test/tools/tool:1.2"}`)); code != http.StatusOK || !strings.Contains(body, `"image":{`) {
		t.Errorf("pull: %d %s", code, body)
	}
	for _, bad := range []string{"127.0.0.1:1", "loopback.vendor.test", "rebind.vendor.test", "[fd00:ec2::254]:80"} {
		if code, body := call(keeper, "POST", "/v1/images/pull", "", strings.NewReader(`{"name":"bad","ref":"`+bad+`/x:1"}`)); !strings.Contains(body, `"reason":"private-answer"`) {
			t.Errorf("pull from %s: %d %s", bad, code, body)
		}
	}
	for _, who := range []struct{ key, agent string }{{reader, ""}, {keeper, "m"}} {
		for _, r := range []struct{ method, route, body string }{
			{"PUT", "/v1/images/bad", "tar"}, {"POST", "/v1/images/pull", `{"name":"bad","ref":"x"}`}, {"POST", "/v1/images/build", `{"name":"bad","suite":"s"}`},
			{"POST", "/v1/images/gc", ""}, {"DELETE", "/v1/images/tool", ""},
		} {
			if code, body := call(who.key, r.method, r.route, who.agent, strings.NewReader(r.body)); code != http.StatusForbidden {
				t.Errorf("%s %s by who may not: %d %s", r.method, r.route, code, body)
			}
		}
	}
	if code, body := call(keeper, "POST", "/v1/images/build", "", strings.NewReader(`{"name":"bad","suite":"s"}`)); code != http.StatusForbidden || !strings.Contains(body, "order-unsigned") {
		t.Errorf("a build where kids are signed for: %d %s", code, body)
	}
	if got := images(t, box); got != "pulled true 0, tool true 0, 0 leftovers" {
		t.Errorf("images: %s", got)
	}
	box.WaitRecord("a private address", func(r *audit.Record) bool {
		return r.Event == audit.EventImageRefused && r.Actor == "key:keeper" && r.Outcome == audit.OutcomeDeny && r.Reason == reason.PrivateAnswer
	})
	if code, body := call(keeper, "DELETE", "/v1/images/tool", "", nil); code != http.StatusNoContent {
		t.Errorf("rm: %d %s", code, body)
	}
}

// TestImagesOverHTTPAreBrokenOff: whoever is killed while an image comes over the API, nothing of it stays; where the disk is
// full it is refused.
func TestImagesOverHTTPAreBrokenOff(t *testing.T) {
	t.Parallel()
	box := testenv.Start(t)
	s, _ := openShop(t, box)
	raw := toolTar(t, box, "half")
	pull := func(ctx context.Context, c *control.Client) error {
		return c.Each(ctx, http.MethodPost, "/v1/images/pull", wire.PullRequest{Name: "half", Ref: "registry.vendor.test/tools/tool:1.2"}, func(json.RawMessage) error { return nil })
	}
	push := func(ctx context.Context, c *control.Client) error {
		resp, err := c.Do(ctx, http.MethodPut, "/v1/images/half", io.MultiReader(bytes.NewReader(raw[:len(raw)/2]), stuck{ctx}), "application/x-tar")
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	}
	for name, c := range map[string]struct {
		do  func(context.Context, *control.Client) error
		end func(cancel func())
	}{
		"a pull whose sandboxd is killed":    {pull, func(func()) { box.Kill9(instance.Sandboxd) }},
		"a pull whose client goes away":      {pull, func(cancel func()) { cancel() }},
		"an import whose sandboxd is killed": {push, func(func()) { box.Kill9(instance.Sandboxd) }},
		"an import whose client goes away":   {push, func(cancel func()) { cancel() }},
	} {
		s.stalled = make(chan struct{})
		s.stall.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		client := box.Client(instance.Sandboxd)
		done := make(chan error, 1)
		go func() { done <- c.do(ctx, client) }()
		box.Until(soon, name, func() error {
			if got := images(t, box); got != "1 leftovers" {
				return errors.New(got)
			}
			return nil
		})
		c.end(cancel)
		box.WaitHealthy(instance.Sandboxd)
		cancel() // what a client would still send, it sends to nobody
		if err := <-done; err == nil {
			t.Errorf("%s: no error", name)
		}
		box.Until(soon, "nothing is left of "+name, func() error {
			if got := images(t, box); got != "0 leftovers" {
				return errors.New(got)
			}
			return nil
		})
	}
	s.stall.Store(false)
	c := box.Client(instance.Sandboxd)
	fullDisk(t, box, func() {
		if _, err := upload(t, c, "full", bytes.NewReader(raw)); control.Status(err) != http.StatusInsufficientStorage {
			t.Errorf("an import on a full disk: %v", err)
		}
		if err := pull(t.Context(), c); err != nil { // its frames were not looked at
			t.Errorf("a pull on a full disk: %v", err)
		}
		if got := images(t, box); got != "0 leftovers" {
			t.Errorf("on a full disk: %s", got)
		}
	})
	if _, err := upload(t, c, "half", bytes.NewReader(raw)); err != nil { // the control
		t.Error(err)
	}
	if got := images(t, box); got != "half true 0, 0 leftovers" {
		t.Errorf("with room: %s", got)
	}
}

// stuck is a source that gives nothing more.
type stuck struct{ ctx context.Context }

func (s stuck) Read([]byte) (int, error) {
	<-s.ctx.Done()
	return 0, s.ctx.Err()
}

// endless is a stream of bytes that never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// broken is a source that breaks off.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, errors.New("the test breaks it off") }
